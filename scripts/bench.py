"""`pelton bench`: latency, throughput, start and memory of a bundle, with the bound that memory bandwidth sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..interrupts import held_interrupts
from .engine_options import engine_config, engine_options


@click.command(name="bench")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each part; medians are given.",
)
@click.option(
    "--num-requests",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="Requests of the throughput part.",
)
@click.option(
    "--num-running", default=32, show_default=True, type=click.IntRange(1), help="Of them at a time."
)
@click.option(
    "--num-new-tokens", default=128, show_default=True, type=click.IntRange(2), help="Output of each."
)
@click.option("--skip-start", is_flag=True, help="Do not start a server to time its first token.")
@click.option(
    "--baseline",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A Hugging Face directory: transformers does the same work in turn with the bundle.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the JSON to a file.")
@engine_options
def command(
    engine: Path,
    repeats: int,
    num_requests: int,
    num_running: int,
    num_new_tokens: int,
    skip_start: bool,
    baseline: Path | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Measure the bundle ENGINE and print JSON.

    Work: one sequence of 256 tokens decoding (TPOT), one prompt of 512 tokens (TTFT), requests of 32 to 512 prompt
    tokens, 32 requests that share 400 prompt tokens, and the time from starting `pelton serve` to its first token.
    Times are wall-clock; run it on a quiet machine.
    """
    with held_interrupts():
        from .bench_work import BenchConfig, measure

    config = BenchConfig(
        repeats=repeats,
        num_requests=num_requests,
        num_running=num_running,
        num_new_tokens=num_new_tokens,
        measure_start=not skip_start,
        baseline=baseline,
    )
    report = json.dumps(measure(engine, engine_config(**options), config), indent=2)
    click.echo(report)
    if output is not None:
        output.write_text(report + "\n")
