"""Progress of a build: plain lines in a file, a live line on a terminal, measured times and memory."""

from __future__ import annotations

import io
import mmap
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pelton.compile.progress import Progress, format_bytes, format_seconds, process_peak_bytes
from pelton.compile.targets.tensorrt_progress import make_monitor


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_when_not_on_a_terminal() -> None:
    stream, clock = io.StringIO(), FakeClock()
    progress = Progress(stream, clock=clock)
    with progress.stage("export [llama]"):
        clock.now += 12.34
        progress.note("30 layers [bf16]")
    progress.warning("model.safetensors is ignored")
    clock.now += 60
    progress.summary()
    start, note, done, warning, total = stream.getvalue().splitlines()
    assert (start, note) == ("export [llama] ...", "  30 layers [bf16]")
    assert done.startswith("export [llama]: done in 12.3 s, peak memory ")
    assert warning == "warning: model.safetensors is ignored"
    assert total.startswith("total: 1 min 12 s, peak memory ")
    assert "\x1b" not in stream.getvalue()


def test_a_stage_that_fails_says_so_and_the_error_goes_on() -> None:
    stream, clock = io.StringIO(), FakeClock()
    progress = Progress(stream, clock=clock)

    def fail() -> None:
        with progress.stage("lower"):
            clock.now += 1
            raise ValueError("out of registers")

    with pytest.raises(ValueError, match="out of registers"):
        fail()
    assert "lower: failed after 1.0 s" in stream.getvalue()
    with progress.stage("lower again"):
        pass
    assert [record.name for record in progress.records] == ["lower", "lower again"]
    assert [record.seconds for record in progress.records] == [1.0, 0.0]


def test_stages_do_not_nest() -> None:
    progress = Progress(io.StringIO())
    with progress.stage("outer"), pytest.raises(RuntimeError, match="outer"), progress.stage("inner"):
        pytest.fail("the body must not run")
    assert [record.name for record in progress.records] == ["outer"]


def test_the_peak_of_a_stage_holds_what_was_allocated_in_it() -> None:
    progress = Progress(io.StringIO())
    size = 64 << 20
    with progress.stage("before"):
        pass
    with progress.stage("allocate"):
        memory = mmap.mmap(-1, size)  # new pages, whatever the allocator holds back
        memory.write(b"\1" * size)
    held = len(memory)
    before, during = progress.records
    assert during.peak_bytes - before.peak_bytes > 0.9 * held
    assert process_peak_bytes() >= during.peak_bytes * 0.95


def test_a_terminal_shows_the_running_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream, clock = Terminal(), FakeClock()
    progress = Progress(stream, clock=clock)
    with progress.stage("compile"):
        clock.now += 5
    text = stream.getvalue()
    assert re.search(r"compile  \d\.0 s  memory [\d.]+ [MG]iB \(peak [\d.]+ [MG]iB\)", text)
    assert "compile: done in 5.0 s" in text
    assert "compile ..." not in text


def test_steps_join_the_live_line_and_do_not_flood_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, file, clock = Terminal(), io.StringIO(), FakeClock()
    on_terminal, in_file = Progress(terminal, clock=clock), Progress(file, clock=clock)
    with on_terminal.stage("build"), in_file.stage("build"):
        for number in range(600):  # a minute in steps of 0.1 s
            clock.now += 0.1
            on_terminal.step(f"Timing [{number} of 600]")
            in_file.step(f"Timing [{number} of 600]")
    assert re.search(r"build  [\d.]+ (s|min \d\d s)  Timing \[599 of 600\]  memory ", terminal.getvalue())
    lines = [line for line in file.getvalue().splitlines() if line.startswith("  Timing [")]
    assert len(lines) in (1, 2)
    assert lines[0] in ("  Timing [299 of 600]", "  Timing [300 of 600]")


def test_the_next_stage_does_not_show_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    progress = Progress(stream, clock=FakeClock())
    with progress.stage("build"):
        progress.step("Timing (1 of 2)")
    before = len(stream.getvalue())
    with progress.stage("write"):
        pass
    assert "Timing" not in stream.getvalue()[before:]


class Monitor:
    """In the place of TensorRT's base class."""


def monitor(
    on_progress: Callable[[str], None],
    is_interrupted: Callable[[], bool] = lambda: False,
    *,
    can_cancel: bool = True,
) -> Any:
    trt = SimpleNamespace(IProgressMonitor=Monitor)
    return make_monitor(trt, on_progress, is_interrupted, can_cancel=can_cancel)


def test_phases_become_one_line() -> None:
    """The events of a real build, shortened."""
    lines: list[str] = []
    phases = monitor(lines.append)
    phases.phase_start("Building engine", None, 6)
    phases.phase_start("Building engine from subgraph", "Building engine", 1)
    assert phases.step_complete("Building engine", 0)
    phases.phase_start("Timing graph nodes", "Building engine from subgraph", 50)
    assert phases.step_complete("Timing graph nodes", 0)
    phases.phase_start("Computing reformatting costs", "Timing graph nodes", 1)
    phases.step_complete("Computing reformatting costs", 0)
    phases.phase_finish("Computing reformatting costs")
    phases.step_complete("Timing graph nodes", 49)
    phases.phase_finish("Timing graph nodes")
    phases.phase_finish("Building engine from subgraph")
    phases.phase_finish("Building engine")
    assert lines == [
        "Building engine (1 of 6)",
        "Building engine (2 of 6)",
        "Building engine (2 of 6): Timing graph nodes (1 of 50)",
        "Building engine (2 of 6): Timing graph nodes (2 of 50)",
        "Building engine (2 of 6): Timing graph nodes (50 of 50)",
        "Building engine (2 of 6)",
    ]


@pytest.mark.parametrize("event", ["phase_start", "step_complete", "phase_finish"])
def test_what_is_raised_is_kept_and_stops_the_builder(event: str) -> None:
    def fail(line: str) -> None:
        if armed:
            raise KeyboardInterrupt

    armed = False
    phases = monitor(fail)
    phases.phase_start("Building engine", None, 6)
    phases.phase_start("Timing", "Building engine", 50)
    armed = True
    arguments: tuple[Any, ...] = {
        "phase_start": ("Inner", "Timing", 9), "step_complete": ("Timing", 3), "phase_finish": ("Timing",)
    }[event]  # fmt: skip
    getattr(phases, event)(*arguments)
    assert isinstance(phases.interrupt, KeyboardInterrupt)
    assert not phases.step_complete("Building engine", 1)


@pytest.mark.parametrize("can_cancel", [True, False])
def test_an_interrupt_is_said_and_stops_a_builder_that_can_be_cancelled(can_cancel: bool) -> None:
    lines: list[str] = []
    pressed: list[bool] = []
    phases = monitor(lines.append, lambda: bool(pressed), can_cancel=can_cancel)
    phases.phase_start("Building engine", None, 6)
    assert phases.step_complete("Building engine", 0)
    pressed.append(True)
    assert phases.step_complete("Building engine", 1) is not can_cancel
    assert lines[-1] == "interrupted: stopping" + ("" if can_cancel else " when the builder is done")
    assert lines.count(lines[-1]) == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (59.94, "59.9 s"), (59.97, "1 min 00 s"), (185.2, "3 min 05 s")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 MiB"), (812 << 20, "812 MiB"), (3 << 29, "1.5 GiB")])
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
