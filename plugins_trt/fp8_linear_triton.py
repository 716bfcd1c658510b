"""Triton kernels of `pelton::fp8_linear`; see `fp8_linear.py` for the contract. SM 8.9 and later.

Activations are quantised by a kernel of their own, once, rather than by every program that reads them; then

    out^T [N, M] = weight [N, K] @ q^T [K, M]

as in `int4_linear_triton.py`: the weight is the left operand, so that few rows of x waste little of the tensor cores,
and for few rows the input features are split over SPLIT_K programs whose float32 parts `split_k_triton.py` adds up.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from .architectures import ARCHITECTURES
from .fp8_linear import LARGEST, unsupported_reason
from .fp8_linear_tactics import QUANTIZE_BLOCK, TACTICS, Problem, default_tactic, supports, workspace_layout
from .linear_tactics import Tactic
from .split_k_triton import add_parts
from .triton_compile import KernelVariant
from .workspace import carve

_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def quantize_rows_kernel(
    x_ptr, input_scale_ptr, quantised_ptr, scale_ptr, in_features, STATIC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per row of x `[M, K]`: writes `quantised` `[M, K]` e4m3 and, unless STATIC, its scale `[M]`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_row, quantised_row = x_ptr + row * in_features, quantised_ptr + row * in_features
    if STATIC:
        scale = tl.load(input_scale_ptr)
    else:
        largest = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, in_features, BLOCK):
            x = tl.load(x_row + start + columns, mask=start + columns < in_features, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        magnitude = tl.max(largest, 0)
        scale = tl.where(magnitude == 0.0, 1.0, tl.div_rn(magnitude, _LARGEST))
        tl.store(scale_ptr + row, scale)
    for start in range(0, in_features, BLOCK):
        valid = start + columns < in_features
        x = tl.load(x_row + start + columns, mask=valid, other=0.0).to(tl.float32)
        scaled = tl.clamp(tl.div_rn(x, scale), -_LARGEST, _LARGEST)
        tl.store(quantised_row + start + columns, scaled.to(tl.float8e4nv), mask=valid)


@triton.jit
def fp8_linear_kernel(
    quantised_ptr, weight_ptr, scale_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    num_rows, in_features, out_features,
    PER_ROW: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, tile of output features, split).

    `scale_ptr` is `[M]` if PER_ROW, else `[1]`. `out_ptr` is `[M, N]`, or `[SPLIT_K, M, N]` float32 without the bias
    if SPLIT_K > 1.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    split = tl.program_id(2)
    valid_m, valid_n = m < num_rows, n < out_features
    x_rows = quantised_ptr + m.to(tl.int64) * in_features
    weight_rows = weight_ptr + n.to(tl.int64) * in_features

    num_tiles = tl.cdiv(in_features, BLOCK_K)
    tiles_per_split = tl.cdiv(num_tiles, SPLIT_K)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    acc = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    for tile in range(first, last):
        features = tile * BLOCK_K + k
        valid_k = features < in_features
        w = tl.load(
            weight_rows[:, None] + features[None, :], mask=valid_n[:, None] & valid_k[None, :], other=0.0
        )
        x = tl.load(x_rows[None, :] + features[:, None], mask=valid_k[:, None] & valid_m[None, :], other=0.0)
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=128 if BLOCK_K > 128 else BLOCK_K)

    if PER_ROW:
        acc *= tl.load(scale_ptr + m, mask=valid_m, other=0.0)[None, :]
    else:
        acc *= tl.load(scale_ptr)
    if PER_CHANNEL:
        acc *= tl.load(weight_scale_ptr + n, mask=valid_n, other=0.0)[:, None]
    else:
        acc *= tl.load(weight_scale_ptr)
    if HAS_BIAS and SPLIT_K == 1:
        acc += tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)[:, None]
    out_rows = out_ptr + (split * num_rows + m).to(tl.int64) * out_features
    valid = valid_n[:, None] & valid_m[None, :]
    tl.store(out_rows[None, :] + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=valid)


def quantize_rows(x: Tensor, input_scale: Tensor | None, quantised: Tensor, scale: Tensor) -> None:
    """Write the contiguous `x` `[M, K]` into `quantised`, float8_e4m3fn of its shape, and what it is divided by into
    `scale` `[M]` unless it is `input_scale` `[1]`."""
    num_rows, in_features = x.shape
    quantize_rows_kernel[num_rows,](
        x, input_scale, quantised, scale, in_features, STATIC=input_scale is not None, BLOCK=QUANTIZE_BLOCK
    )


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None = None,
    *,
    tactic: Tactic | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """The operator, on tensors of one device. `out`: contiguous `[..., N]` to write into.

    Pass a flat `workspace` (sized by `workspace_layout`) where allocating is not wanted.
    """
    out_features, in_features = weight.shape
    rows = x.reshape(-1, in_features).contiguous()
    num_rows = rows.shape[0]
    problem = Problem(num_rows, out_features, in_features)
    if tactic is None:
        tactic = default_tactic(problem)
    elif not supports(tactic, problem):
        raise ValueError(f"{tactic} does not support {problem}")
    if out is None:
        out = x.new_empty(*x.shape[:-1], out_features)
    if num_rows == 0:
        return out
    layout = workspace_layout(problem, tactic, is_static=input_scale is not None)
    scratch = carve(layout, workspace, x.device)
    quantised, parts = scratch["quantised"], scratch.get("parts")
    scale = scratch["scale"] if input_scale is None else input_scale
    quantize_rows(rows, input_scale, quantised, scale)
    fp8_linear_kernel[tactic.grid(num_rows, out_features)](
        quantised, weight, scale, weight_scale, bias, out if parts is None else parts,
        num_rows, in_features, out_features,
        PER_ROW=input_scale is None, PER_CHANNEL=weight_scale.numel() > 1, HAS_BIAS=bias is not None,
        BLOCK_M=tactic.block_m, BLOCK_N=tactic.block_n, BLOCK_K=tactic.block_k, SPLIT_K=tactic.split_k,
        num_warps=tactic.num_warps, num_stages=tactic.num_stages,
    )  # fmt: skip
    if parts is not None:
        add_parts(parts, bias, out)
    return out


def _architectures() -> tuple[int, ...]:
    return tuple(arch for arch in ARCHITECTURES if unsupported_reason(arch) is None)


def quantize_variant(dtype: str, *, static: bool, aligned: bool = True) -> KernelVariant:
    """`quantize_rows_kernel` for x of `dtype` (`fp16`, `bf16` or `fp32`); `aligned`: K is a multiple of 16."""
    given, absent = ("input_scale_ptr", "scale_ptr") if static else ("scale_ptr", "input_scale_ptr")
    return KernelVariant(
        name=f"fp8_linear quantize_rows {dtype} {'static' if static else 'dynamic'}",
        kernel=quantize_rows_kernel,
        signature={
            "x_ptr": f"*{dtype}:16",
            given: "*fp32",
            "quantised_ptr": "*fp8e4nv:16",
            "in_features": "i32:16",
        },
        constants={absent: None, "STATIC": static, "BLOCK": QUANTIZE_BLOCK},
        num_warps=4,
        num_stages=3,
        architectures=_architectures(),
    )


def kernel_variant(
    tactic: Tactic,
    dtype: str,
    *,
    per_row: bool,
    per_channel: bool,
    has_bias: bool = False,
    aligned: bool = True,
) -> KernelVariant:
    """`fp8_linear_kernel` for an output of `dtype` (`fp16`, `bf16` or `fp32`).

    Pointers other than scales are promised to be multiples of 16, and so are K and N if `aligned`.
    """
    is_split = tactic.split_k > 1
    size = "i32:16" if aligned else "i32"
    signature = {
        "quantised_ptr": "*fp8e4nv:16",
        "weight_ptr": "*fp8e4nv:16",
        "scale_ptr": "*fp32",
        "weight_scale_ptr": "*fp32",
        "out_ptr": "*fp32:16" if is_split else f"*{dtype}:16",
        "num_rows": "i32",
        "in_features": size,
        "out_features": size,
    }
    constants: dict[str, object] = {
        "PER_ROW": per_row,
        "PER_CHANNEL": per_channel,
        "HAS_BIAS": has_bias and not is_split,
        "BLOCK_M": tactic.block_m,
        "BLOCK_N": tactic.block_n,
        "BLOCK_K": tactic.block_k,
        "SPLIT_K": tactic.split_k,
    }
    if constants["HAS_BIAS"]:
        signature["bias_ptr"] = f"*{dtype}:16"
    else:
        constants["bias_ptr"] = None
    return KernelVariant(
        name=f"fp8_linear {dtype} {tactic.block_m}x{tactic.block_n}x{tactic.block_k} split {tactic.split_k}"
        + ("" if per_row else " static")
        + ("" if per_channel else " per-tensor")
        + (" bias" if constants["HAS_BIAS"] else ""),
        kernel=fp8_linear_kernel,
        signature=signature,
        constants=constants,
        num_warps=tactic.num_warps,
        num_stages=tactic.num_stages,
        architectures=_architectures(),
    )


def report_variants() -> Iterator[KernelVariant]:
    """Every tile for bfloat16, unsplit and split; the options of a layer on the first tile."""
    for static in (False, True):
        yield quantize_variant("bf16", static=static)
    tiles = [tactic for tactic in TACTICS if tactic.split_k in (1, 4)]
    for tactic in tiles:
        variant = kernel_variant(tactic, "bf16", per_row=True, per_channel=True)
        yield replace(variant, is_quick=tactic in (tiles[0], tiles[-1]))
    yield kernel_variant(tiles[0], "fp16", per_row=False, per_channel=False, has_bias=True)
