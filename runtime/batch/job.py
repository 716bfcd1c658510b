"""A batch job: every line of a file through an engine, each answered once, however often it is killed.

    input --scan--> ids, count, content key       nothing is written before the input is found usable
          --read--> admit in file order, a bounded number at a time --engine.step--> record --> output

Records are written as their lines are done, so the output is in order of completion, not of the input.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ...errors import JobError
from ..engine import Engine
from .journal import JobHeader, JobJournal, journal_path
from .lines import read_lines
from .progress import JobProgress, JobSummary
from .results import ResultReader, ResultWriter
from .run import JobRun, OnProgress, RunSettings
from .scan import OnScan, file_stamp, scan_input

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JobOptions:
    """`engine_key` identifies the engine by content, with every setting of it that changes answers.

    `engine_key`, `model_names` and `seed` are part of the job's identity; the others are not. Requests
    without a seed get one that follows from the job, the line and `seed`, so that a resumed run equals an
    undisturbed one. `max_in_flight` bounds the choices admitted but not done (None: twice the engine's batch
    size, so that a full batch waits behind the one that runs); one line alone may exceed it. After
    `max_failures` lines in a row that the engine (not the line) is to blame for, the run stops.
    `sync_interval_s` bounds the finished work that a power cut (not a kill) can undo.
    """

    engine_key: str
    model_names: tuple[str, ...]
    seed: int = 0
    max_in_flight: int | None = None
    max_failures: int = 100
    overwrite: bool = False
    sync_interval_s: float = 1.0


class BatchJob:
    """An input found usable and an output claimed for it. A context manager; `run` it once."""

    def __init__(
        self, input_path: Path, output_path: Path, options: JobOptions, on_scan: OnScan | None = None
    ) -> None:
        """Whatever can be refused without an engine is refused here, with `JobError`."""
        self._options = options
        self._input_path = input_path
        self._output_path = output_path.resolve()
        try:
            with ExitStack() as stack:
                self._open(stack, on_scan)
                self._stack = stack.pop_all()
        except OSError as error:
            raise JobError(f"{error.filename or self._output_path}: {error.strerror}") from error

    def _open(self, stack: ExitStack, on_scan: OnScan | None) -> None:
        self._file = stack.enter_context(_open_input(self._input_path))
        _check_output(self._output_path, self._file)
        journal = stack.enter_context(JobJournal(self._output_path))
        self._scan = scan_input(self._file, str(self._input_path), on_scan)
        options = self._options
        created = self._scan.stamp[1] // 10**9
        header = JobHeader(self._scan.sha256, options.engine_key, options.model_names, options.seed, created)
        self._header = journal.claim(header, options.overwrite)
        self._results = ResultReader(self._output_path, self._header.job_id, self._scan.num_lines)
        num_dropped_bytes = self._results.recover()
        self._output_path.touch()
        num_done = self._results.done.count
        progress = JobProgress(self._scan.num_requests, num_done, num_done, self._results.num_errors)
        self.found = JobSummary(progress, self._scan.num_blank, num_dropped_bytes)
        """The job as earlier runs left it."""

    def run(
        self,
        engine: Engine,
        on_progress: OnProgress | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> JobSummary:
        """Answer the missing lines. Ends early, with nothing in flight, once `should_stop()` is true."""
        options = self._options
        settings = RunSettings(
            self._header.job_id,
            self._header.created,
            options.model_names,
            options.max_in_flight or 2 * engine.limits.max_batch_size,
            options.max_failures,
        )
        self._file.seek(0)
        lines = read_lines(self._file)
        writer = ResultWriter(self._output_path, options.sync_interval_s, clock)
        try:
            run = JobRun(engine, lines, writer, self._results.done, self.found.progress, settings, clock)
            run.drive(on_progress, should_stop)
        finally:
            writer.close()
        if file_stamp(self._file) != self._scan.stamp:
            raise JobError(
                f"{self._input_path} changed while the job ran, so its results may belong to other lines; "
                "run it again with --overwrite"
            )
        return replace(self.found, progress=run.progress())

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_job(
    engine: Engine,
    input_path: Path,
    output_path: Path,
    options: JobOptions,
    on_progress: OnProgress | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> JobSummary:
    """Open the job and run it to its end; see `BatchJob`."""
    with BatchJob(input_path, output_path, options) as job:
        return job.run(engine, on_progress, should_stop=should_stop, clock=clock)


def _open_input(path: Path) -> BinaryIO:
    """Raises `JobError` for what cannot be read twice."""
    if path.exists() and not path.is_file():
        raise JobError(
            f"{path} is not a regular file; a batch job reads its input twice, so save it to one first"
        )
    return path.open("rb", buffering=_READ_BYTES)


def _check_output(output: Path, input_file: BinaryIO) -> None:
    for path in (output, journal_path(output)):
        if not path.exists():
            continue
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise JobError(f"{path} is not a regular file; name another output")
        if os.path.samestat(status, os.fstat(input_file.fileno())):
            raise JobError(f"the output ({path}) is the input file; name another output")
    if not output.parent.is_dir():
        raise JobError(f"the folder {output.parent} of the output does not exist; make it first")
