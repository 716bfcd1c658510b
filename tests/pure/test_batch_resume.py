"""A batch job that is killed, stopped, torn or confused with another one, and run again."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pelton.errors import JobError
from pelton.runtime.batch import results
from pelton.runtime.batch.job import BatchJob, JobOptions, run_job
from pelton.runtime.inputs import StepInputs
from support.batch import OPTIONS, completion, make_engine, mixed_lines, read_records, write_lines

NUM_LINES = 60


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows: list[object] = [*mixed_lines(NUM_LINES - 2), "not json", "[]"]
    return write_lines(tmp_path / "in.jsonl", rows)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def undisturbed(source: Path, tmp_path: Path) -> list[bytes]:
    """The sorted records of a run that nothing disturbs."""
    run_job(make_engine(), source, tmp_path / "undisturbed.jsonl", OPTIONS)
    return sorted_records(tmp_path / "undisturbed.jsonl")


def sorted_records(path: Path) -> list[bytes]:
    return sorted(path.read_bytes().splitlines(keepends=True))


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its exit status (negative: the signal that killed it)."""

    def body() -> None:
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def killing_at(step: int) -> Callable[[int, StepInputs], None]:
    def before_step(number: int, inputs: StepInputs) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_step


def run_killed(source: Path, output: Path, step: int, *, in_write: bool) -> None:
    """Kill -9 at an engine step, or in the middle of the first write after as many writes."""

    def work() -> None:
        if not in_write:
            run_job(make_engine(before_step=killing_at(step)), source, output, OPTIONS)
            return
        num_writes = 0

        def write(fd: int, data: memoryview) -> int:
            nonlocal num_writes
            num_writes += 1
            if num_writes < step:
                return os.write(fd, data)
            os.write(fd, data[: len(data) - 20])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        results.os = SimpleNamespace(**{**vars(os), "write": write})  # type: ignore[attr-defined]
        run_job(make_engine(), source, output, OPTIONS)

    assert in_child(work) == -signal.SIGKILL


@pytest.mark.parametrize("in_write", [False, True], ids=["between writes", "in a write"])
@pytest.mark.parametrize("steps", [(1, 2), (12, 15), (25, 9), (3, 30)])
def test_bj_02_killed_twice_and_resumed_equals_an_undisturbed_run(
    source: Path, output: Path, undisturbed: list[bytes], steps: tuple[int, int], in_write: bool
) -> None:
    sizes = [0]
    for step in steps:
        run_killed(source, output, step, in_write=in_write)
        data = output.read_bytes()
        assert data.endswith(b"\n") == (not in_write and bool(data))
        sizes.append(data.count(b"\n"))
    assert sizes == sorted(sizes)
    engine = make_engine()
    summary = run_job(engine, source, output, OPTIONS)
    assert sorted_records(output) == undisturbed
    assert summary.progress.num_done_before == sizes[-1]
    assert summary.progress.num_done == NUM_LINES
    assert (summary.num_dropped_bytes > 0) == in_write
    assert summary.progress.num_errors == 2


def test_bj_02_every_kill_point_resumes_with_each_id_once(tmp_path: Path) -> None:
    """The output cut at any byte, as a power cut may leave it."""
    source = write_lines(
        tmp_path / "in.jsonl", [completion(f"id {i}", f"w{i + 3}", max_tokens=1) for i in range(4)]
    )
    output = tmp_path / "out.jsonl"
    run_job(make_engine(), source, output, OPTIONS)
    whole = output.read_bytes()
    engine = make_engine()
    for size in range(0, len(whole), 29):
        output.write_bytes(whole[:size])
        summary = run_job(engine, source, output, OPTIONS)
        assert sorted_records(output) == sorted(whole.splitlines(keepends=True))
        assert summary.progress.num_done_before == whole[:size].count(b"\n")


def test_bj_02_only_missing_lines_run_again(source: Path, output: Path, undisturbed: list[bytes]) -> None:
    run_job(make_engine(), source, output, OPTIONS)
    kept = [line for line in output.read_bytes().splitlines(keepends=True) if b'"id 7"' not in line]
    assert len(kept) == NUM_LINES - 1
    output.write_bytes(b"".join(kept))
    engine = make_engine()
    run_job(engine, source, output, OPTIONS)
    assert sum(engine.stats().num_finished.values()) == 2  # the two prompts of line "id 7"
    assert output.read_bytes().startswith(b"".join(kept))
    assert sorted_records(output) == undisturbed
    engine = make_engine()
    summary = run_job(engine, source, output, OPTIONS)
    assert engine.stats().num_steps == 0
    assert (summary.is_complete, summary.progress.num_errors) == (True, 2)


@pytest.mark.parametrize(
    "damage", [b"", b'{"id": "batch_re\n', b"\x00" * 300 + b"\n", b"[]\n", b"[" * 9999 + b"\n"]
)
def test_bj_02_damage_before_good_records_costs_only_itself(
    source: Path, output: Path, undisturbed: list[bytes], damage: bytes
) -> None:
    """Blocks of a file may reach the disk out of order; a record that is there twice counts once."""
    run_job(make_engine(), source, output, OPTIONS)
    rows = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join([*rows[:10], damage, *rows[11:30], rows[5], *rows[30:50], b"torn"]))
    summary = run_job(make_engine(), source, output, OPTIONS)
    assert summary.progress.num_done_before == 49
    assert summary.num_dropped_bytes == len(damage) + len(rows[5]) + 4
    assert sorted_records(output) == undisturbed
    assert output.read_bytes().startswith(b"".join([*rows[:10], *rows[11:50]]))


def test_bj_02_output_that_is_the_input_is_refused(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    (tmp_path / "soft").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "out.jsonl.journal").hardlink_to(source)
    (tmp_path / "folder").symlink_to(tmp_path)
    for name in ("in.jsonl", "soft", "hard", "out.jsonl", "folder/in.jsonl", f"../{tmp_path.name}/in.jsonl"):
        for options in (OPTIONS, replace(OPTIONS, overwrite=True)):
            with pytest.raises(JobError, match="is the input file"):
                run_job(make_engine(), source, tmp_path / name, options)
    assert source.read_bytes() == before


def test_an_output_that_is_no_file_is_refused(source: Path, tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(JobError, match="not a regular file"):
            run_job(make_engine(), source, path, OPTIONS)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (replace(OPTIONS, engine_key="rebuilt"), "engine or chat template"),
        (replace(OPTIONS, model_names=("scripted", "other")), "model names"),
        (replace(OPTIONS, seed=5), "seed"),
        (OPTIONS, "input"),
    ],
)
def test_results_of_another_job_are_refused_and_kept_unless_overwritten(
    source: Path, output: Path, tmp_path: Path, options: JobOptions, what: str
) -> None:
    run_job(make_engine(), source, output, OPTIONS)
    results_before = output.read_bytes()
    if what == "input":
        write_lines(source, mixed_lines(NUM_LINES + 1))
    with pytest.raises(JobError, match=rf"another job \(not the same: {what}\).*--overwrite"):
        run_job(make_engine(), source, output, options)
    assert output.read_bytes() == results_before
    run_job(make_engine(), source, output, replace(options, overwrite=True))
    run_job(make_engine(), source, tmp_path / "fresh", options)
    assert sorted_records(output) == sorted_records(tmp_path / "fresh")


def test_overwrite_keeps_results_of_the_same_job(source: Path, output: Path) -> None:
    """So the command that was killed can be repeated as it is."""
    assert in_child(lambda: run_job(make_engine(before_step=killing_at(20)), source, output, OPTIONS)) < 0
    kept = output.read_bytes()
    assert kept
    run_job(make_engine(), source, output, replace(OPTIONS, overwrite=True))
    assert output.read_bytes().startswith(kept)


def test_a_file_that_no_job_made_is_refused_and_kept_unless_overwritten(source: Path, output: Path) -> None:
    output.write_text("notes\n")
    with pytest.raises(JobError, match="does not say that a batch job made it"):
        run_job(make_engine(), source, output, OPTIONS)
    assert output.read_text() == "notes\n"
    assert not Path(f"{output}.journal").exists()
    run_job(make_engine(), source, output, replace(OPTIONS, overwrite=True))
    assert len(read_records(output)) == NUM_LINES


def test_results_without_their_journal_are_known_by_their_ids(
    source: Path, output: Path, undisturbed: list[bytes]
) -> None:
    run_job(make_engine(), source, output, OPTIONS)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:30]))
    for journal in (None, b'{"pelton_batch_job": "'):
        Path(f"{output}.journal").unlink()
        if journal is not None:
            Path(f"{output}.journal").write_bytes(journal)
        summary = run_job(make_engine(), source, output, OPTIONS)
        assert sorted_records(output) == undisturbed
    assert summary.progress.num_done_before == NUM_LINES


def test_a_record_of_another_job_among_ours_is_refused_and_kept(
    source: Path, output: Path, tmp_path: Path
) -> None:
    run_job(make_engine(), source, output, OPTIONS)
    run_job(make_engine(), source, tmp_path / "other", replace(OPTIONS, seed=3))
    with output.open("ab") as file:
        file.write(sorted_records(tmp_path / "other")[0])
    before = output.read_bytes()
    with pytest.raises(JobError, match=f"line {NUM_LINES + 1}: a result of another job"):
        run_job(make_engine(), source, output, OPTIONS)
    assert output.read_bytes() == before


def test_two_processes_cannot_share_an_output(source: Path, output: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(output)
    with BatchJob(source, output, OPTIONS) as job:
        for path in (output, tmp_path / "alias"):
            with pytest.raises(JobError, match="is being written by another process"):
                BatchJob(source, path, OPTIONS)
        job.run(make_engine())
    with BatchJob(source, output, OPTIONS) as job:
        assert job.found.is_complete


def test_a_stop_leaves_nothing_in_flight_and_resumes(
    source: Path, output: Path, undisturbed: list[bytes]
) -> None:
    engine = make_engine()
    checks = iter(range(1000))
    summary = run_job(engine, source, output, OPTIONS, should_stop=lambda: next(checks) >= 12)
    assert not engine.has_work
    assert not summary.is_complete
    assert summary.progress.num_in_flight == 0
    num_done = len(read_records(output))
    assert 0 < num_done == summary.progress.num_done < NUM_LINES
    summary = run_job(engine, source, output, OPTIONS)
    assert summary.progress.num_done_before == num_done
    assert sorted_records(output) == undisturbed


def test_a_full_disk_ends_the_run_with_whole_records(
    source: Path, output: Path, undisturbed: list[bytes]
) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        with pytest.raises(JobError, match=r"cannot write .*out\.jsonl: .*run the same command again"):
            run_job(make_engine(), source, output, OPTIONS)

    assert in_child(work) == 0
    data = output.read_bytes()
    assert 0 < len(data) < 9000
    assert data.endswith(b"\n")
    assert all(json.loads(line)["id"] for line in data.splitlines())
    run_job(make_engine(), source, output, OPTIONS)
    assert sorted_records(output) == undisturbed


def test_records_reach_the_disk_within_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    synced: list[float] = []
    monkeypatch.setattr(results.os, "fsync", lambda fd: synced.append(now))
    writer = results.ResultWriter(tmp_path / "out.jsonl", 2.0, lambda: now)
    synced.clear()
    for now in (101.0, 102.0, 102.9, 103.0, 104.0, 105.5, 106.0, 109.0):
        if now != 109.0:
            writer.append([b"record\n"])
        writer.sync_if_due()
    assert synced == [103.0, 106.0]
    writer.append([b"record\n"])
    writer.close()
    assert synced == [103.0, 106.0, 109.0]
    assert (tmp_path / "out.jsonl").read_bytes() == b"record\n" * 8
