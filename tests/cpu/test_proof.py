"""The steps of the proof reach what a bfloat16 engine does: tiles alone, rows beside tiles, rows alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.compile.proof import _STEPS, Trace, record
from pelton.plugins_trt.paged_attention_cpu import TILE, PackedWork, pack_work
from support.checkpoints import tiny_model


def packed(trace: Trace, index: int) -> PackedWork:
    """A step of the trace as an engine gets it."""
    step = trace.steps[index]
    past = [
        sum(n for before in trace.steps[:index] for s, n in before if s == sequence) for sequence, _ in step
    ]
    new = [n for _, n in step]
    table = np.arange(len(step) * 64, dtype=np.int32).reshape(len(step), 64)
    return pack_work(
        table, np.add(past, new).astype(np.int32), np.cumsum([0, *new]).astype(np.int32),
        block_size=trace.block_size, padding_page=table.size, windows=[0], tile_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_steps_are_of_tiles_of_both_and_of_rows(block_size: int) -> None:
    trace = Trace(_STEPS, (), (), block_size, 0.0)
    first, second, third, fourth = (packed(trace, index) for index in range(4))
    assert len(first.rows[0].row_items) == 0
    short, long = first.tile_groups[0]
    assert (len(short.query), len(long.query)) == (2, 2)
    num_queries = [len(set(query.tolist())) for group in (short, long) for query in group.query]
    assert sorted(num_queries) == [9, 150 - TILE, 34, TILE]
    assert any((group.page == 3 * 64).any() for group in (short, long)), "no tile is padded"
    for work, num_rows in ((second, 7), (third, 3)):
        assert len(work.rows[0].row_items) == num_rows
        assert sum(len(group.query) for group in work.tile_groups[0]) == 1
    assert fourth.tile_groups == ()


@pytest.mark.parametrize(("windows", "length"), [([0], 150), ([8], 150), ([0, 200], 221), ([513], 150)])
def test_the_first_prompt_reaches_past_a_window(windows: list[int], length: int) -> None:
    trace = record(tiny_model("llama"), windows=windows, block_size=16)
    assert trace.steps[0] == ((0, length), (1, 9), (2, 34))
    assert trace.steps[1:] == _STEPS[1:]
    assert [len(ids) for ids in trace.token_ids] == [length + 15, 15, 45, 8]
    assert [len(logits) for logits in trace.reference] == [length + 15, 15, 45, 8]
