"""The CPU form of paged attention (rows and tiles, work lists) against the operator's PyTorch reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pelton.plugins_trt.paged_attention import paged_attention
from pelton.plugins_trt.paged_attention_cpu import (
    MAX_ROWS_PER_SEQUENCE,
    TILE,
    PackedWork,
    attend,
    pack_work,
    uses_tiles,
    write_kv,
)


@dataclass
class Case:
    """A step: `past` tokens are in the cache of each sequence, `new` are computed now."""

    past: list[int]
    new: list[int]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False


CASES = {
    "one token": Case([0], [1]),
    "decodes of ragged contexts": Case([3, 47, 16, 31, 0], [1, 1, 1, 1, 1]),
    "a whole prompt": Case([0], [70]),
    "ragged prompts": Case([0, 0, 0], [5, 33, 100]),
    "chunks with a past, decodes between": Case([40, 7, 64, 15], [30, 1, 90, 1]),
    "chunk ends on a block": Case([16, 0], [16, 32]),
    "multi-head": Case([9, 20], [1, 30], num_kv_heads=6),
    "multi-query": Case([9, 20], [1, 30], num_kv_heads=1),
    "window inside a block": Case([50, 3], [1, 40], window=5),
    "window over blocks": Case([90, 33, 0], [1, 20, 70], window=40),
    "window of one": Case([20], [20], window=1),
    "window beyond SDPA's split": Case([1500, 0], [400, 1], window=700),
    "soft cap": Case([9, 20], [1, 30], soft_cap=2.0),
    "sinks": Case([9, 20, 40], [1, 30, 3], has_sinks=True),
    "sinks, window and multi-query": Case([50, 3], [1, 40], num_kv_heads=1, window=5, has_sinks=True),
    "pages of 32": Case([31, 32, 33], [1, 1, 40], block_size=32),
}


def run(
    case: Case, *, use_tiles: bool, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """(CPU form, reference), both `[T, Hq, D]`; pages that a sequence does not own are poisoned with NaN."""
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    lengths = [p + n for p, n in zip(case.past, case.new, strict=True)]
    counts = [-(-length // case.block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    pages = random.permutation(num_blocks)
    table = np.zeros((len(counts), max(counts) + 1), np.int32)
    for row, part in enumerate(np.split(pages[: sum(counts)], np.cumsum(counts)[:-1])):
        table[row, : len(part)] = part
    starts = np.cumsum([0, *case.new]).astype(np.int32)
    seq_lens = np.array(lengths, np.int32)
    shape = (num_blocks + 1, case.block_size, case.num_kv_heads, case.head_dim)
    k_cache, v_cache = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for cache in (k_cache, v_cache):
        cache[torch.from_numpy(pages[sum(counts) :].copy())] = float("nan")
        cache[-1] = 0  # the padding page is never written
    total = int(starts[-1])
    query = torch.randn(total, case.num_heads, case.head_dim).to(dtype)
    key, value = (torch.randn(total, case.num_kv_heads, case.head_dim).to(dtype) for _ in range(2))
    scale = 0.3
    # Far above, among and far below the scores.
    sinks = torch.tensor([90.0, 2.0, 0.0, -1.0, 1.0, -90.0]) if case.has_sinks else None
    expected, _, _ = paged_attention(
        query, key, value, k_cache, v_cache,
        torch.from_numpy(table), torch.from_numpy(seq_lens), torch.from_numpy(starts),
        scale, case.window, case.soft_cap, sinks,
    )  # fmt: skip

    k_pages, v_pages = k_cache.permute(0, 2, 3, 1).contiguous(), v_cache.permute(0, 2, 1, 3).contiguous()
    work = pack_work(
        table, seq_lens, starts,
        block_size=case.block_size, padding_page=num_blocks, windows=[case.window],
        tile_dtype=dtype if use_tiles else None,
    )  # fmt: skip
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(case.past, case.new, strict=True)])
    write_kv((work.slot_page, work.slot_offset), key, value, k_pages, v_pages)
    actual = attend(
        query, k_pages, v_pages, torch.from_numpy(positions), work.rows[0],
        work.tile_groups[0] if work.tile_groups else (), work.output_index, scale, case.window, case.soft_cap, sinks,
    )  # fmt: skip
    return actual, expected


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_the_reference(name: str) -> None:
    actual, expected = run(CASES[name], use_tiles=False, dtype=torch.float32)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not (c.soft_cap or c.has_sinks)])
def test_tiles_equal_the_reference(name: str) -> None:
    actual, expected = run(CASES[name], use_tiles=True, dtype=torch.float32)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_random_ragged_steps_equal_the_reference() -> None:
    random = np.random.default_rng(1)
    for _ in range(60):
        batch = int(random.integers(1, 7))
        case = Case(
            past=random.integers(0, 90, batch).tolist(),
            new=[int(random.integers(1, 400)) if random.random() < 0.5 else 1 for _ in range(batch)],
            num_kv_heads=int(random.choice([1, 2, 3, 6])),
            block_size=int(random.choice([16, 32])),
            window=int(random.choice([0, 0, 7, 50])),
        )
        for use_tiles in (False, True):
            actual, expected = run(case, use_tiles=use_tiles, dtype=torch.float32)
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_blocks_outside_the_window_are_not_in_the_work_list() -> None:
    table = np.arange(8, dtype=np.int32)[None]
    work = pack_work(
        table, np.array([128], np.int32), np.array([0, 1], np.int32),
        block_size=16, padding_page=99, windows=[0, 20], tile_dtype=None,
    )  # fmt: skip
    full, windowed = (rows.item_page.tolist() for rows in work.rows)
    assert full == [0, 1, 2, 3, 4, 5, 6, 7, 99]
    assert windowed == [6, 7, 99]  # positions 108..127


def packed(past: list[int], new: list[int], windows: list[int]) -> PackedWork:
    """A bfloat16 step with pages of 16 tokens; sequences have pages of their own."""
    lengths = np.add(past, new).astype(np.int32)
    width = -(-int(lengths.max()) // 16)
    table = np.arange(len(new) * width, dtype=np.int32).reshape(len(new), width)
    return pack_work(
        table, lengths, np.cumsum([0, *new]).astype(np.int32),
        block_size=16, padding_page=table.size, windows=windows, tile_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("past", "new", "groups"),
    [
        ([0], [9], [(0, 1), (1, 1)]),
        ([0, 0], [128, 128], [(0, 1), (2, 8)]),
        ([0], [512], [(2, 16), (2, 32)]),
        ([40, 0, 0, 0], [1, 150, 9, 34], [(2, 3), (2, 10)]),
    ],
)
def test_tiles_are_padded_to_the_longest_of_their_group(
    past: list[int], new: list[int], groups: list[tuple[int, int]]
) -> None:
    work = packed(past, new, [0])
    assert [tuple(group.page.shape) for group in work.tile_groups[0]] == groups
    assert [group.query.shape[0] for group in work.tile_groups[0]] == [tiles for tiles, _ in groups]


def test_every_token_has_an_output_of_its_own() -> None:
    work = packed([40, 0, 7, 0], [1, 150, 5, 34], [0])
    num_rows = len(work.rows[0].row_items)
    num_tiles = sum(len(group.query) for group in work.tile_groups[0])
    index = work.output_index.tolist()
    assert (num_rows, num_tiles) == (6, 3)
    assert len(set(index)) == 190
    assert set(index[:1] + index[151:156]) == set(range(num_rows))
    queries = torch.cat([group.query.flatten() for group in work.tile_groups[0]])
    tiled = [*range(1, 151), *range(156, 190)]
    assert [int(queries[index[token] - num_rows]) for token in tiled] == tiled


def test_a_step_of_few_tokens_a_sequence_has_no_tiles() -> None:
    assert packed([40, 0], [1, MAX_ROWS_PER_SEQUENCE], [0, 20]).tile_groups == ()
    assert packed([40, 0], [1, MAX_ROWS_PER_SEQUENCE + 1], [0, 20]).tile_groups != ()


def test_each_window_has_masks_of_its_own() -> None:
    work = packed([300, 0], [40, 130], [0, 20])
    for full, windowed in zip(*work.tile_groups, strict=True):
        assert windowed.mask.shape[-1] < full.mask.shape[-1]
        for group, window in ((full, 340), (windowed, 20)):
            assert group.mask.shape == (len(group.query), 1, TILE, group.page.shape[1] * 16)
            visible = (group.mask == 0).sum(-1)
            assert bool((visible >= 1).all()), "a query row without a key is NaN"
            assert int(visible.max()) <= window
    assert max(int((group.mask == 0).sum(-1).max()) for group in work.tile_groups[0]) == 340


@pytest.mark.parametrize(
    ("dtype", "soft_caps", "expected"),
    [
        (torch.bfloat16, [], True),
        (torch.bfloat16, [0.0, 0.0], True),
        (torch.bfloat16, [0.0, 50.0], False),
        (torch.float32, [0.0], False),
    ],
)
def test_tiles_are_for_reduced_precision_without_soft_caps(
    dtype: torch.dtype, soft_caps: list[float], expected: bool
) -> None:
    assert uses_tiles(dtype, soft_caps) is expected
    assert not uses_tiles(dtype, soft_caps, has_sinks=True)


def test_overflow_of_one_sequence_does_not_reach_the_next_owner_of_its_page() -> None:
    """Masked positions have weight 0, and 0 * inf is NaN: what is written must be finite."""
    page = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 16, 4)
    slots = torch.tensor([0, 0]), torch.tensor([0, 1])
    poison = torch.full((2, 1, 4), float("inf"))
    poison[1] = float("nan")
    write_kv(slots, poison, poison, *page)
    assert all(torch.isfinite(cache).all() for cache in page)
