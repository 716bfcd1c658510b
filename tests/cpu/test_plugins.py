"""Plugins as TensorRT sees them: which dtypes they take, their tactics, and what they do while they are timed."""

from __future__ import annotations

import pytest
import torch

from pelton.plugins_trt.fp8_linear_plugin import FP8_LINEAR_PLUGIN
from pelton.plugins_trt.int4_linear_plugin import INT4_LINEAR_PLUGIN, by_kind
from pelton.plugins_trt.moe_experts_plugin import MOE_EXPERTS_PLUGIN, _typical_routes
from pelton.plugins_trt.paged_attention_plugin import PAGED_ATTENTION_PLUGIN, _per_head, _typical_step
from pelton.plugins_trt.plugin import Described, Operator

INDICES = ["int32"] * 3
ROUTED = ["float16", "float32", "int32"]  # x, router weights, expert ids


@pytest.mark.parametrize(
    ("operator", "inputs", "outputs", "accepted"),
    [
        (PAGED_ATTENTION_PLUGIN, ["float16"] * 5 + INDICES, ["float16"] * 3, True),
        (
            PAGED_ATTENTION_PLUGIN,
            ["bfloat16"] * 3 + ["int8"] * 2 + INDICES,
            ["bfloat16", "int8", "int8"],
            True,
        ),
        (PAGED_ATTENTION_PLUGIN, ["float16"] * 5 + INDICES + ["float32"] * 2, ["float16"] * 3, True),
        (PAGED_ATTENTION_PLUGIN, ["float16"] * 5 + INDICES + ["float16"], ["float16"] * 3, False),
        (PAGED_ATTENTION_PLUGIN, ["float16"] * 5 + INDICES[:2], ["float16"] * 3, False),
        (PAGED_ATTENTION_PLUGIN, ["float32"] * 5 + INDICES, ["float32"] * 3, False),
        (PAGED_ATTENTION_PLUGIN, ["float16"] * 5 + ["int64"] * 3, ["float16"] * 3, False),
        (PAGED_ATTENTION_PLUGIN, ["float16"] * 4 + ["int8"] + INDICES, ["float16"] * 2 + ["int8"], False),
        (INT4_LINEAR_PLUGIN, ["float16", "int8", "float16", "int8"], ["float16"], True),
        (INT4_LINEAR_PLUGIN, ["bfloat16", "int8", "float16"], ["bfloat16"], True),
        (INT4_LINEAR_PLUGIN, ["float16", "int8", "float16", "int32"], ["float16"], True),
        (INT4_LINEAR_PLUGIN, ["float16", "int8", "float16", "int8", "int32"], ["float16"], True),
        (INT4_LINEAR_PLUGIN, ["float16", "int8", "float16", "int32", "int8"], ["float16"], False),
        (INT4_LINEAR_PLUGIN, ["float16", "int32", "float16"], ["float16"], False),
        (FP8_LINEAR_PLUGIN, ["float16", "float8_e4m3fn", "float32"], ["float16"], True),
        (FP8_LINEAR_PLUGIN, ["float16", "int8", "float32"], ["float16"], False),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, "float16", "float16"], ["float16"], True),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, "float16", "float16"], ["float32"], False),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, "float16", "bfloat16"], ["float16"], False),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, "bfloat16", "bfloat16"], ["float16"], False),
        (MOE_EXPERTS_PLUGIN, ["float16", "float16", "int32", "float16", "float16"], ["float16"], False),
        (MOE_EXPERTS_PLUGIN, ["float16", "float32", "int64", "float16", "float16"], ["float16"], False),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, *["int8"] * 2, *["float16"] * 2], ["float16"], True),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, *["int8"] * 2, *["float16"] * 2, *["int8"] * 2], ["float16"], True),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, *["int8"] * 2], ["float16"], False),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, *["int8"] * 2, *["float16"] * 2, "int8"], ["float16"], False),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, *["float8_e4m3fn"] * 2, *["float32"] * 2], ["float16"], True),
        (MOE_EXPERTS_PLUGIN, [*ROUTED, *["float8_e4m3fn"] * 2, *["float16"] * 2], ["float16"], False),
    ],
)
def test_dtypes(operator: Operator, inputs: list[str], outputs: list[str], accepted: bool) -> None:
    assert operator.accepts(inputs, outputs) is accepted


def test_zero_points_and_order_are_told_apart() -> None:
    zeros, perm = torch.zeros(2, 8, dtype=torch.int8), torch.arange(64, dtype=torch.int32)
    assert by_kind([]) == (None, None)
    assert by_kind([zeros]) == (zeros, None)
    assert by_kind([perm]) == (None, perm)
    assert by_kind([zeros, perm]) == (zeros, perm)


def step(tokens: int, batch: int) -> list[Described]:
    cache = Described((100, 32, 8, 128), "float16")
    rows = [Described((tokens, heads, 128), "float16") for heads in (32, 8, 8)]
    indices = [Described(shape, "int32") for shape in ((batch, 64), (batch,), (batch + 1,))]
    return [*rows, cache, cache, *indices]


FIELDS = {
    "scale": 0.1, "window": 0, "soft_cap": 0.0, "k_scale": 1.0, "v_scale": 1.0, "has_sinks": 0, "has_alibi_slopes": 0,
}  # fmt: skip


def test_workspace_holds_what_any_smaller_step_chooses() -> None:
    """The choice by shapes depends on the step, the workspace is made for the largest one."""
    tactic = PAGED_ATTENTION_PLUGIN.tactics(step(512, 64), FIELDS)[0]
    largest = PAGED_ATTENTION_PLUGIN.workspace(step(512, 64), FIELDS, tactic)
    for tokens, batch in ((1, 1), (2, 1), (8, 8), (64, 64), (512, 3), (128, 64)):
        assert 0 < PAGED_ATTENTION_PLUGIN.workspace(step(tokens, batch), FIELDS, tactic) <= largest


def test_every_tactic_fits_every_architecture() -> None:
    tactics = PAGED_ATTENTION_PLUGIN.tactics(step(512, 64), FIELDS)
    assert tactics[0] == 1
    assert len(tactics) == len(set(tactics)) > 5
    assert all(PAGED_ATTENTION_PLUGIN.workspace(step(512, 64), FIELDS, tactic) >= 0 for tactic in tactics)


@pytest.mark.parametrize(
    ("has_sinks", "has_alibi", "expected"),
    [(0, 0, (None, None)), (1, 0, (0, None)), (0, 1, (None, 0)), (1, 1, (0, 1))],
)
def test_sinks_and_slopes_are_told_apart(
    has_sinks: int, has_alibi: int, expected: tuple[int | None, int | None]
) -> None:
    given = [torch.zeros(4), torch.ones(4)][: has_sinks + has_alibi]
    found = _per_head(given, FIELDS | {"has_sinks": has_sinks, "has_alibi_slopes": has_alibi})
    for tensor, index in zip(found, expected, strict=True):
        assert (tensor is None) if index is None else (tensor is given[index])


def test_linear_tactics_split_only_few_rows() -> None:
    def tactics(rows: int) -> set[int]:
        x = Described((rows, 4096), "float16")
        weights = [Described((128, 4096, 16), "int8"), Described((32, 4096), "float16")]
        return set(INT4_LINEAR_PLUGIN.tactics([x, *weights], {"group_size": 128}))

    assert tactics(512) < tactics(8)


@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (64, 64), (512, 3), (7, 5)])
def test_a_timed_step_is_a_valid_one(tokens: int, batch: int) -> None:
    k_cache = torch.zeros(10, 16, 2, 8)
    table, seq_lens, starts = _typical_step(
        tokens, k_cache, torch.full((batch, 4), -(10**6), dtype=torch.int32)
    )
    rows = starts.diff()
    assert table.shape == (batch, 4)
    assert (table >= 0).all()
    assert (table < 10).all()
    assert starts[0] == 0
    assert starts[-1] <= tokens
    assert (rows >= 0).all()
    assert (rows <= seq_lens).all()
    assert (seq_lens <= 64).all()


def test_tactics_of_experts_follow_the_form_of_their_stacks() -> None:
    def tactics(group_size: int, gate_up: Described) -> list[int]:
        routes = [Described((64, 2), dtype) for dtype in ("float32", "int32")]
        inputs = [Described((64, 4096), "float16"), *routes, gate_up, gate_up]
        return list(MOE_EXPERTS_PLUGIN.tactics(inputs, {"activation": 0, "group_size": group_size}))

    dense = tactics(-1, Described((8, 28672, 4096), "float16"))
    int4 = Described((8, 128, 28672, 16), "int8")
    assert dense[0] == 1
    assert set(tactics(32, int4)) < set(tactics(128, int4)) == set(dense)


def test_timed_experts_get_an_even_share() -> None:
    garbage = torch.full((10, 3), -(10**6), dtype=torch.int32)
    ids = _typical_routes(garbage, 5)
    assert ids.shape == (10, 3)
    assert ids.dtype == torch.int32
    assert ids.flatten().bincount().tolist() == [6] * 5
