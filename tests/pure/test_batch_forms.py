"""Lines of a batch job that ask for a form: the others do not wait, and a busy machine refuses none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pelton.runtime.batch.job import run_job
from pelton.runtime.batch.progress import JobProgress
from support.batch import OPTIONS, completion, read_records, write_lines
from support.gated_compiler import gate
from support.tiny_model import scripted_engine


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    made = completion(custom_id, "a", **fields)
    del made["body"]["model"]  # type: ignore[attr-defined]
    return made


def answers(path: Path) -> dict[str, str | int]:
    """In the order of their records: the text, or the status of an error."""
    return {
        each["custom_id"]: each["response"]["status_code"]
        if each["error"] is not None
        else each["response"]["body"]["choices"][0]["text"]
        for each in read_records(path)
    }


def test_lines_without_a_form_run_while_forms_are_compiled(tmp_path: Path) -> None:
    engine = scripted_engine()
    compiler = gate(engine)
    rows = [line("slow 1", guided_choice=["slow"]), line("slow 2", guided_choice=["slower"])]
    rows += [line(f"plain {number}") for number in range(20)]
    source = write_lines(tmp_path / "in.jsonl", rows)

    def on_progress(progress: JobProgress) -> None:
        if progress.num_done == 20:
            compiler.gate.set()

    ticks = iter(range(10**9))
    run_job(engine, source, tmp_path / "out.jsonl", OPTIONS, on_progress, clock=lambda: float(next(ticks)))
    found = answers(tmp_path / "out.jsonl")
    assert list(found)[:20] == [f"plain {number}" for number in range(20)]
    assert (found["slow 1"], found["slow 2"]) == ("slow", "slow")


@pytest.mark.parametrize(("num_late", "expected"), [(2, "yes"), (99, 400)])
def test_a_form_that_takes_too_long_is_tried_again(
    tmp_path: Path, num_late: int, expected: str | int
) -> None:
    engine = scripted_engine()
    compiler = gate(engine, num_late=num_late)
    rows = [line("form", guided_choice=["yes"]), line("bad", guided_regex="("), line("plain")]
    run_job(engine, write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", OPTIONS)
    assert answers(tmp_path / "out.jsonl") == {"form": expected, "bad": 400, "plain": "bcde"}
    assert max(compiler.tries.values()) == 3


def test_a_job_stops_while_forms_are_compiled(tmp_path: Path) -> None:
    engine = scripted_engine()
    compiler = gate(engine)
    source = write_lines(tmp_path / "in.jsonl", [line("slow", guided_choice=["slow"])])
    stop = iter([False, False, True])
    try:
        first = run_job(engine, source, tmp_path / "out.jsonl", OPTIONS, should_stop=lambda: next(stop))
    finally:
        compiler.gate.set()
    assert (first.is_complete, read_records(tmp_path / "out.jsonl")) == (False, [])
    assert run_job(engine, source, tmp_path / "out.jsonl", OPTIONS).is_complete
    assert answers(tmp_path / "out.jsonl") == {"slow": "slow"}
