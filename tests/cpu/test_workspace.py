"""Scratch memory of the operators: what they ask for is what they use, and holds every smaller call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton.plugins_trt import fp8_linear_tactics, int4_linear_tactics, moe_experts_tactics
from pelton.plugins_trt.fp8_linear_plugin import FP8_LINEAR_PLUGIN
from pelton.plugins_trt.int4_linear_plugin import INT4_LINEAR_PLUGIN
from pelton.plugins_trt.moe_experts import FLOAT, FP8, INT4
from pelton.plugins_trt.moe_experts_plugin import MOE_EXPERTS_PLUGIN
from pelton.plugins_trt.plugin import Described
from pelton.plugins_trt.workspace import carve, num_bytes
from support import kernel_cases, workspace_cases
from support.interpreted import interpreter


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter() as call:
        call(kernel_cases.correct_arithmetic)
        yield call


def test_tensors_lie_one_after_the_other() -> None:
    layout = {"a": ((3, 5), torch.float16), "b": ((0,), torch.int32), "c": ((7,), torch.float32)}
    block = torch.zeros(num_bytes(layout), dtype=torch.uint8)
    tensors = carve(layout, block, block.device)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == layout
    starts = [tensors[name].data_ptr() - block.data_ptr() for name in ("a", "c")]
    assert starts == [0, 256]
    assert block.numel() == 512
    own = carve(layout, None, block.device)
    assert {name: (tuple(t.shape), t.dtype) for name, t in own.items()} == layout


@pytest.mark.parametrize(("rows", "split_k"), [(3, 4), (20, 1), (20, 4)])
def test_int4_linear_in_its_workspace(interpreted: Callable[..., Any], rows: int, split_k: int) -> None:
    block_m = 16 if rows == 3 else 32
    tactic = next(
        t for t in int4_linear_tactics.TACTICS if (t.block_m, t.split_k) == (block_m, split_k)
    )  # the parts, the permuted rows, both
    assert interpreted(workspace_cases.int4_case, rows, tactic)


@pytest.mark.parametrize(("split_k", "is_static"), [(1, False), (4, False), (4, True)])
def test_fp8_linear_in_its_workspace(interpreted: Callable[..., Any], split_k: int, is_static: bool) -> None:
    tactic = next(t for t in fp8_linear_tactics.TACTICS if t.split_k == split_k)
    assert interpreted(workspace_cases.fp8_case, 3, tactic, is_static)


@pytest.mark.parametrize("form", [FLOAT, INT4, FP8])
def test_moe_experts_in_their_workspace(interpreted: Callable[..., Any], form: str) -> None:
    assert interpreted(workspace_cases.moe_case, form, moe_experts_tactics.TACTICS[1])


@pytest.mark.parametrize("largest", [1, 17, 64, 300])
def test_linears_hold_every_smaller_call(largest: int) -> None:
    """The choice by shapes depends on the call, the workspace is made for the largest one."""
    for has_perm in (True, False):
        int4 = int4_linear_tactics.Problem(largest, 4096, 4096, 128, torch.float16)
        asked = int4_linear_tactics.workspace_bytes(int4, None, has_perm=has_perm)
        fp8 = fp8_linear_tactics.Problem(largest, 4096, 4096)
        asked_fp8 = fp8_linear_tactics.workspace_bytes(fp8, None, is_static=has_perm)
        assert asked > 0 < asked_fp8
        for rows in range(1, largest + 1):
            call = replace(int4, rows=rows)
            tactic = int4_linear_tactics.default_tactic(call)
            assert int4_linear_tactics.workspace_bytes(call, tactic, has_perm=has_perm) <= asked
            call_fp8 = replace(fp8, rows=rows)
            tactic = fp8_linear_tactics.default_tactic(call_fp8)
            assert fp8_linear_tactics.workspace_bytes(call_fp8, tactic, is_static=has_perm) <= asked_fp8


@pytest.mark.parametrize("form", [FLOAT, INT4, FP8])
def test_experts_hold_every_smaller_call(form: str) -> None:
    tactics = moe_experts_tactics
    largest = tactics.Problem(700, 2, 8, 64, 64, torch.float16, form)
    asked = tactics.workspace_bytes(largest, None)
    for num_tokens in range(1, 701):
        call = replace(largest, num_tokens=num_tokens)
        assert tactics.workspace_bytes(call, tactics.default_tactic(call)) <= asked


def test_plugins_ask_for_what_their_launchers_take() -> None:
    x = Described((1, 64, 512), "float16")
    int4 = [x, Described((16, 256, 16), "int8"), Described((4, 256), "float16")]
    split = INT4_LINEAR_PLUGIN.tactics(int4, {"group_size": 128})
    parts = max(INT4_LINEAR_PLUGIN.workspace(int4, {"group_size": 128}, tactic) for tactic in split)
    assert parts == 8 * 64 * 256 * 4  # [split_k, M, N] float32
    perm = Described((512,), "int32")
    by_shapes = [
        INT4_LINEAR_PLUGIN.workspace(inputs, {"group_size": 128}, 1) for inputs in (int4, [*int4, perm])
    ]
    assert by_shapes[1] >= max(64 * 512 * 2, by_shapes[0])

    fp8 = [x, Described((256, 512), "float8_e4m3fn"), Described((256,), "float32")]
    assert all(
        FP8_LINEAR_PLUGIN.workspace(fp8, {}, t) >= 64 * 516 for t in FP8_LINEAR_PLUGIN.tactics(fp8, {})
    )

    stacks = [Described((128, 1536, 2048), "bfloat16"), Described((128, 2048, 768), "bfloat16")]
    routes = [Described((8192, 8), dtype) for dtype in ("float32", "int32")]
    experts = [Described((8192, 2048), "bfloat16"), *routes, *stacks]
    fields = {"activation": 0, "group_size": -1}
    between = 8192 * 8 * (2048 + 768) * 2  # hidden and outputs
    for tactic in MOE_EXPERTS_PLUGIN.tactics(experts, fields):
        assert between < MOE_EXPERTS_PLUGIN.workspace(experts, fields, tactic) < between + (1 << 20)


def test_before_a_tactic_is_chosen_there_is_room_for_any() -> None:
    fields = {"group_size": 128}
    shapes = ((1, 8, 512), "float16"), ((16, 256, 16), "int8"), ((4, 256), "float16")
    inputs = [Described(*shape) for shape in shapes]
    each = {
        t: INT4_LINEAR_PLUGIN.workspace(inputs, fields, t) for t in INT4_LINEAR_PLUGIN.tactics(inputs, fields)
    }
    assert len(set(each.values())) > 2
    assert INT4_LINEAR_PLUGIN.workspace_bytes(inputs, fields, 0) == max(each.values())
    assert all(
        INT4_LINEAR_PLUGIN.workspace_bytes(inputs, fields, tactic) == size for tactic, size in each.items()
    )
