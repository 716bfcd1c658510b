"""What a build is doing, how long it took and how much memory it needed, on stderr.

On a terminal the running stage is a live line; elsewhere (CI, a file) each stage is a plain line when it
starts and one when it ends. Memory is this process's resident set, weights mapped from files included.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import psutil
from rich.console import Console
from rich.markup import escape
from rich.status import Status

_SAMPLE_SECONDS = 0.1
_STEP_SECONDS = 30.0  # between lines on steps where nobody watches


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One finished stage: wall seconds and the largest resident set seen in it, in bytes."""

    name: str
    seconds: float
    peak_bytes: int


class Progress:
    """Reports stages one after the other; `records` keeps what was measured."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._clock = clock
        self._start = clock()
        self._active: str | None = None
        self._step = ""
        self._step_printed = self._start
        self.records: list[StageRecord] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time and measure the body; a stage that raises is reported as failed and the exception goes on."""
        if self._active is not None:
            raise RuntimeError(f"stage {name!r} started inside {self._active!r}; stages follow one another")
        self._active = name
        start = self._clock()
        self._step, self._step_printed = "", start
        live = self._console.is_terminal
        status = self._console.status(escape(name)) if live else None
        if not live:
            self._console.print(f"{escape(name)} ...")
        sampler = _Sampler(lambda rss, peak: self._refresh(status, name, start, rss, peak))
        verb = "failed after"
        try:
            with sampler:
                if status is not None:
                    status.start()
                yield
            verb = "done in"
        finally:
            if status is not None:
                status.stop()
            self._active = None
            seconds = self._clock() - start
            self.records.append(StageRecord(name, seconds, sampler.peak))
            self._console.print(
                f"{escape(name)}: {verb} {format_seconds(seconds)}, peak memory {format_bytes(sampler.peak)}"
            )

    def step(self, text: str) -> None:
        """Where the running stage stands: part of the live line; elsewhere a line every `_STEP_SECONDS` at most.

        May be called thousands of times, from any thread.
        """
        self._step = text
        now = self._clock()
        if not self._console.is_terminal and now - self._step_printed >= _STEP_SECONDS:
            self._step_printed = now
            self.note(text)

    def note(self, text: str) -> None:
        """One line of information, such as what was found."""
        self._console.print(f"  {escape(text)}")

    def warning(self, text: str) -> None:
        """One line that the user should read."""
        self._console.print(f"[yellow]warning:[/yellow] {escape(text)}")

    def summary(self) -> None:
        """Total time and the peak memory of the whole process."""
        seconds = format_seconds(self._clock() - self._start)
        self._console.print(f"total: {seconds}, peak memory {format_bytes(process_peak_bytes())}")

    def _refresh(self, status: Status | None, name: str, start: float, rss: int, peak: int) -> None:
        if status is not None:
            elapsed = format_seconds(self._clock() - start)
            step = f"{escape(self._step)}  " if self._step else ""
            status.update(
                f"{escape(name)}  {elapsed}  {step}memory {format_bytes(rss)} (peak {format_bytes(peak)})"
            )


class _Sampler:
    """Reads the resident set at the start, at the end and every `_SAMPLE_SECONDS` between, in a thread."""

    def __init__(self, on_sample: Callable[[int, int], None]) -> None:
        self._process = psutil.Process()
        self._on_sample = on_sample
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pelton-progress", daemon=True)
        self.peak = 0

    def __enter__(self) -> _Sampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        rss = self._process.memory_info().rss
        self.peak = max(self.peak, rss)
        self._on_sample(rss, self.peak)


def process_peak_bytes() -> int:
    """The largest resident set of this process so far, as the kernel counted it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def format_seconds(seconds: float) -> str:
    """`0.4 s`, `12.3 s`, `3 min 05 s`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_bytes(count: int) -> str:
    """`812 MiB`, `1.9 GiB`."""
    mib = count / 2**20
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
