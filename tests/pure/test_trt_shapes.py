"""Pure parts of the TensorRT executor: engine.json, choice of profile, padding, staging, memory."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.errors import BundleError, ConfigError
from pelton.runtime.inputs import StepInputs
from pelton.runtime.trt_facts import ENGINE_FILE, STEP_INPUTS, EngineFacts
from pelton.runtime.trt_memory import engine_limits, plan_memory
from pelton.runtime.trt_shapes import Placer, StepSize, capture_sizes, fill, round_up_pages
from support.trt_bundle import VOCAB_SIZE, engine_json, limits, read_facts, write_bundle


@pytest.fixture
def facts(tmp_path: Path) -> EngineFacts:
    write_bundle(tmp_path, limits())
    return read_facts(tmp_path)


def placer_of(facts: EngineFacts, **options: bool) -> Placer:
    return Placer(facts, engine_limits(facts, limits(), 32), **options)


def inputs_of(lengths: list[int], pages: int, num_rows: int) -> StepInputs:
    """Sequences of `lengths` tokens, with values that are nowhere 0."""
    num_tokens = sum(lengths)
    return StepInputs(
        input_ids=np.arange(1, num_tokens + 1),
        positions=np.arange(101, num_tokens + 101),
        block_table=np.arange(201, len(lengths) * pages + 201, dtype=np.int32).reshape(len(lengths), pages),
        seq_lens=np.arange(301, len(lengths) + 301, dtype=np.int32),
        query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
        logits_rows=np.arange(num_rows),
        block_copies=np.zeros((0, 2), np.int64),
    )


def test_engine_json_is_read_as_the_builder_writes_it(facts: EngineFacts) -> None:
    assert [profile.name for profile in facts.profiles] == ["decode", "mixed"]
    assert facts.widest.name == "mixed"
    assert facts.widest.largest("block_table") == (4, 16)
    assert facts.cache_names == ("k_caches_0", "k_caches_1", "v_caches_0", "v_caches_1")
    assert facts.cache_shape("v_caches_1", 7) == (7, 4, 1, 8)
    assert facts.page_bytes("v_caches_1") == 4 * 1 * 8 * 2
    assert facts.block_bytes == 2 * (4 * 2 * 4 + 4 * 1 * 8) * 2


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"vocab_size": "many"}, "vocab_size: Input should be a valid integer"),
        ({"kv_heads": [2]}, "kv_heads: must name as many layers as head_dims"),
        ({"head_dims": [4, 0]}, "must be positive"),
        ({"cache_dtype": "float64"}, "cache_dtype: 'float64' is not among"),
        ({"profiles": []}, "profiles: there is none"),
        ({"profiles": [{"name": "decode", "shapes": {}}]}, "profiles: decode has no shapes for block_table"),
        ({"profiles": None}, "profiles: Input should be a valid array"),
    ],
)
def test_a_damaged_engine_json_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    write_bundle(tmp_path, limits(), **changes)
    with pytest.raises(BundleError) as caught:
        read_facts(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / ENGINE_FILE}: ")
    assert fault in str(caught.value)
    assert str(caught.value).endswith("; rebuild it")


def test_an_engine_json_without_a_field_or_cut_is_refused(tmp_path: Path) -> None:
    text = json.dumps(engine_json(limits()))
    write_bundle(tmp_path, limits())
    (tmp_path / ENGINE_FILE).write_text(text.replace('"vocab_size"', '"vocabulary"'))
    with pytest.raises(BundleError, match="vocab_size: Field required"):
        read_facts(tmp_path)
    (tmp_path / ENGINE_FILE).write_text(text[: len(text) // 2])
    with pytest.raises(BundleError, match="content: Invalid JSON"):
        read_facts(tmp_path)
    (tmp_path / ENGINE_FILE).unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        read_facts(tmp_path)


def test_capture_sizes_double_up_to_the_largest_batch() -> None:
    assert capture_sizes(1) == (1,)
    assert capture_sizes(2) == (1, 2)
    assert capture_sizes(6) == (1, 2, 4, 6)
    assert capture_sizes(64) == (1, 2, 4, 8, 16, 32, 64)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) <= 16),
    pages=st.integers(1, 16),
    data=st.data(),
)
def test_every_step_within_the_limits_has_a_place_that_holds_it(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], pages: int, data: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp() / "places"
    write_bundle(directory, limits())
    facts = read_facts(directory)
    num_rows = data.draw(st.integers(0, sum(lengths)))
    placement = placer_of(facts).place(inputs_of(lengths, pages, num_rows), num_rows)
    profile, size = facts.profiles[placement.profile], placement.size
    assert profile.fault(size.shapes) is None
    assert profile.name == ("decode" if set(lengths) == {1} else "mixed")
    assert placement.is_captured == (profile.name == "decode")
    assert size.num_tokens >= sum(lengths)
    assert size.num_sequences >= len(lengths)
    assert size.num_pages >= pages
    assert size.num_rows >= max(num_rows, 1)
    if placement.is_captured:
        assert size.num_tokens == size.num_sequences == size.num_rows
        assert size.num_tokens in capture_sizes(4)
        assert size.num_pages in (1, 2, 4, 8, 16)
    else:
        assert (size.num_tokens, size.num_sequences) == (sum(lengths), len(lengths))


def test_without_graphs_decodes_run_as_they_come(facts: EngineFacts) -> None:
    placement = placer_of(facts, use_graphs=False).place(inputs_of([1, 1, 1], 3, 2), 2)
    assert placement.size == StepSize(num_tokens=3, num_sequences=3, num_pages=4, num_rows=2)
    assert (placement.profile, placement.is_captured) == (0, False)


def test_widths_are_powers_of_two_and_never_above_the_table() -> None:
    assert [round_up_pages(n, 12) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    assert [round_up_pages(n, 12) for n in (0, 13)] == [0, 13], "left as they are, to be refused"


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    pages=st.integers(1, 5),
    more=st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)),
    data=st.data(),
)
def test_staging_holds_the_step_and_zeros_for_padding(
    lengths: list[int], pages: int, more: tuple[int, int, int, int], data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(0, sum(lengths)))
    inputs = inputs_of(lengths, pages, num_rows)
    sizes = (sum(lengths), len(lengths), pages, num_rows)
    size = StepSize(*(n + extra for n, extra in zip(sizes, more, strict=True)))
    staging = np.full(size.num_bytes, 0xAB, np.uint8)
    fill(staging, size, inputs, inputs.logits_rows)
    for name, shape in size.shapes.items():
        start = size.offsets[name]
        assert start % 256 == 0
        dtype = np.dtype(STEP_INPUTS[name])
        content = staging[start : start + dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)
        values = getattr(inputs, name)
        wanted = np.full(shape, sum(lengths) if name == "query_start_loc" else 0)
        wanted[(0,) * (len(shape) - values.ndim) + tuple(slice(n) for n in values.shape)] = values
        np.testing.assert_array_equal(content, wanted, err_msg=name)


def test_limits_follow_the_profiles(facts: EngineFacts) -> None:
    more = limits(max_batch_size=40, max_step_tokens=160, max_model_len=640)
    assert asdict(engine_limits(facts, more, 9)) == {
        "max_model_len": 64, "max_batch_size": 4, "max_step_tokens": 16,
        "block_size": 4, "num_blocks": 9, "vocab_size": VOCAB_SIZE, "max_logits_rows": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "largest", "limit", "value"),
    [
        ("input_ids", (1, 9), "max_step_tokens", 9),
        ("positions", (1, 9), "max_step_tokens", 9),
        ("block_table", (3, 16), "max_batch_size", 3),
        ("block_table", (4, 15), "max_model_len", 60),
        ("seq_lens", (3,), "max_batch_size", 3),
        ("query_start_loc", (4,), "max_batch_size", 3),
        ("logits_rows", (3,), "max_batch_size", 3),
    ],
)
def test_tr_02_the_smallest_range_of_the_profile_is_the_limit(
    facts: EngineFacts, name: str, largest: tuple[int, ...], limit: str, value: int
) -> None:
    mixed = facts.profiles[1]
    low, _, _ = mixed.shapes[name]
    smaller = replace(mixed, shapes={**mixed.shapes, name: (low, low, largest)})
    changed = asdict(engine_limits(replace(facts, profiles=(smaller,)), limits(), 9))
    assert changed == {**asdict(engine_limits(facts, limits(), 9)), limit: value}


def test_memory_fits_to_the_byte_and_not_beyond(facts: EngineFacts) -> None:
    def plan(free: int) -> int:
        return plan_memory(
            facts, limits(), kv_cache_bytes=None, activation_bytes=1 << 20, free_bytes=free
        ).device_bytes

    needed = plan(1 << 40)
    assert plan(needed) == needed
    with pytest.raises(ConfigError, match=r"kv_cache_memory: .* build again with smaller limits"):
        plan(needed - 1)
