"""The two products of `pelton::moe_experts` for int4 stacks, as Triton kernels.

The inner loop is that of `int4_linear_triton.py`: a stack is E weights of its layout, one after the other. A program of
the gate and up product reads BLOCK_N features of each, as one operand of twice as many rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from .int4_linear_triton import int4_product
from .moe_experts import Stack
from .moe_experts_products_triton import activate
from .moe_experts_tactics import Tactic
from .triton_compile import KernelVariant


@triton.jit
def _expert_product(
    x_rows, valid_m, expert, qweight_ptr, scales_ptr, zeros_ptr, n, valid_n, in_features, out_features, group_size,
    HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`int4_product` over all input features, with the weight of `expert`."""
    blocks, groups = tl.cdiv(in_features, 32), tl.cdiv(in_features, group_size)
    scales_offset = (expert.to(tl.int64) * groups) * out_features
    if HAS_ZEROS:
        zeros_ptr += scales_offset
    return int4_product(
        x_rows, valid_m, qweight_ptr + (expert.to(tl.int64) * blocks) * out_features * 16,
        scales_ptr + scales_offset, zeros_ptr, None, n, valid_n, 0, tl.cdiv(in_features, BLOCK_K),
        in_features, out_features, group_size, HAS_ZEROS, False, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def int4_gate_up_kernel(
    x_ptr, gate_up_ptr, scales_ptr, zeros_ptr, tile_expert_ptr, tile_rows_ptr, hidden_ptr,
    num_rows, hidden_size, intermediate_size, group_size,
    HAS_ZEROS: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden[r, n] of one tile of rows and BLOCK_N of the I features. BLOCK_K, `group_size`: as in `int4_product`."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    place = tl.arange(0, 2 * BLOCK_N)  # the tile's gate features, then its up features
    feature = tl.program_id(1) * BLOCK_N + place % BLOCK_N
    valid_m = row < num_rows
    both = _expert_product(
        x_ptr + (row // TOP_K).to(tl.int64) * hidden_size, valid_m, expert, gate_up_ptr, scales_ptr, zeros_ptr,
        feature + (place // BLOCK_N) * intermediate_size, feature < intermediate_size,
        hidden_size, 2 * intermediate_size, group_size, HAS_ZEROS, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(both, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
    hidden = activate(gate, ACTIVATION) * up
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    hidden_rows = hidden_ptr + row.to(tl.int64) * intermediate_size
    mask = (n < intermediate_size)[:, None] & valid_m[None, :]
    tl.store(hidden_rows[None, :] + n[:, None], hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def int4_down_kernel(
    hidden_ptr, down_ptr, scales_ptr, zeros_ptr, tile_expert_ptr, tile_rows_ptr, outputs_ptr,
    num_rows, hidden_size, intermediate_size, group_size,
    HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """outputs[r, n] of one tile of rows and BLOCK_N of the H features. BLOCK_K, `group_size`: as in `int4_product`."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_m, valid_n = row < num_rows, n < hidden_size
    acc = _expert_product(
        hidden_ptr + row.to(tl.int64) * intermediate_size, valid_m, expert, down_ptr, scales_ptr, zeros_ptr,
        n, valid_n, intermediate_size, hidden_size, group_size, HAS_ZEROS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    output_rows = outputs_ptr + row.to(tl.int64) * hidden_size
    mask = valid_n[:, None] & valid_m[None, :]
    tl.store(output_rows[None, :] + n[:, None], acc.to(outputs_ptr.dtype.element_ty), mask=mask)


def int4_products(
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
    intermediate_size, max_tiles = gate_up.weight.shape[2] // 2, scratch["tile_expert"].numel()
    rows, has_zeros = num_tokens * top_k, gate_up.zeros is not None
    tiles = scratch["tile_expert"], scratch["tile_rows"]
    hidden, outputs = scratch["hidden"], scratch["outputs"]
    sizes = rows, hidden_size, intermediate_size
    groups = [
        size if gate_up.group_size == -1 else gate_up.group_size for size in (hidden_size, intermediate_size)
    ]
    options = {"HAS_ZEROS": has_zeros, **tactic.options()}
    int4_gate_up_kernel[max_tiles, triton.cdiv(intermediate_size, tactic.block_n)](
        x, gate_up.weight, gate_up.scales, gate_up.zeros, *tiles, hidden, *sizes, groups[0],
        TOP_K=top_k, ACTIVATION=activation, **options,
    )  # fmt: skip
    int4_down_kernel[max_tiles, triton.cdiv(hidden_size, tactic.block_n)](
        hidden, down.weight, down.scales, down.zeros, *tiles, outputs, *sizes, groups[1], **options
    )
    return outputs


def int4_variants(
    tactic: Tactic, dtype: str, *, has_zeros: bool, top_k: int, activation: str, aligned: bool = True
) -> tuple[KernelVariant, KernelVariant]:
    """`int4_gate_up_kernel` and `int4_down_kernel` for x of `dtype` (`fp16`, `bf16` or `fp32`), scales in float16.

    Pointers are promised to be multiples of 16, and so are H, I and the group size if `aligned`.
    """
    tensor, size = f"*{dtype}:16", "i32:16" if aligned else "i32"
    sizes = {"num_rows": "i32", "hidden_size": size, "intermediate_size": size, "group_size": size}
    shared = {"scales_ptr": "*fp16:16", "tile_expert_ptr": "*i32", "tile_rows_ptr": "*i32", **sizes}
    constants: dict[str, object] = {"HAS_ZEROS": has_zeros, **tactic.blocks()}
    if has_zeros:
        shared["zeros_ptr"] = "*i8:16"
    else:
        constants["zeros_ptr"] = None
    name = f"{dtype} {tactic.block_m}x{tactic.block_n}x{tactic.block_k}{' zeros' if has_zeros else ''}"
    warps = tactic.num_warps, tactic.num_stages
    return (
        KernelVariant(
            f"moe_experts int4 gate_up {activation} {name}",
            int4_gate_up_kernel,
            {"x_ptr": tensor, "gate_up_ptr": "*i8:16", "hidden_ptr": tensor, **shared},
            constants | {"TOP_K": top_k, "ACTIVATION": activation},
            *warps,
        ),
        KernelVariant(
            f"moe_experts int4 down {name}",
            int4_down_kernel,
            {"hidden_ptr": tensor, "down_ptr": "*i8:16", "outputs_ptr": tensor, **shared},
            constants,
            *warps,
        ),
    )
