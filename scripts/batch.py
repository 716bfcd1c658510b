"""`pelton batch`: a file of requests through an engine, resumable."""

from __future__ import annotations

import hashlib
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ..compile.bundle import read_manifest
from ..errors import PeltonError
from ..interrupts import held_interrupts, ignore_interrupts
from ..runtime.batch.job import BatchJob, JobOptions
from ..runtime.batch.progress import JobSummary
from ..runtime.engine import Engine
from .batch_progress import Display, make_display
from .engine_options import chat_template_option, engine_config, engine_options
from .option_types import NonEmptyText

EXIT_HAS_ERRORS = 1
EXIT_FAILED = 2
_GO_ON = "What is done is kept; run the same command again to go on."


_HELP = """
Answer every line of IN.jsonl with the bundle ENGINE and write one record per line to OUT.jsonl.

Both files have the OpenAI Batch format. A line of IN is {"custom_id", "method": "POST", "url":
"/v1/chat/completions" or "/v1/completions", "body"}; a record of OUT is {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}. Records stand in the order in which lines were done.

\b
Before any work   a missing, empty or repeated custom_id refuses the job and names the lines.
A bad line        becomes a record whose "error" is not null and says which line; the job goes on.
                  Lines that are not JSON objects have custom_id null there. Blank lines are skipped.
Killed at any     the same command does exactly the missing lines: records are written as their lines are
moment            done, and flushed to the disk every second. OUT.jsonl.journal says which job OUT belongs
                  to: another input, engine, chat template, model name or seed is refused. Ctrl-C stops
                  cleanly.
Equal runs give   equal records: requests without a seed get one from the job and the line, and
                  "created" is the time at which IN was last written.
To repeat lines   take their records out of OUT and run the same command.

\b
Exit status  0    all lines answered
             1    finished, some records are errors
             2    could not start, or had to stop
             130  stopped by SIGINT (143: SIGTERM)
"""


@click.command("batch", help=_HELP, short_help="Answer a file of requests; resumable.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("input_path", metavar="IN.jsonl", type=click.Path(path_type=Path))
@click.argument("output_path", metavar="OUT.jsonl", type=click.Path(path_type=Path))
@click.option(
    "--served-model-name",
    "model_names",
    multiple=True,
    type=NonEmptyText(),
    help="Name that lines give as `model`; repeat for several.  [default: the bundle's name]",
)
@click.option("--seed", default=0, show_default=True, help="Base of the seeds of requests that set none.")
@click.option(
    "--max-in-flight",
    type=click.IntRange(1),
    help="Choices admitted at a time.  [default: twice the batch size]",
)
@click.option(
    "--max-failures",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Stop when this many lines in a row fail inside the engine.",
)
@click.option(
    "--overwrite", is_flag=True, help="Discard what OUT holds if it is not of this job (this job's is kept)."
)
@chat_template_option
@engine_options
def command(
    engine: Path,
    input_path: Path,
    output_path: Path,
    model_names: tuple[str, ...],
    seed: int,
    max_in_flight: int | None,
    max_failures: int,
    overwrite: bool,
    chat_template: str | None,
    **engine_settings: Any,
) -> None:
    options = JobOptions(
        engine_key=_engine_key(read_manifest(engine).content_key, chat_template),
        model_names=model_names or (engine.resolve().name,),
        seed=seed,
        max_in_flight=max_in_flight,
        max_failures=max_failures,
        overwrite=overwrite,
    )

    def load() -> Engine:
        with held_interrupts():
            from ..runtime.load import load_engine  # only once the job is known to have work

        return load_engine(engine, config=engine_config(**engine_settings), chat_template=chat_template)

    try:
        with closing(make_display(sys.stderr)) as display:
            status = _answer(input_path, output_path, options, load, display)
    except KeyboardInterrupt:
        ignore_interrupts()
        click.echo(f"stopped. {_GO_ON}", err=True)
        status = 128 + signal.SIGINT
    except (PeltonError, BrokenPipeError):
        raise
    except Exception:
        traceback.print_exc()
        click.echo(f"this is a bug in Pelton. {_GO_ON}", err=True)
        status = EXIT_FAILED
    sys.exit(status)


def _engine_key(content_key: str, chat_template: str | None) -> str:
    """What identifies the engine to a job: the bundle, and the template that is given in place of its own."""
    if chat_template is None:
        return content_key
    return hashlib.sha256(f"{content_key} {chat_template}".encode()).hexdigest()


def _answer(
    input_path: Path, output_path: Path, options: JobOptions, load: Callable[[], Engine], display: Display
) -> int:
    """Run the job and return the exit status."""
    with BatchJob(input_path, output_path, options, display.show_scan) as job:
        found = job.found
        if found.num_dropped_bytes:
            click.echo(f"{output_path}: dropped {found.num_dropped_bytes} bytes of torn records", err=True)
        if found.is_complete:
            return _report(found, output_path)
        if found.progress.num_done:
            click.echo(
                f"{found.progress.num_done} of {found.progress.num_requests} lines are done already", err=True
            )
        with closing(load()) as engine, _StopSignals() as stop:
            summary = job.run(engine, display.show, should_stop=lambda: stop.number is not None)
    display.close()
    if summary.is_complete or stop.number is None:
        return _report(summary, output_path)
    ignore_interrupts()
    click.echo(
        f"stopped by {signal.Signals(stop.number).name}: {summary.progress.num_done} of "
        f"{summary.progress.num_requests} lines are done. {_GO_ON}",
        err=True,
    )
    return 128 + stop.number


def _report(summary: JobSummary, output_path: Path) -> int:
    progress = summary.progress
    num_answers = progress.num_done - progress.num_errors
    skipped = f", {summary.num_blank_lines} blank lines skipped" if summary.num_blank_lines else ""
    click.echo(f"{output_path}: {num_answers} answers, {progress.num_errors} errors{skipped}")
    if progress.num_done > progress.num_done_before:
        click.echo(
            f"{progress.num_output_tokens} output tokens in {timedelta(seconds=round(progress.elapsed_s))}: "
            f"{progress.output_tokens_per_s:.0f} tok/s, {progress.lines_per_s:.1f} lines/s, "
            f"prefix hits {progress.prefix_hit_rate:.0%}"
        )
    return EXIT_HAS_ERRORS if progress.num_errors else 0


class _StopSignals:
    """Within the block the first SIGINT or SIGTERM is only noted; a second one acts as it does outside.

    One that is ignored, as a shell lets its background jobs ignore SIGINT, stays ignored.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> _StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
