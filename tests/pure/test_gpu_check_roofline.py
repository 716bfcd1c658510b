"""`gpu_check`: what an operation needs at least, counted by hand, and how measured times are held against it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pelton.scripts.gpu_checks.records import (
    Accuracy,
    Agreement,
    Fact,
    Failure,
    Record,
    Skip,
    Speed,
    Timing,
    as_json,
    from_json,
)
from pelton.scripts.gpu_checks.roofline import (
    Ceilings,
    Work,
    attention_work,
    experts_work,
    int4_scale_bytes,
    linear_work,
    rooflines,
)
from pelton.scripts.gpu_checks.summary import describe_outcome, describe_record

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "query_bytes": 2, "cache_bytes": 2}
TIMING = Timing("case", "pelton", "16x64", True, 4e-6, 1000, 3000, "float16", 0.0, 0.01)


def test_a_decode_step_reads_its_context_once() -> None:
    # Of 8 elements: 4 query heads read and written, 2 key and 2 value heads read; 100 + 1 tokens of 2 x 2 heads from
    # the pages, 1 into them.
    work = attention_work([100], [1], **HEADS)
    assert work.num_bytes == (4 + 4 + 2 + 2) * 8 * 2 + (101 + 1) * 4 * 8 * 2
    assert work.flops == 101 * 4 * 8 * 2 * 2  # a product and a sum for the score, and for the value


def test_a_chunk_is_causal() -> None:
    work = attention_work([10], [3], **HEADS)
    assert work.flops == (11 + 12 + 13) * 4 * 8 * 4
    assert work.num_bytes == 3 * 12 * 8 * 2 + (13 + 3) * 4 * 8 * 2


def test_what_a_window_hides_is_not_read() -> None:
    work = attention_work([10], [2], window=4, **HEADS)
    # Position 10 sees 7..10, position 11 sees 8..11: five tokens.
    assert work.flops == (4 + 4) * 4 * 8 * 4
    assert work.num_bytes == 2 * 12 * 8 * 2 + (5 + 2) * 4 * 8 * 2
    assert attention_work([1], [2], window=4, **HEADS) == attention_work([1], [2], **HEADS)


def test_sequences_without_rows_cost_nothing() -> None:
    assert attention_work([10, 50], [3, 0], **HEADS) == attention_work([10], [3], **HEADS)


def test_quantised_pages_are_smaller() -> None:
    work = attention_work([100], [1], **HEADS | {"cache_bytes": 1})
    assert work.num_bytes == 12 * 8 * 2 + 102 * 4 * 8


def test_linear_layers() -> None:
    # Llama's down projection in 4 bits for one row: 29.4 MB of weights.
    scales = int4_scale_bytes(4096, 14336, 128, has_zeros=True)
    assert scales == 112 * 4096 * 3
    work = linear_work(1, 4096, 14336, weight_bits=4, activation_bytes=2, scale_bytes=scales)
    assert work == Work(29_360_128 + scales + (4096 + 14336) * 2, 117_440_512)
    assert int4_scale_bytes(10, 100, 64, has_zeros=False) == 2 * 10 * 2
    assert int4_scale_bytes(10, 100, -1, has_zeros=False) == 10 * 2


def test_experts_without_rows_are_not_read() -> None:
    work = experts_work(2, 4, 8, 16, 32, weight_bits=16, element_bytes=2)
    assert work.num_bytes == 8 * 3 * 16 * 32 * 2 + 2 * 2 * 16 * 2 + 2 * 4 * 8
    assert work.flops == 2 * 4 * 3 * 16 * 32 * 2
    fewer = experts_work(2, 4, 3, 16, 32, weight_bits=16, element_bytes=2)
    assert fewer.num_bytes == work.num_bytes - 5 * 3 * 16 * 32 * 2
    smaller = experts_work(2, 4, 8, 16, 32, weight_bits=4, element_bytes=2, scale_bytes=10)
    assert smaller.num_bytes == work.num_bytes - 8 * (3 * 16 * 32 * 3 // 2 - 10)


def test_the_floor_is_the_longer_of_both() -> None:
    ceilings = Ceilings(1e9, {"float16": 2e9})
    assert ceilings.floor(Work(1000, 1000), "float16") == 1e-6
    assert ceilings.floor(Work(1000, 4000), "float16") == 2e-6
    assert ceilings.floor(Work(1000, 4000), "float8_e4m3fn") is None


def test_the_best_tactic_is_a_right_one() -> None:
    timings = [
        TIMING,
        replace(TIMING, tactic="32x64", is_default=False, seconds=2.5e-6),
        replace(TIMING, tactic="wrong", is_default=False, seconds=1e-6, error=0.5),
        replace(TIMING, implementation="sdpa", tactic=None, is_default=False, seconds=5e-6),
        replace(TIMING, case="other"),
    ]
    entry, other = rooflines(timings, Ceilings(1e9, {"float16": 1.5e9}))
    assert entry["floor_us"] == pytest.approx(2)
    assert entry["best"]["tactic"] == "32x64"
    assert entry["best"]["fraction"] == pytest.approx(0.8)
    assert entry["best"]["gb_per_s"] == pytest.approx(0.4)
    assert entry["best"]["tflop_per_s"] == pytest.approx(1.2e-3)
    assert entry["default"]["fraction"] == pytest.approx(0.5)
    assert entry["others"]["sdpa"]["fraction"] == pytest.approx(0.4)
    assert list(entry["tactics_us"]) == ["wrong", "32x64", "16x64"]
    assert other["others"] == {}


def test_without_ceilings_there_is_no_fraction() -> None:
    (entry,) = rooflines([replace(TIMING, error=float("nan"))], None)
    assert entry["best"] is None  # its result is wrong
    assert entry["default"]["fraction"] is None
    assert entry["floor_us"] is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("record", "passed"),
    [
        (Fact("gpu", "H200"), True),
        (Accuracy("a", 0.1, 0.2), True),
        (Accuracy("a", 0.3, 0.2), False),
        (Accuracy("a", NAN, 0.2), False),
        (Accuracy("a", 0.1, 0.2, is_state_equal=False), False),
        (TIMING, True),
        (replace(TIMING, error=0.02), False),
        (Agreement("a", 3, 3, 30, 30, (), 0.1), True),
        (Agreement("a", 3, 2, 30, 25, (0.05,), 0.1), True),
        (Agreement("a", 3, 1, 30, 25, (0.05, 0.2), 0.1), False),
        (Agreement("a", 3, 2, 30, 25, (NAN,), 0.1), False),
        (Speed("a", 1.0, 2.0, 3.0), True),
        (Failure("a", "it broke"), False),
        (Skip("a", "no time"), True),
    ],
)
def test_records(record: Record, passed: bool) -> None:
    assert record.passed is passed
    values = as_json(record)
    assert values["passed"] is passed
    assert repr(from_json(values)) == repr(record)  # NaN equals nothing
    text = describe_record(record)
    if not passed:
        assert text is not None
        assert "FAIL" in text
        assert record.name in text


def test_the_summary_of_a_section() -> None:
    outcome = {
        "name": "attention-speed",
        "status": "passed",
        "seconds": 3.0,
        "reason": None,
        "records": [as_json(TIMING)],
    }
    other = replace(TIMING, case="of another section")
    text = describe_outcome(outcome, rooflines([TIMING, other], Ceilings(1e9, {"float16": 1.5e9})))
    assert "best: 4.0 us, 0 GB/s, 0.0 TFLOP/s, 50% of the roofline [16x64]" in text
    assert "another" not in text
    assert text.endswith("attention-speed: passed in 3 s")
