"""The parts of a section, run one after the other in a process of their own, and the journal of what they find.

The journal is a file of JSON lines that is written as things happen, so that a process which a fault of the device ends
leaves behind what it had found, and which unit it died in. Started again on the same journal, it goes on behind that
unit.

    {"unit": NAME, "event": "begin"}   {"unit": NAME, "record": {...}}   {"unit": NAME, "event": "end"}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import PeltonError
from .records import Failure, Record, Skip, as_json, from_json

MAX_ERROR_CHARS = 2000


class Unavailable(Exception):
    """A unit cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One check. `run` returns what it finds; errors that it raises are recorded.

    Names are unique within a section. `is_ours` False: a yardstick, whose own errors are no failure of Pelton.
    """

    name: str
    run: Callable[[], Iterable[Record]]
    is_ours: bool = True


class DeviceBroken(Exception):
    """The device reports faults for everything from now on: only another process can use it."""


class Journal:
    """Writes, and reads, the file at `path`; each line is on its way to the disk when a call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, unit: str) -> None:
        self._write({"unit": unit, "event": "begin"})

    def add(self, unit: str, record: Record) -> None:
        self._write({"unit": unit, "record": as_json(record)})

    def end(self, unit: str) -> None:
        self._write({"unit": unit, "event": "end"})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """Whole lines; one that its writer was killed in the middle of is left out."""
        if not self._path.exists():
            return []
        *whole, _ = self._path.read_text().split("\n")
        return [json.loads(line) for line in whole]

    def records(self) -> list[Record]:
        return [from_json(line["record"]) for line in self.lines() if "record" in line]

    def begun(self) -> list[str]:
        return [line["unit"] for line in self.lines() if line.get("event") == "begin"]

    def unfinished(self) -> str | None:
        """The unit that began last, if it did not end."""
        lines = self.lines()
        ended = {line["unit"] for line in lines if line.get("event") == "end"}
        return next((unit for unit in reversed(self.begun()) if unit not in ended), None)


def run_units(
    units: Iterable[Unit],
    journal: Journal,
    *,
    seconds: float,
    check_device: Callable[[], None] = lambda: None,
) -> None:
    """Run all `units` that the journal does not know yet while `seconds` last, and journal the others as skipped.

    `check_device` raises if the device can no longer be used: `DeviceBroken` then follows the failed unit.
    """
    end = time.monotonic() + seconds
    known = set(journal.begun())
    for unit in units:
        if unit.name in known:
            continue
        journal.begin(unit.name)
        if time.monotonic() >= end:
            journal.add(unit.name, Skip(unit.name, "the time of its section was used up"))
            journal.end(unit.name)
            continue
        failure = _run(unit, journal)
        journal.end(unit.name)
        if failure:
            try:
                check_device()
            except Exception as error:  # torch raises its own types
                raise DeviceBroken(describe(error)) from error


def _run(unit: Unit, journal: Journal) -> bool:
    """Whether the unit raised something unexpected."""
    try:
        for record in unit.run():
            journal.add(unit.name, record)
    except Unavailable as error:
        journal.add(unit.name, Skip(unit.name, str(error)))
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        journal.add(unit.name, Skip(unit.name, f"does not fit into the GPU's memory: {describe(error)}"))
    except Exception as error:  # compilers and drivers raise anything
        is_fault = unit.is_ours
        text = describe(error)
        journal.add(
            unit.name, Failure(unit.name, text) if is_fault else Skip(unit.name, f"cannot run here: {text}")
        )
        return True
    return False


def describe(error: BaseException) -> str:
    """The error in at most `MAX_ERROR_CHARS` characters: its beginning and its end."""
    text = str(error) if isinstance(error, PeltonError) else f"{type(error).__name__}: {error}"
    if len(text) <= MAX_ERROR_CHARS:
        return text
    half = MAX_ERROR_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"


def leave_broken_device(status: int) -> None:
    """End this process at once: a broken context can hang what Python does at its end."""
    os._exit(status)
