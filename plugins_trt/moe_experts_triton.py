"""Triton kernels of `pelton::moe_experts`; see `moe_experts.py` for the contract.

A routed row r is token r // k on its way to its expert number r % k. Rows are grouped by expert on the device, into
tiles that each belong to one expert, so that its weights are read once per tile and the host need not know how the
router chose:

    tile            0          1          2          3          4
    tile_expert     0          0          2          5         -1        experts without rows have no tile
    tile_rows   [ 3 7 8 9 ][11 R R R ][ 0 4 5 R ][ 1 2 6 10][    ...   ] R = number of rows: empty place

    group     count_rows_kernel, place_rows_kernel
    hidden    gate_up_kernel:  [R, I]   activation(gate) * up
    outputs   down_kernel:     [R, H]   each expert's output
    out       sum_kernel:      [T, H]   weighted sum over a token's k rows, in order

There are no atomics: places are found by counting, so equal inputs give equal bits. As in `int4_linear_triton.py` the
weight is the left operand of each product, so that experts with few rows waste little of the tensor cores.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .moe_experts import ACTIVATIONS
from .moe_experts_tactics import GROUP_BLOCK, SUM_BLOCK, TACTICS, Problem, Tactic, default_tactic, supports
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
def _activate(gate, ACTIVATION: tl.constexpr):
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
    x_ptr, gate_up_ptr, tile_expert_ptr, tile_rows_ptr, hidden_ptr,
    num_rows, hidden_size, intermediate_size,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden[r, n] of one tile of rows and BLOCK_N of the I features."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_m, valid_n = row < num_rows, n < intermediate_size
    precision: tl.constexpr = "tf32x3" if x_ptr.dtype.element_ty == tl.float32 else "tf32"
    x_rows = x_ptr + (row // TOP_K).to(tl.int64) * hidden_size
    gate_rows = gate_up_ptr + (expert.to(tl.int64) * 2 * intermediate_size + n) * hidden_size
    up_offset = intermediate_size.to(tl.int64) * hidden_size
    gate = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    up = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    for start in range(0, hidden_size, BLOCK_K):
        valid_k = start + k < hidden_size
        weight_mask = valid_n[:, None] & valid_k[None, :]
        weight_ptr = gate_rows[:, None] + start + k[None, :]  # [BLOCK_N, BLOCK_K]
        x = tl.load(x_rows[None, :] + start + k[:, None], mask=valid_k[:, None] & valid_m[None, :], other=0.0)
        gate = tl.dot(tl.load(weight_ptr, mask=weight_mask, other=0.0), x, gate, input_precision=precision)
        up = tl.dot(
            tl.load(weight_ptr + up_offset, mask=weight_mask, other=0.0), x, up, input_precision=precision
        )
    hidden = _activate(gate, ACTIVATION) * up
    hidden_rows = hidden_ptr + row.to(tl.int64) * intermediate_size
    mask = valid_n[:, None] & valid_m[None, :]
    tl.store(hidden_rows[None, :] + n[:, None], hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def down_kernel(
    hidden_ptr, down_ptr, tile_expert_ptr, tile_rows_ptr, outputs_ptr,
    num_rows, hidden_size, intermediate_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """outputs[r, n] of one tile of rows and BLOCK_N of the H features."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_m, valid_n = row < num_rows, n < hidden_size
    precision: tl.constexpr = "tf32x3" if hidden_ptr.dtype.element_ty == tl.float32 else "tf32"
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
        acc = tl.dot(weight, hidden, acc, input_precision=precision)
    output_rows = outputs_ptr + row.to(tl.int64) * hidden_size
    mask = valid_n[:, None] & valid_m[None, :]
    tl.store(output_rows[None, :] + n[:, None], acc.to(outputs_ptr.dtype.element_ty), mask=mask)


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


def group_rows(expert_ids: Tensor, num_experts: int, block_m: int, max_tiles: int) -> tuple[Tensor, Tensor]:
    """(tile_expert `[max_tiles]`, tile_rows `[max_tiles, block_m]`), int32, as drawn above."""
    num_rows = expert_ids.numel()
    counts = expert_ids.new_empty(num_experts)
    tile_expert = expert_ids.new_empty(max_tiles)
    tile_rows = expert_ids.new_empty(max_tiles, block_m)
    count_rows_kernel[num_experts,](expert_ids, counts, num_rows, BLOCK=GROUP_BLOCK)
    place_rows_kernel[num_experts + 1,](
        expert_ids, counts, tile_expert, tile_rows, num_rows, num_experts, max_tiles,
        BLOCK_M=block_m, EXPERTS=triton.next_power_of_2(num_experts), BLOCK=GROUP_BLOCK,
    )  # fmt: skip
    return tile_expert, tile_rows


def moe_experts(
    x: Tensor,
    router_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    *,
    tactic: Tactic | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The operator, on contiguous tensors of one device. `out`: `[T, H]` to write into."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: one of {', '.join(ACTIVATIONS)}")
    num_experts, hidden_size, intermediate_size = down.shape
    num_tokens, top_k = expert_ids.shape
    problem = Problem(num_tokens, top_k, num_experts, hidden_size, intermediate_size, x.dtype)
    if tactic is None:
        tactic = default_tactic(problem)
    elif not supports(tactic, problem):
        raise ValueError(f"{tactic} does not support {problem}")
    if out is None:
        out = torch.empty_like(x)
    if num_tokens == 0:
        return out
    rows, max_tiles = problem.rows, problem.max_tiles(tactic.block_m)
    tiles = group_rows(expert_ids, num_experts, tactic.block_m, max_tiles)
    hidden, outputs = x.new_empty(rows, intermediate_size), x.new_empty(rows, hidden_size)
    sizes = rows, hidden_size, intermediate_size
    options = {
        "BLOCK_M": tactic.block_m,
        "BLOCK_N": tactic.block_n,
        "BLOCK_K": tactic.block_k,
        "num_warps": tactic.num_warps,
        "num_stages": tactic.num_stages,
    }
    gate_up_kernel[max_tiles, triton.cdiv(intermediate_size, tactic.block_n)](
        x, gate_up, *tiles, hidden, *sizes, TOP_K=top_k, ACTIVATION=activation, **options
    )
    down_kernel[max_tiles, triton.cdiv(hidden_size, tactic.block_n)](
        hidden, down, *tiles, outputs, *sizes, **options
    )
    sum_kernel[triton.cdiv(out.numel(), SUM_BLOCK),](
        outputs, router_weights, out, out.numel(), hidden_size, TOP_K=top_k, BLOCK=SUM_BLOCK
    )
    return out


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


def product_variants(
    tactic: Tactic, dtype: str, *, top_k: int, activation: str, aligned: bool = True
) -> tuple[KernelVariant, KernelVariant]:
    """`gate_up_kernel` and `down_kernel` for x of `dtype` (`fp16`, `bf16` or `fp32`).

    Pointers to x and weights are promised to be multiples of 16, and so are H and I if `aligned`.
    """
    tensor, tiles = f"*{dtype}:16", {"tile_expert_ptr": "*i32", "tile_rows_ptr": "*i32"}
    size = "i32:16" if aligned else "i32"
    sizes = {"num_rows": "i32", "hidden_size": size, "intermediate_size": size}
    blocks: dict[str, object] = {
        "BLOCK_M": tactic.block_m,
        "BLOCK_N": tactic.block_n,
        "BLOCK_K": tactic.block_k,
    }
    tile = f"{dtype} {tactic.block_m}x{tactic.block_n}x{tactic.block_k}"
    return (
        KernelVariant(
            f"moe_experts gate_up {activation} {tile}",
            gate_up_kernel,
            {"x_ptr": tensor, "gate_up_ptr": tensor, **tiles, "hidden_ptr": tensor, **sizes},
            blocks | {"TOP_K": top_k, "ACTIVATION": activation},
            tactic.num_warps,
            tactic.num_stages,
        ),
        KernelVariant(
            f"moe_experts down {tile}",
            down_kernel,
            {"hidden_ptr": tensor, "down_ptr": tensor, **tiles, "outputs_ptr": tensor, **sizes},
            blocks,
            tactic.num_warps,
            tactic.num_stages,
        ),
    )


def sum_variant(dtype: str, *, top_k: int) -> KernelVariant:
    """`sum_kernel` for x of `dtype`."""
    signature = {"outputs_ptr": f"*{dtype}:16", "router_weights_ptr": "*fp32", "out_ptr": f"*{dtype}:16"}
    sizes = {"num_outputs": "i32", "hidden_size": "i32"}
    constants: dict[str, object] = {"TOP_K": top_k, "BLOCK": SUM_BLOCK}
    return KernelVariant(f"moe_experts sum {dtype}", sum_kernel, signature | sizes, constants, 4, 3)


def report_variants() -> Iterator[KernelVariant]:
    """Every tile for bfloat16, the activations on the first."""
    yield from group_variants(128, TACTICS[0].block_m)
    for tactic in TACTICS:
        for variant in product_variants(tactic, "bf16", top_k=8, activation="silu"):
            yield replace(variant, is_quick=tactic is TACTICS[0])
    for activation in ("gelu", "gelu_tanh"):
        yield product_variants(TACTICS[0], "fp16", top_k=2, activation=activation)[0]
    yield sum_variant("bf16", top_k=8)
