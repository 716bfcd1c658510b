"""What a batch job refuses before any work, and how it reads lines."""

from __future__ import annotations

import hashlib
import io
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.errors import JobError, RequestError
from pelton.runtime.batch import digests, lines
from pelton.runtime.batch.digests import RepeatFinder
from pelton.runtime.batch.job import run_job
from pelton.runtime.batch.lines import RawLine, parse_line, read_lines
from pelton.runtime.batch.scan import scan_input
from support.batch import OPTIONS, completion, make_engine, read_records, write_lines


def refusal(tmp_path: Path, content: list[object]) -> str:
    """The message that refuses a job of these lines. Nothing may have run or been left behind."""
    engine = make_engine()
    source = write_lines(tmp_path / "in.jsonl", content)
    with pytest.raises(JobError) as caught:
        run_job(engine, source, tmp_path / "out.jsonl", OPTIONS)
    assert engine.stats().num_steps == 0
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    return str(caught.value)


def test_bj_01_unusable_ids_are_refused_with_their_lines_before_any_work(tmp_path: Path) -> None:
    nameless = completion("x")
    del nameless["custom_id"]
    message = refusal(
        tmp_path,
        [
            completion("a"),
            "",
            completion("b"),
            completion("a", "w5"),
            nameless,
            completion(""),
            completion(7),
            completion(None),
            "not json",
            completion("a "),
            completion("a"),
        ],
    )
    assert "6 lines without a usable custom_id" in message
    assert "missing on lines 5, 8;" in message
    assert "empty on line 6;" in message
    assert "not a string on line 7;" in message
    assert "duplicate on lines 4 (as on line 1), 11 (as on line 1)." in message


def test_bj_01_the_first_twenty_lines_of_a_kind_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, [completion("same") for _ in range(31)])
    assert "30 lines without a usable custom_id" in message
    listed = ", ".join(f"{number} (as on line 1)" for number in range(2, 22))
    assert f"duplicate on lines {listed} and 10 more." in message
    message = refusal(tmp_path, [completion("") for _ in range(23)])
    assert f"empty on lines {', '.join(map(str, range(1, 21)))} and 3 more." in message


def test_bj_01_ids_come_back_byte_for_byte(tmp_path: Path) -> None:
    ids = [
        " spaced ",
        " ",
        "x" * 10_000,
        "\u0000\t\n\r",
        'q"\\/',
        "č 漢 👩‍👩‍👧",
        "e\u0301",
        "\u00e9",
        "\u2028\u0085",
    ]
    source = write_lines(
        tmp_path / "in.jsonl",
        [json.dumps(completion(name), ensure_ascii=i % 2 == 0) for i, name in enumerate(ids)],
    )
    summary = run_job(make_engine(), source, tmp_path / "out.jsonl", OPTIONS)
    assert summary.progress.num_errors == 0
    by_line = {
        int(record["id"].rpartition("_")[2]): record for record in read_records(tmp_path / "out.jsonl")
    }
    assert [by_line[number]["custom_id"] for number in range(1, len(ids) + 1)] == ids
    # Readers that split on every line end of Unicode see as many lines as there are records.
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(ids)


def test_bj_01_jobs_with_equal_ids_share_no_internal_id(tmp_path: Path) -> None:
    """One engine, two inputs of the same custom_ids: ids inside are made of job and line."""
    engine = make_engine()
    admitted: list[str] = []
    admit = engine.admit
    engine.admit = lambda request: (admitted.append(request.request_id), admit(request))[1]  # type: ignore[method-assign]
    for name in ("one", "two"):
        source = write_lines(
            tmp_path / f"{name}.jsonl", [completion(f"id {i}", f"w{len(name)} w{i + 5}") for i in range(5)]
        )
        source.write_bytes(source.read_bytes() + b"\n" * (name == "two"))
        run_job(engine, source, tmp_path / f"{name}.out", OPTIONS)
    records = [record for name in ("one", "two") for record in read_records(tmp_path / f"{name}.out")]
    assert len({record["id"] for record in records}) == 10
    assert len({record["response"]["body"]["id"] for record in records}) == 10
    assert len(set(admitted)) == 10
    assert not any("id " in request_id for request_id in admitted)


@pytest.mark.parametrize("bytes_in_memory", [0, 100, 1 << 20])
def test_repeats_are_those_that_a_dictionary_finds(
    bytes_in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the buckets have gone to files."""
    monkeypatch.setattr(digests, "_BUCKET_BYTES_IN_MEMORY", bytes_in_memory)
    pick = random.Random(5)
    texts = [f"id-{pick.randrange(3000)}" for _ in range(4000)]
    firsts: dict[str, int] = {}
    expected = []
    finder = RepeatFinder()
    for number, text in enumerate(texts, 1):
        finder.add(number, text)
        if firsts.setdefault(text, number) != number:
            expected.append((number, firsts[text]))
    assert finder.repeats(25) == (len(expected), expected[:25])
    finder.close()


@given(
    st.lists(st.sampled_from([b"{}", b"", b" ", b"\xef\xbb\xbf[]", b"x\r", b"long long line"]), max_size=12),
    st.booleans(),
)
def test_lines_are_numbered_as_an_editor_does(content: list[bytes], has_last_newline: bool) -> None:
    data = b"\n".join(content) + b"\n" * has_last_newline
    seen = hashlib.sha256()
    found = list(read_lines(io.BytesIO(data), seen.update))
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [line.data for line in found] == [
        each.removesuffix(b"\r").removeprefix(b"\xef\xbb\xbf") for each in expected
    ]
    assert [line.number for line in found] == list(range(1, len(expected) + 1))
    assert seen.digest() == hashlib.sha256(data).digest()


def test_a_line_beyond_the_bound_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 8)
    monkeypatch.setattr(lines, "_DISCARD_BYTES", 3)
    data = b"12345678\n123456789\n1234567890123456789\nabc\n123456789"
    seen = hashlib.sha256()
    found = [(line.data, line.is_oversized) for line in read_lines(io.BytesIO(data), seen.update)]
    assert found == [(b"12345678", False), (b"", True), (b"", True), (b"abc", False), (b"", True)]
    assert seen.digest() == hashlib.sha256(data).digest()
    with pytest.raises(RequestError, match="longer than 8 bytes"):
        parse_line(RawLine(2, b"", is_oversized=True))


def test_an_input_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion(f"id {i}") for i in range(1500)])

    def grow(num_bytes: int, total_bytes: int) -> None:
        with source.open("ab") as file:
            file.write(b'{"custom_id": "late"}\n')

    with source.open("rb") as file, pytest.raises(JobError, match="changed while it was read"):
        scan_input(file, "in.jsonl", grow)


def test_an_input_that_changes_while_the_job_runs_is_an_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion(f"id {i}") for i in range(5)])

    def grow(step: int, inputs: object) -> None:
        with source.open("ab") as file:
            file.write(b"\n")

    with pytest.raises(JobError, match="changed while the job ran"):
        run_job(make_engine(before_step=grow), source, tmp_path / "out.jsonl", OPTIONS)


def test_an_input_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        run_job(make_engine(), tmp_path / "none.jsonl", tmp_path / "out.jsonl", OPTIONS)
    with pytest.raises(JobError, match="not a regular file"):
        run_job(make_engine(), Path("/dev/null"), tmp_path / "out.jsonl", OPTIONS)
    source = write_lines(tmp_path / "in.jsonl", [completion("a")])
    with pytest.raises(JobError, match="does not exist; make it first"):
        run_job(make_engine(), source, tmp_path / "none" / "out.jsonl", OPTIONS)
