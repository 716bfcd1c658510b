"""Triton kernels of `pelton::int4_linear`; see `int4_linear.py` for the contract and the layout.

Both uses are one kernel with different tiles. Each program computes a tile of the output, transposed: the weight is
the left operand of the tensor cores, so that the 16 rows which their left side needs are output features, of which
there are always enough, and few tokens waste little. Nibbles become exact small integers in the dtype of x in
registers, with two bitwise operations and a subtraction, and the scale multiplies the sum over each tile.

- Few rows (decode): reading the weights is all there is to do. The input features are split over SPLIT_K programs so
  that every multiprocessor reads; the parts are float32 and `split_k_triton.py` adds them in order.
- Many rows (prefill): larger tiles of rows, no split; programs that share weights run next to each other.

The integer trick (a nibble placed in the mantissa of a power of two) is from Kim et al., "Who Says Elephants Can't
Run", arXiv:2211.10017; split-K for 4-bit decoding from Hoque et al., arXiv:2402.00025.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from .int4_linear_tactics import PERMUTE_BLOCK, TACTICS, Problem, default_tactic, supports, workspace_layout
from .linear_tactics import Tactic
from .split_k_triton import add_parts
from .triton_compile import KernelVariant
from .workspace import carve


@triton.jit
def _exact(nibbles, zero, dtype: tl.constexpr):
    """`nibbles - zero` in dtype; both 0..15, int16. `zero` None: 8.

    No integer is converted for the 16-bit types: 0x6400 is 1024 in float16 and 0x4300 is 128 in bfloat16, and in both
    the last bit of the mantissa counts 1. The 8 must be a literal: what is computed of it would be moved out of the
    loop, and its layout with it, and the weights would go through shared memory to meet it.
    """
    if dtype == tl.float16:
        shifted = (nibbles | 0x6400).to(dtype, bitcast=True)
        return shifted - 1032.0 if zero is None else shifted - (zero | 0x6400).to(dtype, bitcast=True)
    elif dtype == tl.bfloat16:
        shifted = (nibbles | 0x4300).to(dtype, bitcast=True)
        return shifted - 136.0 if zero is None else shifted - (zero | 0x4300).to(dtype, bitcast=True)
    else:
        return (nibbles - (8 if zero is None else zero)).to(dtype)


@triton.jit
def _load_inputs(x_rows, perm_ptr, k, in_features, valid_m, HAS_PERM: tl.constexpr):
    """x^T at the stored features `k`: [len(k), BLOCK_M], zero outside of x."""
    valid = k < in_features
    feature = k
    if HAS_PERM:
        feature = tl.load(perm_ptr + k, mask=valid, other=0)
    return tl.load(x_rows[None, :] + feature[:, None], mask=valid[:, None] & valid_m[None, :], other=0.0)


@triton.jit
def _load_group(
    scales_ptr, zeros_ptr, start, group_size, in_features, n, out_features, HAS_ZEROS: tl.constexpr
):
    """Scales and zero points (as stored) of the output features `n`, for the group that feature `start` is in."""
    valid = (n < out_features) & (start < in_features)
    place = (start // group_size) * out_features + n
    scale = tl.load(scales_ptr + place, mask=valid, other=0.0)
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + place, mask=valid, other=0)
    else:
        zero = tl.full(n.shape, 8, tl.int8)
    return scale, zero


@triton.jit
def int4_product(
    x_rows, valid_m, qweight_ptr, scales_ptr, zeros_ptr, perm_ptr, n, valid_n, first, last,
    in_features, out_features, group_size,
    HAS_ZEROS: tl.constexpr, HAS_PERM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] float32: the output features `n` of the rows at `x_rows`, summed over the tiles `first` to
    `last` of input features.

    BLOCK_K divides the group size or there is one group. `group_size` is at least 1.
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    precision: tl.constexpr = "tf32x3" if dtype == tl.float32 else "tf32"
    byte = tl.arange(0, BLOCK_K // 2)
    block, column = byte // 16, byte % 16
    low = block * 32 + column  # features of the low nibbles; those of the high ones are 16 further
    rows_of_bytes = block[None, :] * out_features + n[:, None]  # [BLOCK_N, BLOCK_K // 2]
    tile_bytes = rows_of_bytes * 16 + column[None, :]

    acc = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    # Scales are loaded a tile ahead: pipelining leaves loads of a few bytes per thread where they stand. The zero
    # points cannot be carried along (their layout is that of an operand), but what is loaded ahead is in the L1 cache.
    scale, ahead = _load_group(
        scales_ptr, zeros_ptr, first * BLOCK_K, group_size, in_features, n, out_features, HAS_ZEROS
    )
    for tile in range(first, last):
        start = tile * BLOCK_K
        next_scale, next_ahead = _load_group(
            scales_ptr, zeros_ptr, start + BLOCK_K, group_size, in_features, n, out_features, HAS_ZEROS
        )
        if HAS_ZEROS:
            _, zero = _load_group(
                scales_ptr, zeros_ptr, start, group_size, in_features, n, out_features, HAS_ZEROS
            )
            zero = zero.to(tl.int16)[:, None]
        else:
            zero = None
        stored = valid_n[:, None] & (start + block * 32 < in_features)[None, :]
        tile_ptr = qweight_ptr + tl.cast(start // 32, tl.int64) * out_features * 16
        packed = tl.load(tile_ptr + tile_bytes, mask=stored, other=0).to(tl.int16)
        x_low = _load_inputs(x_rows, perm_ptr, start + low, in_features, valid_m, HAS_PERM)
        x_high = _load_inputs(x_rows, perm_ptr, start + low + 16, in_features, valid_m, HAS_PERM)
        part = tl.dot(_exact(packed & 15, zero, dtype), x_low, input_precision=precision)
        part = tl.dot(_exact((packed >> 4) & 15, zero, dtype), x_high, part, input_precision=precision)
        # Never negative; the test only keeps the early load of the zero points from being removed as unused.
        factor = tl.where(ahead >= 0, scale.to(tl.float32), 0.0)
        acc += part * factor[:, None]
        scale, ahead = next_scale, next_ahead
    return acc


@triton.jit
def int4_linear_kernel(
    x_ptr, qweight_ptr, scales_ptr, zeros_ptr, bias_ptr, perm_ptr, out_ptr,
    num_rows, in_features, out_features, group_size,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PERM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, tile of output features, split).

    `out_ptr` is `[M, N]`, or `[SPLIT_K, M, N]` float32 without the bias if SPLIT_K > 1. BLOCK_K and `group_size` as in
    `int4_product`.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    valid_m, valid_n = m < num_rows, n < out_features
    x_rows = x_ptr + m.to(tl.int64) * in_features

    num_tiles = tl.cdiv(in_features, BLOCK_K)
    tiles_per_split = tl.cdiv(num_tiles, SPLIT_K)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    acc = int4_product(
        x_rows, valid_m, qweight_ptr, scales_ptr, zeros_ptr, perm_ptr, n, valid_n, first, last,
        in_features, out_features, group_size, HAS_ZEROS, HAS_PERM, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip

    if HAS_BIAS and SPLIT_K == 1:
        acc += tl.load(bias_ptr + n, mask=valid_n, other=0.0).to(tl.float32)[:, None]
    out_rows = out_ptr + (split * num_rows + m).to(tl.int64) * out_features
    valid = valid_n[:, None] & valid_m[None, :]
    tl.store(out_rows[None, :] + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def permute_kernel(x_ptr, perm_ptr, out_ptr, in_features, BLOCK: tl.constexpr):
    """out[m, k] = x[m, perm[k]]; one program per row and `BLOCK` features."""
    row = tl.program_id(0).to(tl.int64) * in_features
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = k < in_features
    feature = tl.load(perm_ptr + k, mask=valid, other=0)
    tl.store(out_ptr + row + k, tl.load(x_ptr + row + feature, mask=valid), mask=valid)


def permute(x: Tensor, perm: Tensor, out: Tensor) -> None:
    """Write the features of the contiguous `x` `[M, K]` in stored order into `out`, which is like it."""
    num_rows, in_features = x.shape
    blocks = triton.cdiv(in_features, PERMUTE_BLOCK)
    permute_kernel[num_rows, blocks](x, perm, out, in_features, BLOCK=PERMUTE_BLOCK)


def int4_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bias: Tensor | None = None,
    perm: Tensor | None = None,
    *,
    tactic: Tactic | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """The operator, on tensors of one device. `out`: contiguous `[..., N]` to write into.

    Pass a flat `workspace` (sized by `workspace_layout`) where allocating is not wanted.
    """
    in_features, out_features = x.shape[-1], qweight.shape[1]
    rows = x.reshape(-1, in_features).contiguous()
    num_rows = rows.shape[0]
    problem = Problem(num_rows, out_features, in_features, group_size, x.dtype)
    if tactic is None:
        tactic = default_tactic(problem)
    elif not supports(tactic, problem):
        raise ValueError(f"{tactic} does not support {problem}")
    if out is None:
        out = x.new_empty(*x.shape[:-1], out_features)
    if num_rows == 0:
        return out
    scratch = carve(workspace_layout(problem, tactic, has_perm=perm is not None), workspace, x.device)
    if perm is not None and "permuted" in scratch:
        permute(rows, perm, scratch["permuted"])
        rows, perm = scratch["permuted"], None
    parts = scratch.get("parts")
    int4_linear_kernel[tactic.grid(num_rows, out_features)](
        rows, qweight, scales, zeros, bias, perm, out if parts is None else parts,
        num_rows, in_features, out_features, in_features if group_size == -1 else group_size,
        HAS_ZEROS=zeros is not None, HAS_BIAS=bias is not None, HAS_PERM=perm is not None,
        BLOCK_M=tactic.block_m, BLOCK_N=tactic.block_n, BLOCK_K=tactic.block_k, SPLIT_K=tactic.split_k,
        num_warps=tactic.num_warps, num_stages=tactic.num_stages,
    )  # fmt: skip
    if parts is not None:
        add_parts(parts, bias, out)
    return out


def kernel_variant(
    tactic: Tactic,
    dtype: str,
    *,
    has_zeros: bool,
    has_bias: bool = False,
    has_perm: bool = False,
    aligned: bool = True,
) -> KernelVariant:
    """`int4_linear_kernel` for `dtype` (`fp16`, `bf16` or `fp32`), scales in float16.

    Pointers are promised to be multiples of 16, and so are K and N if `aligned`.
    """
    is_split = tactic.split_k > 1
    constants: dict[str, object] = {
        "HAS_ZEROS": has_zeros,
        "HAS_BIAS": has_bias and not is_split,
        "HAS_PERM": has_perm,
        "BLOCK_M": tactic.block_m,
        "BLOCK_N": tactic.block_n,
        "BLOCK_K": tactic.block_k,
        "SPLIT_K": tactic.split_k,
    }
    pointers = {
        "x_ptr": f"*{dtype}:16",
        "qweight_ptr": "*i8:16",
        "scales_ptr": "*fp16:16",
        "zeros_ptr": "*i8:16" if has_zeros else None,
        "bias_ptr": f"*{dtype}:16" if constants["HAS_BIAS"] else None,
        "perm_ptr": "*i32:16" if has_perm else None,
        "out_ptr": "*fp32:16" if is_split else f"*{dtype}:16",
    }
    size = "i32:16" if aligned else "i32"
    sizes = {"num_rows": "i32", "in_features": size, "out_features": size, "group_size": size}
    flags = "".join(f" {flag}" for flag in ("zeros", "bias", "perm") if constants[f"HAS_{flag.upper()}"])
    return KernelVariant(
        name=f"int4_linear {dtype} {tactic.block_m}x{tactic.block_n}x{tactic.block_k} split {tactic.split_k}{flags}",
        kernel=int4_linear_kernel,
        signature={name: type for name, type in pointers.items() if type is not None} | sizes,
        constants=constants | {name: None for name, type in pointers.items() if type is None},
        num_warps=tactic.num_warps,
        num_stages=tactic.num_stages,
    )


def report_variants() -> Iterator[KernelVariant]:
    """Every tile in both 16-bit dtypes, unsplit and split; the options of a layer on the first tile."""
    tiles = [tactic for tactic in TACTICS if tactic.split_k in (1, 4)]
    for dtype in ("fp16", "bf16"):
        for tactic in tiles:
            is_quick = dtype == "bf16" and tactic in (tiles[0], tiles[-1])
            yield replace(kernel_variant(tactic, dtype, has_zeros=True), is_quick=is_quick)
    yield kernel_variant(tiles[0], "fp16", has_zeros=False)
    yield kernel_variant(tiles[0], "fp16", has_zeros=True, has_bias=True, has_perm=True)
    yield replace(kernel_variant(tiles[0], "fp32", has_zeros=True), is_hot=False)
    signature = {"x_ptr": "*fp16:16", "perm_ptr": "*i32:16", "out_ptr": "*fp16:16", "in_features": "i32:16"}
    yield KernelVariant(
        "int4_linear permute fp16", permute_kernel, signature, {"BLOCK": PERMUTE_BLOCK}, 4, 3, is_hot=False
    )
