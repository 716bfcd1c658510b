"""The memory of sampling on a device: bounded for large vocabularies and batches, and enough for any one row."""

from __future__ import annotations

import pytest

from pelton.plugins_trt.sampling_memory import COUNT_BYTES, SCRATCH_BYTES, SORTED_LOGIT, sampler_sizes


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
