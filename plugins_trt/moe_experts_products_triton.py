"""The two products of `pelton::moe_experts` for float and fp8 stacks, as Triton kernels; fp8: SM 8.9 and later.

    hidden    gate_up_kernel:  [R, I]   activation(gate) * up
    outputs   down_kernel:     [R, H]   each expert's output

As in `int4_linear_triton.py` the weight is the left operand of each product, so that experts with few rows waste
little of the tensor cores. Tiles of rows are those of `moe_experts_rows_triton.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from .architectures import ARCHITECTURES
from .fp8_linear import unsupported_reason
from .fp8_linear_triton import quantize_rows
from .moe_experts import FLOAT, FP8, Stack
from .moe_experts_tactics import Tactic
from .triton_compile import KernelVariant


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * z))


@triton.jit
def gate_up_kernel(
    x_ptr, x_scale_ptr, gate_up_ptr, weight_scale_ptr, tile_expert_ptr, tile_rows_ptr, hidden_ptr,
    num_rows, hidden_size, intermediate_size,
    IS_FP8: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden[r, n] of one tile of rows and BLOCK_N of the I features.

    IS_FP8: x and weights are e4m3, x_scale `[T]` and weight_scale `[E, 2I]` float32; else the scales are None.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    token = row // TOP_K
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_m, valid_n = row < num_rows, n < intermediate_size
    precision: tl.constexpr = "tf32x3" if x_ptr.dtype.element_ty == tl.float32 else "tf32"
    imprecise: tl.constexpr = BLOCK_K if IS_FP8 else 0
    x_rows = x_ptr + token.to(tl.int64) * hidden_size
    gate_rows = gate_up_ptr + (expert.to(tl.int64) * 2 * intermediate_size + n) * hidden_size
    up_offset = intermediate_size.to(tl.int64) * hidden_size
    gate = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    up = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    for start in range(0, hidden_size, BLOCK_K):
        valid_k = start + k < hidden_size
        mask = valid_n[:, None] & valid_k[None, :]
        gate_ptr = gate_rows[:, None] + start + k[None, :]  # [BLOCK_N, BLOCK_K]
        x = tl.load(x_rows[None, :] + start + k[:, None], mask=valid_k[:, None] & valid_m[None, :], other=0.0)
        w = tl.load(gate_ptr, mask=mask, other=0.0)
        gate = tl.dot(w, x, gate, input_precision=precision, max_num_imprecise_acc=imprecise)
        w = tl.load(gate_ptr + up_offset, mask=mask, other=0.0)
        up = tl.dot(w, x, up, input_precision=precision, max_num_imprecise_acc=imprecise)
    if IS_FP8:
        x_scale = tl.load(x_scale_ptr + token, mask=valid_m, other=0.0)[None, :]
        scales = weight_scale_ptr + expert.to(tl.int64) * 2 * intermediate_size + n
        gate *= x_scale * tl.load(scales, mask=valid_n, other=0.0)[:, None]
        up *= x_scale * tl.load(scales + intermediate_size, mask=valid_n, other=0.0)[:, None]
    hidden = activate(gate, ACTIVATION) * up
    hidden_rows = hidden_ptr + row.to(tl.int64) * intermediate_size
    mask = valid_n[:, None] & valid_m[None, :]
    tl.store(hidden_rows[None, :] + n[:, None], hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def down_kernel(
    hidden_ptr, hidden_scale_ptr, down_ptr, weight_scale_ptr, tile_expert_ptr, tile_rows_ptr, outputs_ptr,
    num_rows, hidden_size, intermediate_size,
    IS_FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """outputs[r, n] of one tile of rows and BLOCK_N of the H features.

    IS_FP8: hidden and weights are e4m3, hidden_scale `[R]` and weight_scale `[E, H]` float32; else the scales are None.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_m, valid_n = row < num_rows, n < hidden_size
    precision: tl.constexpr = "tf32x3" if hidden_ptr.dtype.element_ty == tl.float32 else "tf32"
    imprecise: tl.constexpr = BLOCK_K if IS_FP8 else 0
    hidden_rows = hidden_ptr + row.to(tl.int64) * intermediate_size
    down_rows = down_ptr + (expert.to(tl.int64) * hidden_size + n) * intermediate_size
    acc = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    for start in range(0, intermediate_size, BLOCK_K):
        valid_k = start + k < intermediate_size
        weight = tl.load(
            down_rows[:, None] + start + k[None, :], mask=valid_n[:, None] & valid_k[None, :], other=0.0
        )
        hidden = tl.load(
            hidden_rows[None, :] + start + k[:, None], mask=valid_k[:, None] & valid_m[None, :], other=0.0
        )
        acc = tl.dot(weight, hidden, acc, input_precision=precision, max_num_imprecise_acc=imprecise)
    if IS_FP8:
        acc *= tl.load(hidden_scale_ptr + row, mask=valid_m, other=0.0)[None, :]
        scales = weight_scale_ptr + expert.to(tl.int64) * hidden_size + n
        acc *= tl.load(scales, mask=valid_n, other=0.0)[:, None]
    output_rows = outputs_ptr + row.to(tl.int64) * hidden_size
    mask = valid_n[:, None] & valid_m[None, :]
    tl.store(output_rows[None, :] + n[:, None], acc.to(outputs_ptr.dtype.element_ty), mask=mask)


def products(
    x: Tensor,
    scratch: Mapping[str, Tensor],
    gate_up: Stack,
    down: Stack,
    *,
    top_k: int,
    activation: str,
    tactic: Tactic,
) -> Tensor:
    """x `[T, H]` through both products: each expert's output `[R, H]`.

    `scratch` is that of `moe_experts_tactics.workspace_layout`, its rows grouped.
    """
    num_tokens, hidden_size = x.shape
    intermediate_size, max_tiles = gate_up.weight.shape[1] // 2, scratch["tile_expert"].numel()
    rows, is_fp8 = num_tokens * top_k, gate_up.form == FP8
    tiles = scratch["tile_expert"], scratch["tile_rows"]
    hidden, outputs = scratch["hidden"], scratch["outputs"]
    sizes = rows, hidden_size, intermediate_size
    options = {"IS_FP8": is_fp8, **tactic.options()}
    values, scales = _rounded(x, "x", scratch) if is_fp8 else (x, None)
    gate_up_kernel[max_tiles, triton.cdiv(intermediate_size, tactic.block_n)](
        values, scales, gate_up.weight, gate_up.scales, *tiles, hidden, *sizes,
        TOP_K=top_k, ACTIVATION=activation, **options,
    )  # fmt: skip
    values, scales = _rounded(hidden, "hidden", scratch) if is_fp8 else (hidden, None)
    down_kernel[max_tiles, triton.cdiv(hidden_size, tactic.block_n)](
        values, scales, down.weight, down.scales, *tiles, outputs, *sizes, **options
    )
    return outputs


def _rounded(rows: Tensor, name: str, scratch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`rows` in e4m3 and the scale of each, in their places of `scratch`."""
    values, scale = scratch[f"{name}_values"], scratch[f"{name}_scale"]
    quantize_rows(rows, None, values, scale)
    return values, scale


def product_variants(
    tactic: Tactic, dtype: str, *, form: str = FLOAT, top_k: int, activation: str, aligned: bool = True
) -> tuple[KernelVariant, KernelVariant]:
    """`gate_up_kernel` and `down_kernel` for x of `dtype` (`fp16`, `bf16` or `fp32`).

    Pointers to x and weights are promised to be multiples of 16, and so are H and I if `aligned`.
    """
    is_fp8 = form == FP8
    tensor, operand = f"*{dtype}:16", "*fp8e4nv:16" if is_fp8 else f"*{dtype}:16"
    tiles = {"tile_expert_ptr": "*i32", "tile_rows_ptr": "*i32"}
    size = "i32:16" if aligned else "i32"
    sizes = {"num_rows": "i32", "hidden_size": size, "intermediate_size": size}
    constants = {"IS_FP8": is_fp8, **tactic.blocks()}
    name = f"{dtype} {tactic.block_m}x{tactic.block_n}x{tactic.block_k}{' fp8' if is_fp8 else ''}"

    def variant(
        title: str, kernel: object, pointers: dict[str, str], scales: tuple[str, ...], **more: object
    ) -> KernelVariant:
        typed = dict.fromkeys(scales, "*fp32") if is_fp8 else {}
        absent = {} if is_fp8 else dict.fromkeys(scales)
        return KernelVariant(
            name=f"moe_experts {title} {name}",
            kernel=kernel,
            signature={**pointers, **typed, **tiles, **sizes},
            constants={**constants, **more, **absent},
            num_warps=tactic.num_warps,
            num_stages=tactic.num_stages,
            architectures=tuple(
                arch for arch in ARCHITECTURES if not is_fp8 or unsupported_reason(arch) is None
            ),
        )

    return (
        variant(
            f"gate_up {activation}",
            gate_up_kernel,
            {"x_ptr": operand, "gate_up_ptr": operand, "hidden_ptr": tensor},
            ("x_scale_ptr", "weight_scale_ptr"),
            TOP_K=top_k,
            ACTIVATION=activation,
        ),
        variant(
            "down",
            down_kernel,
            {"hidden_ptr": operand, "down_ptr": operand, "outputs_ptr": tensor},
            ("hidden_scale_ptr", "weight_scale_ptr"),
        ),
    )
