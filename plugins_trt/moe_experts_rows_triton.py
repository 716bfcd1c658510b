"""Triton kernels of `pelton::moe_experts` around its products: rows are grouped by expert, and summed by token.

A routed row r is token r // k on its way to its expert number r % k. Rows are grouped by expert on the device, into
tiles that each belong to one expert, so that its weights are read once per tile and the host need not know how the
router chose:

    tile            0          1          2          3          4
    tile_expert     0          0          2          5         -1        experts without rows have no tile
    tile_rows   [ 3 7 8 9 ][11 R R R ][ 0 4 5 R ][ 1 2 6 10][    ...   ] R = number of rows: empty place

There are no atomics: places are found by counting, so equal inputs give equal bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .moe_experts_tactics import GROUP_BLOCK, SUM_BLOCK
from .triton_compile import KernelVariant


@triton.jit
def count_rows_kernel(expert_ids_ptr, counts_ptr, num_rows, BLOCK: tl.constexpr):
    """counts[e] = rows of expert e; one program per expert."""
    expert = tl.program_id(0)
    count = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        count += (tl.load(expert_ids_ptr + row, mask=row < num_rows, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, 0))


@triton.jit
def place_rows_kernel(
    expert_ids_ptr, counts_ptr, tile_expert_ptr, tile_rows_ptr, num_rows, num_experts, max_tiles,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the tiles of one expert per program; the program after the last expert marks the tiles that are left.

    EXPERTS: a power of two, at least `num_experts`.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    if expert == num_experts:
        for start in range(first, max_tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(tile_expert_ptr + tile, tl.full([BLOCK], -1, tl.int32), mask=tile < max_tiles)
    else:
        last = first + tl.sum(tl.where(experts == expert, tiles, 0), 0)
        for start in range(first, last, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(tile_expert_ptr + tile, tl.full([BLOCK], 0, tl.int32) + expert, mask=tile < last)
        place = first * BLOCK_M
        for start in range(0, num_rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            mine = (tl.load(expert_ids_ptr + row, mask=row < num_rows, other=-1) == expert).to(tl.int32)
            tl.store(tile_rows_ptr + place + tl.cumsum(mine, 0) - 1, row, mask=mine > 0)
            place += tl.sum(mine, 0)
        for start in range(place, last * BLOCK_M, BLOCK):
            empty = start + tl.arange(0, BLOCK)
            tl.store(
                tile_rows_ptr + empty, tl.full([BLOCK], 0, tl.int32) + num_rows, mask=empty < last * BLOCK_M
            )


@triton.jit
def sum_kernel(
    outputs_ptr,
    router_weights_ptr,
    out_ptr,
    num_outputs,
    hidden_size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per `BLOCK` of the `num_outputs` = T * H outputs."""
    output = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = output < num_outputs
    token, column = output // hidden_size, output % hidden_size
    total = tl.full([BLOCK], 0.0, tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        weight = tl.load(router_weights_ptr + row, mask=valid, other=0.0)
        total += weight * tl.load(outputs_ptr + row * hidden_size + column, mask=valid, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty), mask=valid)


def group_rows(expert_ids: Tensor, counts: Tensor, tile_expert: Tensor, tile_rows: Tensor) -> None:
    """Fill `counts` `[E]`, `tile_expert` `[max_tiles]`, `tile_rows` `[max_tiles, block_m]`, int32, as drawn above."""
    num_rows, num_experts = expert_ids.numel(), counts.numel()
    max_tiles, block_m = tile_rows.shape
    count_rows_kernel[num_experts,](expert_ids, counts, num_rows, BLOCK=GROUP_BLOCK)
    place_rows_kernel[num_experts + 1,](
        expert_ids, counts, tile_expert, tile_rows, num_rows, num_experts, max_tiles,
        BLOCK_M=block_m, EXPERTS=triton.next_power_of_2(num_experts), BLOCK=GROUP_BLOCK,
    )  # fmt: skip


def sum_rows(outputs: Tensor, router_weights: Tensor, out: Tensor) -> None:
    """out `[T, H]` of outputs `[T * k, H]` and router_weights `[T, k]`."""
    top_k, hidden_size = router_weights.shape[1], out.shape[1]
    sum_kernel[triton.cdiv(out.numel(), SUM_BLOCK),](
        outputs, router_weights, out, out.numel(), hidden_size, TOP_K=top_k, BLOCK=SUM_BLOCK
    )


def group_variants(num_experts: int, block_m: int) -> tuple[KernelVariant, KernelVariant]:
    """The two kernels that group rows, in the order of their launches."""
    ids = {"expert_ids_ptr": "*i32", "counts_ptr": "*i32"}
    places = ids | {"tile_expert_ptr": "*i32", "tile_rows_ptr": "*i32"}
    sizes = {"num_rows": "i32", "num_experts": "i32", "max_tiles": "i32"}
    experts = triton.next_power_of_2(num_experts)
    block: dict[str, object] = {"BLOCK": GROUP_BLOCK}
    return (
        KernelVariant("moe_experts count_rows", count_rows_kernel, ids | {"num_rows": "i32"}, block, 4, 3),
        KernelVariant(
            f"moe_experts place_rows {block_m} of up to {experts} experts",
            place_rows_kernel,
            places | sizes,
            block | {"BLOCK_M": block_m, "EXPERTS": experts},
            4,
            3,
        ),
    )


def sum_variant(dtype: str, *, top_k: int) -> KernelVariant:
    """`sum_kernel` for x of `dtype`."""
    signature = {"outputs_ptr": f"*{dtype}:16", "router_weights_ptr": "*fp32", "out_ptr": f"*{dtype}:16"}
    sizes = {"num_outputs": "i32", "hidden_size": "i32"}
    constants: dict[str, object] = {"TOP_K": top_k, "BLOCK": SUM_BLOCK}
    return KernelVariant(f"moe_experts sum {dtype}", sum_kernel, signature | sizes, constants, 4, 3)
