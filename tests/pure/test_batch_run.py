"""A batch job that runs to its end: bad lines, bounds, faults of the engine, equal runs."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.errors import EngineError
from pelton.runtime.batch import run
from pelton.runtime.batch.job import run_job
from pelton.runtime.batch.progress import JobProgress
from pelton.runtime.inputs import StepInputs
from pelton.runtime.request import Request
from support.batch import (
    LIMITS,
    OPTIONS,
    chat,
    completion,
    make_engine,
    mixed_lines,
    never_end,
    read_records,
    write_lines,
)

GOOD_LINES = (1, 3, 9, 10, 20)


def bad_lines() -> list[object]:
    """Lines of every kind: good ones at `GOOD_LINES`, two blank ones, the others bad."""
    good = {number: completion(f"good {number}") for number in GOOD_LINES}
    rows: dict[int, object] = {
        **good,
        2: "this is not JSON",
        4: "[]",
        5: "",
        6: '{"custom_id": "torn", "meth',
        7: b'{"custom_id": "latin \xe9"}',
        8: "  \t\r",
        9: json.dumps(good[9]) + "\r",
        10: b"\xef\xbb\xbf" + json.dumps(good[10]).encode(),
        11: completion("get") | {"method": "GET"},
        12: completion("url") | {"url": "/v1/embeddings"},
        13: completion("model", model="gpt-4"),
        14: completion("long", " ".join(["w5"] * 60)),
        15: completion("schema", temperature="hot"),
        16: completion("n", n=0),
        17: completion("stream", stream=True),
        18: completion("field", frobnicate=1),
        19: completion("body") | {"body": "text"},
        21: '{"custom_id": "nan", "method": "POST", "url": "/v1/completions", "body": {"top_p": NaN}}',
        22: completion("surrogate \ud800", "w3 \udfff"),
        23: '{"custom_id": "deep", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        24: completion("no messages") | {"url": "/v1/chat/completions"},
    }
    return [rows[number] for number in sorted(rows)]


def test_bj_04_each_bad_line_gets_one_error_record_and_the_others_are_answered(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", bad_lines())
    summary = run_job(make_engine(), source, tmp_path / "out.jsonl", OPTIONS)
    records = {int(each["id"].rpartition("_")[2]): each for each in read_records(tmp_path / "out.jsonl")}
    assert len(read_records(tmp_path / "out.jsonl")) == len(records) == 22
    assert (summary.is_complete, summary.num_blank_lines) == (True, 2)
    assert (summary.progress.num_done, summary.progress.num_errors) == (22, 17)
    for number in GOOD_LINES:
        record = records.pop(number)
        assert record["error"] is None
        assert record["custom_id"] == f"good {number}"
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["usage"]["completion_tokens"] == 4
    ids = {number: record["custom_id"] for number, record in records.items()}
    assert ids == {
        2: None, 4: None, 6: None, 7: None, 23: None,
        11: "get", 12: "url", 13: "model", 14: "long", 15: "schema", 16: "n", 17: "stream", 18: "field",
        19: "body", 21: "nan", 22: "surrogate \ud800", 24: "no messages",
    }  # fmt: skip
    fields = {number: record["error"]["param"] for number, record in records.items()}
    assert {number: field for number, field in fields.items() if field is not None} == {
        11: "method", 12: "url", 13: "model", 14: "prompt", 15: "temperature", 16: "n", 17: "stream",
        18: "frobnicate", 19: "body", 24: "prompt",
    }  # fmt: skip
    for number, record in records.items():
        assert record["error"]["line"] == number
        assert record["error"]["message"] == record["response"]["body"]["error"]["message"]
        assert record["response"]["status_code"] == (404 if number == 13 else 400)
    assert records[14]["error"]["code"] == "context_length_exceeded"


def test_bj_03_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Ten times the lines of 20 kB each: the same peak of allocations, far below the file."""
    limits = replace(LIMITS, max_model_len=8192)
    peaks = []
    for count in (40, 400):
        word = "x" * 20_000
        source = write_lines(
            tmp_path / f"{count}.jsonl",
            (completion(f"id {i}", f"w{3 + i % 250} {word}", max_tokens=1) for i in range(count)),
        )
        engine = make_engine(limits=limits)
        run_job(
            engine, write_lines(tmp_path / "warm.jsonl", [completion("a")]), tmp_path / "warm.out", OPTIONS
        )
        tracemalloc.start()
        summary = run_job(engine, source, tmp_path / f"{count}.out", OPTIONS)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        (tmp_path / "warm.out").unlink()
        assert (summary.progress.num_done, summary.progress.num_errors) == (count, 0)
    assert peaks[1] < peaks[0] * 1.25
    assert peaks[1] < 400 * 20_000 / 3


def test_bj_03_few_lines_are_in_flight_and_the_batch_is_full_from_the_first_step(tmp_path: Path) -> None:
    sizes: list[int] = []
    admitted: list[int] = []

    def before_step(step: int, inputs: StepInputs) -> None:
        sizes.append(len(inputs.seq_lens))
        admitted.append(engine.num_requests)

    engine = make_engine(before_step=before_step)
    source = write_lines(
        tmp_path / "in.jsonl", [completion(f"id {i}", f"w{i + 3}", max_tokens=3) for i in range(64)]
    )
    run_job(engine, source, tmp_path / "out.jsonl", OPTIONS)
    assert max(admitted) == 2 * LIMITS.max_batch_size
    assert set(sizes) == {LIMITS.max_batch_size}


def test_a_row_of_bad_lines_does_not_hold_up_the_engine(tmp_path: Path) -> None:
    """While a request runs, at most a few hundred lines are looked at between two of its steps."""
    written: list[int] = []
    output = tmp_path / "out.jsonl"

    def before_step(step: int, inputs: StepInputs) -> None:
        written.append(output.read_bytes().count(b"\n"))

    rows = [completion("first", max_tokens=10), *["bad"] * 2000]
    engine = make_engine(before_step=before_step)
    run_job(engine, write_lines(tmp_path / "in.jsonl", rows), output, OPTIONS)
    assert len(written) == 10
    assert max(later - earlier for earlier, later in pairwise(written)) <= 256
    assert len(read_records(output)) == 2001


def test_lines_are_admitted_in_the_order_of_the_file(tmp_path: Path) -> None:
    engine = make_engine()
    admitted: list[Request] = []
    admit = engine.admit
    engine.admit = lambda request: (admitted.append(request), admit(request))[1]  # type: ignore[method-assign]
    source = write_lines(tmp_path / "in.jsonl", [completion(f"id {i}", f"w{i + 3}") for i in range(30)])
    run_job(engine, source, tmp_path / "out.jsonl", OPTIONS)
    assert [request.prompt_token_ids for request in admitted] == [(i + 3,) for i in range(30)]


def texts(output: Path) -> dict[str, list[str]]:
    found = {}
    for record in read_records(output):
        choices: Sequence[dict[str, Any]] = record["response"]["body"]["choices"]
        found[record["custom_id"]] = [
            choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
        ]
    return found


def test_greedy_lines_are_answered_as_the_model_says(tmp_path: Path) -> None:
    prompts = [f"w{i + 3} w{2 * i + 3}" for i in range(40)]
    source = write_lines(
        tmp_path / "in.jsonl", [completion(f"id {i}", text) for i, text in enumerate(prompts)]
    )
    run_job(make_engine(), source, tmp_path / "out.jsonl", OPTIONS)
    for i, answers in enumerate(
        map(texts(tmp_path / "out.jsonl").__getitem__, (f"id {i}" for i in range(40)))
    ):
        context = [i + 3, 2 * i + 3]
        for _ in range(4):
            context.append(never_end(context))
        assert [answer.split() for answer in answers] == [[f"w{token}" for token in context[2:]]]


def test_equal_jobs_give_equal_records_whatever_the_batch(tmp_path: Path) -> None:
    """Sampled lines without a seed too, to the last byte; another `seed` of the job gives others."""
    source = write_lines(tmp_path / "in.jsonl", mixed_lines(40))
    outputs = []
    for name, options in (
        ("a", OPTIONS),
        ("b", replace(OPTIONS, max_in_flight=1)),
        ("c", replace(OPTIONS, max_in_flight=100)),
        ("d", replace(OPTIONS, seed=1)),
    ):
        run_job(make_engine(), source, tmp_path / name, options)
        outputs.append(sorted((tmp_path / name).read_bytes().splitlines()))
    assert outputs[0] == outputs[1] == outputs[2]
    first, other = texts(tmp_path / "a"), texts(tmp_path / "d")
    is_same = {kind: [first[f"id {i}"] == other[f"id {i}"] for i in range(kind, 40, 5)] for kind in range(5)}
    assert all(is_same[0] + is_same[4])  # greedy, or with a seed of its own
    assert not any(is_same[2][1:] + is_same[3][1:])
    pairs = [first[f"id {i}"] for i in (*range(7, 40, 5), *range(8, 40, 5))]
    assert all(pair[0] != pair[1] for pair in pairs if len(pair[0].split()) > 1)  # equal prompts, choices


def test_a_failed_step_costs_only_its_own_lines(tmp_path: Path) -> None:
    def before_step(step: int, inputs: StepInputs) -> None:
        if step in (6, 16):
            raise RuntimeError("lost device")

    engine = make_engine(before_step=before_step)
    source = write_lines(tmp_path / "in.jsonl", [completion(f"id {i}", f"w{i + 3}") for i in range(28)])
    summary = run_job(engine, source, tmp_path / "out.jsonl", replace(OPTIONS, max_failures=5))
    records = read_records(tmp_path / "out.jsonl")
    assert Counter(record["response"]["status_code"] for record in records) == {200: 20, 500: 8}
    assert len({record["custom_id"] for record in records}) == 28
    assert summary.progress.num_errors == 8
    failed = next(record for record in records if record["error"] is not None)
    assert "the engine failed on this request" in failed["error"]["message"]


def test_a_broken_engine_stops_the_job_and_uses_up_no_lines(tmp_path: Path) -> None:
    """Else a lost device would turn a file of millions into error records."""
    is_broken = True

    def before_step(step: int, inputs: StepInputs) -> None:
        if is_broken and step > 8:
            raise RuntimeError("lost device")

    source = write_lines(
        tmp_path / "in.jsonl", [completion(f"id {i}", f"w{i % 250 + 3}") for i in range(300)]
    )
    with pytest.raises(EngineError, match=r"20 lines in a row failed .* the engine failed on this"):
        run_job(
            make_engine(before_step=before_step),
            source,
            tmp_path / "out.jsonl",
            replace(OPTIONS, max_failures=20),
        )
    assert 0 < len(read_records(tmp_path / "out.jsonl")) < 20
    is_broken = False
    summary = run_job(make_engine(before_step=before_step), source, tmp_path / "out.jsonl", OPTIONS)
    assert (summary.progress.num_done, summary.progress.num_errors) == (300, 0)
    assert 0 < summary.progress.num_done_before < 20


def test_failures_at_the_end_of_the_file_are_written(tmp_path: Path) -> None:
    def before_step(step: int, inputs: StepInputs) -> None:
        if step > 4:
            raise RuntimeError("lost device")

    source = write_lines(tmp_path / "in.jsonl", [completion(f"id {i}") for i in range(7)])
    summary = run_job(make_engine(before_step=before_step), source, tmp_path / "out.jsonl", OPTIONS)
    assert summary.is_complete
    records = read_records(tmp_path / "out.jsonl")
    assert Counter(record["response"]["status_code"] for record in records) == {200: 4, 500: 3}


def test_one_bad_prompt_of_a_list_ends_its_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The others of the list are let go, at admission and later."""

    def before_step(step: int, inputs: StepInputs) -> None:
        if 77 in inputs.input_ids:
            raise RuntimeError("cannot compute 77")

    limits = replace(LIMITS, num_blocks=4)  # 12 tokens can never fit: refused at admission
    engine = make_engine(before_step=before_step, limits=limits)
    slow = [completion("later", ["w77", "w5", "w6", "w7", "w8", "w9"], max_tokens=9)]
    rows = [
        *slow,
        completion("never", ["w5", "w6", " ".join(["w7"] * 20)]),
        *(completion(f"id {i}") for i in range(9)),
    ]
    summary = run_job(engine, write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", OPTIONS)
    errors = {
        each["custom_id"]: each for each in read_records(tmp_path / "out.jsonl") if each["error"] is not None
    }
    assert errors["never"]["response"]["status_code"] == 400
    assert errors["later"]["response"]["status_code"] == 500
    assert summary.progress.num_errors == len(errors) == 2
    num_finished = engine.stats().num_finished
    assert (num_finished["length"], sum(num_finished.values())) == (9, 9 + 6 + 2)
    assert not engine.has_work
    engine.check_invariants()


def test_one_bad_choice_ends_its_line_and_the_other_choices(tmp_path: Path) -> None:
    def after_step(step: int, logits: np.ndarray) -> None:
        if step == 3:
            logits[1] = np.nan

    engine = make_engine(after_step=after_step)
    rows = [completion("three", n=3, temperature=1.0, max_tokens=40), completion("good", "w9")]
    run_job(engine, write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", OPTIONS)
    statuses = {
        each["custom_id"]: each["response"]["status_code"] for each in read_records(tmp_path / "out.jsonl")
    }
    assert statuses == {"three": 500, "good": 200}
    assert engine.stats().num_finished == {"error": 1, "abort": 2, "length": 1}


@pytest.mark.parametrize("where", ["read_call", "answer_record"])
def test_a_bug_that_one_line_meets_is_an_error_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    original = getattr(run, where)

    def broken(*arguments: object) -> object:
        if "unlucky" in repr(arguments):
            raise ZeroDivisionError("oops")
        return original(*arguments)

    monkeypatch.setattr(run, where, broken)
    rows = [completion("a"), completion("b", "unlucky", user="unlucky"), completion("c")]
    if where == "answer_record":
        rows[1]["custom_id"] = "unlucky"
    summary = run_job(
        make_engine(), write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", OPTIONS
    )
    assert (summary.progress.num_done, summary.progress.num_errors) == (3, 1)
    (failed,) = (each for each in read_records(tmp_path / "out.jsonl") if each["error"] is not None)
    assert failed["custom_id"] == rows[1]["custom_id"]
    assert failed["response"]["status_code"] == 500
    assert "ZeroDivisionError('oops')" in failed["error"]["message"]
    assert "line 2 met a bug" in caplog.text


def test_progress_counts_lines_tokens_and_prefix_hits(tmp_path: Path) -> None:
    shared = " ".join(["w9"] * 16)
    rows = [chat(f"id {i}", f"{shared} w{i + 20}") for i in range(24)]
    seconds = iter(range(10_000))
    seen: list[JobProgress] = []
    summary = run_job(
        make_engine(),
        write_lines(tmp_path / "in.jsonl", ["bad", *rows]),
        tmp_path / "out.jsonl",
        OPTIONS,
        seen.append,
        clock=lambda: float(next(seconds)),
    )
    last = seen[-1]
    assert replace(last, elapsed_s=0) == replace(summary.progress, elapsed_s=0)
    assert (last.num_requests, last.num_done, last.num_errors, last.num_in_flight) == (25, 25, 1, 0)
    assert last.num_output_tokens == 24 * 4
    assert last.num_prompt_tokens == 24 * 18
    assert 0.5 < last.prefix_hit_rate < 1
    assert last.eta_s == 0
    assert any(0 < each.num_in_flight <= 8 for each in seen)
    counts = [each.num_done for each in seen]
    assert counts == sorted(counts)
    middle = next(each for each in seen if each.num_in_flight <= each.num_done < 25 and each.num_done > 1)
    assert middle.eta_s == pytest.approx((25 - middle.num_done) * middle.elapsed_s / middle.num_done)
