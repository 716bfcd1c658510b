"""Progress of a build: plain lines in a file, a live line on a terminal, measured times and memory."""

from __future__ import annotations

import io
import mmap
import re

import pytest

from pelton.compile.progress import Progress, format_bytes, format_seconds, process_peak_bytes


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (59.94, "59.9 s"), (59.97, "1 min 00 s"), (185.2, "3 min 05 s")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 MiB"), (812 << 20, "812 MiB"), (3 << 29, "1.5 GiB")])
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
