"""`moe_experts`: the reference, the grouping of rows by expert, and each tactic under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pelton.plugins_trt.moe_experts import ACTIVATIONS, moe_experts
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


@pytest.mark.parametrize("tactic", TACTICS, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_tactic_equals_the_reference(
    interpreted: Callable[..., Any], dtype: str, tactic: Tactic
) -> None:
    if not supports(tactic, Problem(1, 1, 1, 1, 1, DTYPES[dtype])):
        assert dtype == "float32"
        return
    seed = 100 * list(DTYPES).index(dtype) + TACTICS.index(tactic)
    errors = interpreted(moe_kernels.moe_errors, tactic, DTYPES[dtype], seed, 12)
    assert len(errors) == 12
    assert [case for case in errors if case[1] > 1] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_tactic_equals_the_reference(interpreted: Callable[..., Any], dtype: str) -> None:
    errors = interpreted(moe_kernels.moe_errors, None, DTYPES[dtype], 7, 12)
    assert [case for case in errors if case[1] > 1] == []


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


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'relu': one of silu"):
        moe_experts(torch.ones(1, 2), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32),
                    torch.ones(1, 2, 2), torch.ones(1, 2, 1), "relu")  # fmt: skip


def test_there_is_a_tactic_for_every_problem() -> None:
    for dtype in DTYPES.values():
        for num_tokens in (1, 100, 8192):
            problem = Problem(num_tokens, 8, 64, 2048, 1024, dtype)
            assert supports(default_tactic(problem), problem)
    assert default_tactic(Problem(1, 8, 64, 2048, 1024, torch.float16)).block_m == 16
    assert default_tactic(Problem(8192, 8, 64, 2048, 1024, torch.float16)).block_m == 128


def test_the_operator_is_registered_with_its_shapes() -> None:
    ids, weights = torch.tensor([[0, 1]], dtype=torch.int32), torch.rand(1, 2)
    tensors = torch.randn(1, 8), weights, ids, torch.randn(2, 12, 8), torch.randn(2, 8, 6)
    torch.library.opcheck(moe_experts, (*tensors, "silu"))
