"""`pelton batch` around a scripted engine: exit status, what it prints, signals."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pelton.errors import BundleError, JobError, PeltonError
from pelton.runtime.batch.progress import JobProgress
from pelton.runtime.engine import Engine, EngineConfig
from pelton.scripts import batch as batch_script
from pelton.scripts.batch_progress import BarDisplay, LineDisplay, describe, make_display
from support.batch import completion, make_engine, read_records, write_lines


class Command:
    """Runs `pelton batch scripted in.jsonl out.jsonl` in this process, on the engine that `load` gives."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.bundle = folder / "scripted"
        self.load: Callable[[], Engine] = make_engine
        self.configs: list[EngineConfig] = []
        self.templates: list[str | None] = []
        monkeypatch.setattr(batch_script, "read_manifest", lambda path: SimpleNamespace(content_key="key"))
        monkeypatch.setitem(sys.modules, "pelton.runtime.load", SimpleNamespace(load_engine=self._load))

    def _load(self, path: Path, *, config: EngineConfig, chat_template: str | None) -> Engine:
        assert path == self.bundle
        self.configs.append(config)
        self.templates.append(chat_template)
        return self.load()

    def __call__(self, *options: str) -> Result:
        arguments = [str(self.bundle), str(self.source), str(self.output), *options]
        return CliRunner().invoke(batch_script.command, arguments)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, object]]:
    """Signal handlers as they were; a command that was stopped leaves SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield dict(before)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, monkeypatch)


def test_all_lines_answered_is_status_0(command: Command) -> None:
    write_lines(command.source, [completion(f"id {i}") for i in range(6)])
    result = command()
    assert result.exit_code == 0
    assert "6 answers, 0 errors\n24 output tokens in 0:00:0" in result.stdout
    assert len(read_records(command.output)) == 6


def test_bj_04_error_records_are_status_1_and_counted(command: Command) -> None:
    write_lines(command.source, [completion("a"), "not json", "", completion("b", n=0)])
    result = command()
    assert result.exit_code == 1
    assert "1 answers, 2 errors, 1 blank lines skipped" in result.stdout


def test_bj_02_a_complete_job_is_told_without_loading_an_engine(command: Command) -> None:
    write_lines(command.source, [completion("a"), "not json"])
    assert command().exit_code == 1
    before = command.output.read_bytes()
    result = command()
    assert (result.exit_code, len(command.configs)) == (1, 1)
    assert "1 answers, 1 errors" in result.stdout
    assert command.output.read_bytes() == before


def test_bj_01_refused_ids_load_no_engine(command: Command) -> None:
    write_lines(command.source, [completion("a"), completion("a")])
    result = command()
    assert isinstance(result.exception, JobError)
    assert "duplicate on line 2 (as on line 1)" in str(result.exception)
    assert not command.configs


def test_options_reach_the_job_and_the_engine(command: Command) -> None:
    write_lines(command.source, [completion(f"id {i}", model="mine", temperature=9.0) for i in range(9)])
    largest = 0

    def load() -> Engine:
        def before_step(step: int, inputs: object) -> None:
            nonlocal largest
            largest = max(largest, engine.num_requests)

        engine = make_engine(before_step=before_step)
        return engine

    command.load = load
    names = ("--served-model-name", "first", "--served-model-name", "mine")
    limits = ("--max-batch-size", "3", "--kv-cache-memory", "512MiB", "--no-prefix-caching", "--threads", "2")
    assert command(*names, *limits, "--max-in-flight", "2").exit_code == 0
    assert largest == 2
    assert command.configs == [
        EngineConfig(max_batch_size=3, kv_cache_bytes=2**29, num_threads=2, enable_prefix_caching=False)
    ]
    first = command.output.read_bytes()
    assert isinstance(command(*names, "--seed", "1").exception, JobError)
    assert command(*names, "--seed", "1", "--overwrite").exit_code == 0
    assert command.output.read_bytes() != first


def test_a_chat_template_reaches_the_engine_and_is_part_of_the_job(command: Command, tmp_path: Path) -> None:
    write_lines(command.source, [completion("a")])
    template, other = tmp_path / "template.jinja", tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    other.write_text("{{ messages[0] }}")
    assert command("--chat-template", str(template)).exit_code == 0
    assert command.templates == ["{{ messages }}"]
    for options in ((), ("--chat-template", str(other))):
        assert isinstance(command(*options).exception, JobError)
    assert command("--chat-template", str(template)).exit_code == 0
    other.write_text("no template")
    assert "does not read `messages`" in str(command("--chat-template", str(other)).exception)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_cleanly_and_the_same_command_goes_on(
    command: Command, number: signal.Signals, status: int, handlers: dict[int, object]
) -> None:
    def before_step(step: int, inputs: object) -> None:
        if step == 10:
            os.kill(os.getpid(), number)

    write_lines(command.source, [completion(f"id {i}") for i in range(40)])
    command.load = lambda: make_engine(before_step=before_step)
    result = command()
    num_done = len(read_records(command.output))
    assert result.exit_code == status
    assert f"stopped by {number.name}: {num_done} of 40 lines are done" in result.stderr
    assert 0 < num_done < 40
    assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
    assert (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    )  # what is left of the process is not for another Ctrl-C
    command.load = make_engine
    result = command()
    assert result.exit_code == 0
    assert f"{num_done} of 40 lines are done already" in result.stderr
    assert len({record["custom_id"] for record in read_records(command.output)}) == 40


def test_a_second_interrupt_ends_at_once_and_keeps_what_is_done(command: Command) -> None:
    def before_step(step: int, inputs: object) -> None:
        if step == 10:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    write_lines(command.source, [completion(f"id {i}") for i in range(40)])
    command.load = lambda: make_engine(before_step=before_step)
    result = command()
    assert result.exit_code == 130
    assert "run the same command again" in result.stderr
    assert "lines are done" not in result.stderr  # the clean stop's words
    assert len(read_records(command.output)) == 8
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_that_is_ignored_stays_ignored(command: Command) -> None:
    """As a shell lets its background jobs ignore it."""

    def before_step(step: int, inputs: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_lines(command.source, [completion("a")])
    command.load = lambda: make_engine(before_step=before_step)
    assert command().exit_code == 0


def test_an_empty_model_name_is_refused(command: Command) -> None:
    result = command("--served-model-name", "")
    assert result.exit_code == 2
    assert "--served-model-name" in result.stderr


def test_what_pelton_cannot_do_is_left_to_the_command_line_to_tell(command: Command) -> None:
    def load() -> Engine:
        raise BundleError("built for another machine")

    write_lines(command.source, [completion("a")])
    command.load = load
    assert isinstance(command().exception, PeltonError)


def test_a_bug_is_status_2_with_its_traceback(command: Command) -> None:
    """Python's own status for it, 1, would say that the job is finished."""

    def load() -> Engine:
        raise ZeroDivisionError("oops")

    write_lines(command.source, [completion("a")])
    command.load = load
    result = command()
    assert result.exit_code == 2
    assert "ZeroDivisionError: oops" in result.stderr
    assert "What is done is kept" in result.stderr


PROGRESS = JobProgress(
    num_requests=100,
    num_done=60,
    num_done_before=20,
    num_errors=2,
    num_prompt_tokens=200,
    num_cached_tokens=50,
    num_output_tokens=800,
    elapsed_s=80.0,
)
SHOWN = "60/100 lines, 2 errors, 0.5 lines/s, 10 tok/s, prefix hits 25%, ETA 0:01:20"


@pytest.mark.parametrize(
    "early",
    [
        {"elapsed_s": 0.1},  # a resumed job's first lines, refused at once
        {"num_in_flight": 41},  # most of the time so far went into lines that are not done
        {"num_done": 20},
    ],
)
def test_no_eta_before_there_is_a_rate(early: dict[str, Any]) -> None:
    assert replace(PROGRESS, num_in_flight=40).eta_s == 80
    assert replace(PROGRESS, **early).eta_s is None
    assert describe(replace(PROGRESS, **early)).endswith("ETA --")


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    now = 0.0
    stream = io.StringIO()
    assert isinstance(make_display(stream), LineDisplay)
    display = LineDisplay(stream, lambda: now)
    for now in (1.0, 11.0, 12.0, 20.0, 22.0):
        if now < 20.0:
            display.show_scan(3_000_000, 12_000_000)
        else:
            display.show(PROGRESS)
    assert stream.getvalue().splitlines() == ["checking the input: 3 of 12 MB", SHOWN]


def test_progress_is_a_bar_on_a_terminal() -> None:
    stream = io.StringIO()
    display = BarDisplay(Console(file=stream, force_terminal=True, width=140))
    display.show_scan(3_000_000, 12_000_000)
    display.show(PROGRESS)
    display.close()
    assert SHOWN in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
