"""How `pelton batch` shows its progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..runtime.batch.progress import JobProgress

LINE_INTERVAL_S = 10.0


class Display(Protocol):
    def show_scan(self, num_bytes: int, total_bytes: int) -> None: ...

    def show(self, progress: JobProgress) -> None: ...

    def close(self) -> None: ...


def make_display(stream: TextIO) -> Display:
    console = Console(file=stream)
    return BarDisplay(console) if console.is_terminal else LineDisplay(stream)


class BarDisplay:
    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), console=console
        )
        self._task = self._bar.add_task("checking", total=None, text="")
        self._bar.start()

    def show_scan(self, num_bytes: int, total_bytes: int) -> None:
        text = f"{num_bytes / 1e6:.0f}/{total_bytes / 1e6:.0f} MB"
        self._bar.update(self._task, completed=num_bytes, total=total_bytes, text=text)

    def show(self, progress: JobProgress) -> None:
        self._bar.update(
            self._task,
            description="batch",
            completed=progress.num_done,
            total=progress.num_requests,
            text=describe(progress),
        )

    def close(self) -> None:
        self._bar.stop()


class LineDisplay:
    """At most one line per `LINE_INTERVAL_S`, and none for a job shorter than that."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._shown = clock()

    def show_scan(self, num_bytes: int, total_bytes: int) -> None:
        self._print(f"checking the input: {num_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")

    def show(self, progress: JobProgress) -> None:
        self._print(describe(progress))

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        if self._clock() - self._shown >= LINE_INTERVAL_S:
            self._shown = self._clock()
            print(text, file=self._stream, flush=True)


def describe(progress: JobProgress) -> str:
    parts = [f"{progress.num_done}/{progress.num_requests} lines"]
    if progress.num_errors:
        parts.append(f"{progress.num_errors} errors")
    parts.append(f"{progress.lines_per_s:.1f} lines/s")
    parts.append(f"{progress.output_tokens_per_s:.0f} tok/s")
    parts.append(f"prefix hits {progress.prefix_hit_rate:.0%}")
    eta = progress.eta_s
    parts.append("ETA --" if eta is None else f"ETA {timedelta(seconds=round(eta))}")
    return ", ".join(parts)
