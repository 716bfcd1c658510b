"""`moe_experts`: the reference, the grouping of rows by expert, and each tactic under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton.plugins_trt.fp8_linear import fp8_linear
from pelton.plugins_trt.int4_linear import dequantize, quantize_int4
from pelton.plugins_trt.moe_experts import (
    ACTIVATIONS,
    FLOAT,
    FP8,
    INT4,
    Stack,
    check,
    moe_experts,
    stack_fp8,
    stack_int4,
)
from pelton.plugins_trt.moe_experts_tactics import TACTICS, Problem, Tactic, default_tactic, supports
from support import kernel_cases, moe_kernels
from support.interpreted import interpreter

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter() as call:
        call(kernel_cases.correct_arithmetic)
        yield call


def name_of(tactic: Tactic) -> str:
    return f"{tactic.block_m}x{tactic.block_n}x{tactic.block_k}"


# Random calls of each tactic. Rounding to e4m3 takes the interpreter long.
CASES = {FLOAT: 12, INT4: 6, FP8: 4}


@pytest.mark.parametrize("tactic", TACTICS, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", CASES)
def test_each_tactic_equals_the_reference(
    interpreted: Callable[..., Any], form: str, dtype: str, tactic: Tactic
) -> None:
    if not supports(tactic, Problem(1, 1, 1, 1, 1, DTYPES[dtype], form)):
        assert dtype == "float32"
        return
    seed = 100 * list(DTYPES).index(dtype) + TACTICS.index(tactic)
    errors = interpreted(moe_kernels.moe_errors, form, tactic, DTYPES[dtype], seed, CASES[form])
    assert len(errors) == CASES[form]
    assert [case for case in errors if case[1] > 1] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", CASES)
def test_the_default_tactic_equals_the_reference(
    interpreted: Callable[..., Any], form: str, dtype: str
) -> None:
    errors = interpreted(moe_kernels.moe_errors, form, None, DTYPES[dtype], 7, CASES[form])
    assert [case for case in errors if case[1] > 1] == []


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("form", CASES)
def test_the_plugin_hands_its_inputs_to_the_kernels(
    interpreted: Callable[..., Any], form: str, seed: int
) -> None:
    assert interpreted(moe_kernels.plugin_error, form, seed) <= 1


@pytest.mark.parametrize("form", CASES)
def test_padding_does_not_reach_other_rows(interpreted: Callable[..., Any], form: str) -> None:
    beside, alone = interpreted(moe_kernels.with_and_without_padding, form)
    assert torch.isfinite(alone).all()
    assert torch.equal(beside, alone)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (1, 2, 5), (40, 2, 3), (700, 2, 7), (9, 8, 64)]
)
def test_rows_are_grouped_by_expert(
    interpreted: Callable[..., Any], num_tokens: int, top_k: int, num_experts: int
) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=random, dtype=torch.int32)
    ids[ids == 1] = 0  # an expert without rows
    block_m, rows = 16, num_tokens * top_k
    tile_expert, tile_rows = interpreted(moe_kernels.grouped, ids, num_experts, block_m)
    expected = []
    for expert in range(num_experts):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        for start in range(0, len(mine), block_m):
            part = mine[start : start + block_m]
            expected.append((expert, part + [rows] * (block_m - len(part))))
    used = [tile for tile in zip(tile_expert, tile_rows, strict=True) if tile[0] >= 0]
    assert used == expected
    assert tile_expert[len(used) :] == [-1] * (len(tile_expert) - len(used))


def test_the_number_of_tiles_is_enough_for_the_worst_spread() -> None:
    for rows, num_experts, block_m in ((1, 8, 16), (8, 8, 16), (100, 8, 16), (33, 2, 16), (64, 64, 32)):
        others = min(num_experts, rows) - 1  # one row each, which fills the most tiles
        worst = others + -(-(rows - others) // block_m)
        assert Problem(rows, 1, num_experts, 1, 1, torch.float16).max_tiles(block_m) >= worst


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_the_contract(activation: str) -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(3, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    ids, weights = torch.tensor([[0, 3], [2, 2], [3, 1]], dtype=torch.int32), torch.rand(3, 2)
    act = {
        "silu": torch.nn.SiLU(),
        "gelu": torch.nn.GELU(),
        "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    }[activation]
    expected = torch.zeros(3, 8)
    for t in range(3):
        for j in range(2):
            e = int(ids[t, j])
            expected[t] += weights[t, j] * (down[e] @ (act(gate_up[e, :6] @ x[t]) * (gate_up[e, 6:] @ x[t])))
    torch.testing.assert_close(moe_experts(x, weights, ids, gate_up, down, activation), expected)


def one_call() -> tuple[torch.Tensor, ...]:
    """x, router_weights, expert_ids, gate_up, down of 3 tokens, 2 of 4 experts, H 40 and I 24."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 3], [2, 2], [3, 0]], dtype=torch.int32)  # nothing for expert 1
    sizes = (3, 40), (3, 2), (4, 48, 40), (4, 40, 24)
    x, weights, gate_up, down = (torch.randn(size, generator=generator) for size in sizes)
    return x, weights, ids, gate_up, down


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, -1])
def test_int4_is_float_with_the_dequantised_weights(group_size: int, symmetric: bool) -> None:
    x, weights, ids, *floats = one_call()
    gate_up, down = (stack_int4(stack, group_size, symmetric) for stack in floats)
    out = moe_experts(
        x, weights, ids, gate_up.weight, down.weight, "silu",
        gate_up.scales, down.scales, gate_up.zeros, down.zeros, group_size,
    )  # fmt: skip
    dense = [
        torch.stack([
            dequantize(quantize_int4(weight, group_size, symmetric)) for weight in stack
        ]) for stack in floats
    ]  # fmt: skip
    torch.testing.assert_close(out, moe_experts(x, weights, ids, *dense, "silu"))


def test_fp8_is_fp8_linear_expert_by_expert() -> None:
    x, weights, ids, *floats = one_call()
    gate_up, down = (stack_fp8(stack) for stack in floats)
    out = moe_experts(
        x, weights, ids, gate_up.weight, down.weight, "silu", gate_up.scales, down.scales
    )  # fmt: skip
    expected = torch.zeros_like(x)
    for t in range(3):
        for j in range(2):
            (w, w_scale), (d, d_scale) = (
                (stack.weight[ids[t, j]], stack.scales[ids[t, j]]) for stack in (gate_up, down)
            )
            gate, up = fp8_linear(x[t : t + 1], w, w_scale, None).chunk(2, 1)
            hidden = torch.nn.functional.silu(gate) * up
            expected[t] += weights[t, j] * fp8_linear(hidden, d, d_scale, None)[0]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, "activation 'relu': one of silu"),
        ({"expert_ids": torch.zeros(2, 2, dtype=torch.int32)}, r"expert_ids: \[2, 2\], not \[3, k\]"),
        ({"router_weights": torch.ones(3, 1)}, r"router_weights: \[3, 1\], not \[3, 2\]"),
        ({"gate_up": Stack(torch.ones(4, 48, 39))}, r"gate_up: \[4, 48, 39\], not \[4, 48, 40\]"),
        ({"down": Stack(torch.ones(3, 40, 24))}, r"down: \[3, 40, 24\], not \[4, 40, 24\]"),
        ({"down": stack_fp8(torch.ones(4, 40, 24))}, "down: of form fp8, while gate_up is float"),
        ({"down": Stack(torch.ones(4, 40, 24), None, torch.ones(4, 1, 40))}, "both or neither"),
    ],
)
def test_what_the_contract_does_not_allow_is_named(changes: dict[str, Any], message: str) -> None:
    x, weights, ids, gate_up, down = one_call()
    arguments = {
        "x": x, "router_weights": weights, "expert_ids": ids, "gate_up": Stack(gate_up), "down": Stack(down),
        "activation": "silu",
    }  # fmt: skip
    check(**arguments)
    with pytest.raises(ValueError, match=message):
        check(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 48}, "group_size 48: one of"),
        ({"group_size": 32}, r"gate_up_scales: \[4, 1, 48\], not \[4, 2, 48\]"),
        ({"zeros": torch.ones(4, 2, 48)}, r"gate_up_zeros: \[4, 2, 48\], not \[4, 1, 48\]"),
        (
            {"weight": torch.zeros(4, 1, 48, 16, dtype=torch.int8)},
            r"gate_up: \[4, 1, 48, 16\], not \[4, 2, 48, 16\]",
        ),
    ],
)
def test_int4_stacks_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    x, weights, ids, *floats = one_call()
    gate_up, down = (stack_int4(stack, -1, symmetric=False) for stack in floats)
    check(x, weights, ids, gate_up, down, "silu")
    with pytest.raises(ValueError, match=message):
        check(x, weights, ids, replace(gate_up, **changes), down, "silu")


def test_fp8_stacks_have_no_zero_points() -> None:
    x, weights, ids, *floats = one_call()
    gate_up, down = (replace(stack_fp8(stack), zeros=torch.ones(4, 1, 48)) for stack in floats)
    with pytest.raises(ValueError, match="gate_up_zeros: a stack of form fp8 has no zero points"):
        check(x, weights, ids, gate_up, down, "silu")


def test_a_tile_of_int4_weights_lies_in_one_group() -> None:
    problem = Problem(100, 2, 8, 64, 64, torch.float16, INT4, 32)
    assert {tactic.block_k for tactic in TACTICS if supports(tactic, problem)} == {32}
    assert {tactic.block_k for tactic in TACTICS if supports(tactic, replace(problem, group_size=-1))} == {
        32,
        64,
    }


def test_there_is_a_tactic_for_every_problem() -> None:
    for dtype in DTYPES.values():
        for num_tokens in (1, 100, 8192):
            problem = Problem(num_tokens, 8, 64, 2048, 1024, dtype)
            assert supports(default_tactic(problem), problem)
    assert default_tactic(Problem(1, 8, 64, 2048, 1024, torch.float16)).block_m == 16
    assert default_tactic(Problem(8192, 8, 64, 2048, 1024, torch.float16)).block_m == 128


@pytest.mark.parametrize("form", CASES)
def test_the_operator_is_registered_with_its_shapes(form: str) -> None:
    x, weights, ids, *floats = one_call()
    quantise = {FLOAT: Stack, INT4: lambda w: stack_int4(w, 32, False), FP8: stack_fp8}[form]
    gate_up, down = (quantise(stack) for stack in floats)
    arguments = (
        x, weights, ids, gate_up.weight, down.weight, "silu",
        gate_up.scales, down.scales, gate_up.zeros, down.zeros, gate_up.group_size,
    )  # fmt: skip
    # The test of the schema alters its inputs arithmetically, which torch cannot do to e4m3.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic") + (("test_schema",) if form != FP8 else ())
    torch.library.opcheck(moe_experts, arguments, test_utils=tests)
