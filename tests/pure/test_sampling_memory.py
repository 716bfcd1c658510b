"""The memory of sampling on a device: bounded for large vocabularies and batches, and enough for any one row."""

from __future__ import annotations

import pytest

from pelton.plugins_trt.sampling_memory import (
    COUNT_BYTES,
    LOGITS_BYTES,
    SCRATCH_BYTES,
    SORTED_LOGIT,
    num_logits_rows,
    sampler_sizes,
)


@pytest.mark.parametrize("vocab_size", [1, 300, 32_000, 152_064, 10_000_000])
@pytest.mark.parametrize("batch", [1, 64, 4096])
def test_sizes_hold_a_row_and_stay_bounded(vocab_size: int, batch: int) -> None:
    sizes = sampler_sizes(vocab_size, batch)
    row_bytes = vocab_size * SORTED_LOGIT
    assert 1 <= sizes.num_count_slots <= batch
    assert sizes.count_bytes == sizes.num_count_slots * vocab_size * 4
    assert sizes.count_bytes <= max(COUNT_BYTES, vocab_size * 4)
    assert row_bytes <= sizes.scratch_bytes <= max(SCRATCH_BYTES, row_bytes)
    assert sizes.rows_at_once(vocab_size, SORTED_LOGIT) == sizes.scratch_bytes // row_bytes >= 1
    assert sizes.device_bytes == (
        sizes.parameter_bytes + sizes.result_bytes + sizes.scratch_bytes + sizes.count_bytes
    )
    assert sizes.pinned_bytes == sizes.parameter_bytes + sizes.result_bytes


def test_small_batches_take_no_more_than_they_can_use() -> None:
    assert sampler_sizes(32_000, 2).scratch_bytes == 2 * 32_000 * SORTED_LOGIT
    assert sampler_sizes(32_000, 2).num_count_slots == 2


def test_rows_of_drafts_fit_into_one_pass_and_take_no_more_scratch() -> None:
    one, many = sampler_sizes(32_000, 2), sampler_sizes(32_000, 2, 90)
    assert (one.max_rows, many.max_rows) == (2, 90)
    assert many.result_bytes == 45 * one.result_bytes
    assert many.parameter_bytes > one.parameter_bytes
    assert many.torch_bytes == one.torch_bytes
    assert sampler_sizes(32_000, 4, 2).max_rows == 4, "never fewer than sequences"


@pytest.mark.parametrize(
    ("vocab_size", "batch", "max_rows", "num_rows"),
    [
        (1024, 64, 512, 512),
        (131_072, 64, 512, 128),
        (131_072, 200, 512, 200),
        (1 << 30, 1, 512, 1),
    ],
)
def test_logits_rows(vocab_size: int, batch: int, max_rows: int, num_rows: int) -> None:
    assert num_logits_rows(vocab_size, max_batch_size=batch, max_rows=max_rows) == num_rows
    assert num_rows * vocab_size * 4 <= max(LOGITS_BYTES, batch * vocab_size * 4)
