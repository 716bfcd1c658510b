"""The pass over the input before any work: is each custom_id usable, how many lines, which content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from ...errors import JobError
from .digests import RepeatFinder
from .lines import RawLine, as_object, read_lines

_NUM_LISTED = 20
_REPORT_EVERY_LINES = 1000

OnScan = Callable[[int, int], None]
"""Bytes read and bytes of the whole input."""


@dataclass(frozen=True, slots=True)
class InputScan:
    """`num_lines` counts physical lines, `num_blank` those that hold nothing and get no record."""

    sha256: str
    num_lines: int
    num_blank: int
    stamp: tuple[int, int]

    @property
    def num_requests(self) -> int:
        return self.num_lines - self.num_blank


def file_stamp(file: BinaryIO) -> tuple[int, int]:
    """Size and modification time (ns): equal before and after means that nobody wrote to the file."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def scan_input(file: BinaryIO, name: str, on_scan: OnScan | None = None) -> InputScan:
    """Read `file` whole, in bounded memory.

    Raises `JobError` listing line numbers if an object's custom_id is missing, not a string, empty or used
    before. A line that is not a JSON object has no custom_id to find it by; it passes here and becomes an
    error record with its line number.
    """
    stamp = file_stamp(file)
    content = hashlib.sha256()
    finder = RepeatFinder()
    faults = _Faults()
    num_lines = num_blank = num_bytes = 0
    try:
        for line in read_lines(file, content.update):
            num_lines, num_bytes = line.number, num_bytes + len(line.data) + 1
            num_blank += line.is_blank
            _check_custom_id(line, finder, faults)
            if on_scan is not None and line.number % _REPORT_EVERY_LINES == 0:
                on_scan(min(num_bytes, stamp[0]), stamp[0])
        num_repeats, repeats = finder.repeats(_NUM_LISTED)
    finally:
        finder.close()
    faults.add_repeats(num_repeats, repeats)
    if faults.count:
        raise JobError(f"{name}: {faults.describe()}. Nothing was run; give each line an id of its own")
    if file_stamp(file) != stamp:
        raise JobError(f"{name} changed while it was read; run again when it is complete")
    return InputScan(content.hexdigest(), num_lines, num_blank, stamp)


def _check_custom_id(line: RawLine, finder: RepeatFinder, faults: _Faults) -> None:
    value = as_object(line)
    if value is None:
        return
    custom_id = value.get("custom_id")
    if custom_id is None:
        faults.add("missing", line.number)
    elif not isinstance(custom_id, str):
        faults.add("not a string", line.number)
    elif not custom_id:
        faults.add("empty", line.number)
    else:
        finder.add(line.number, custom_id)


@dataclass(slots=True)
class _Faults:
    """Counts every fault and lists the first ones of each kind."""

    count: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    listed: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, number: int) -> None:
        self.count += 1
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= _NUM_LISTED:
            self.listed.setdefault(kind, []).append(str(number))

    def add_repeats(self, count: int, pairs: list[tuple[int, int]]) -> None:
        if count:
            self.count += count
            self.counts["duplicate"] = count
            self.listed["duplicate"] = [f"{number} (as on line {first})" for number, first in pairs]

    def describe(self) -> str:
        parts = []
        for kind, numbers in self.listed.items():
            rest = self.counts[kind] - len(numbers)
            more = f" and {rest} more" if rest else ""
            parts.append(f"{kind} on line{'s' if self.counts[kind] > 1 else ''} {', '.join(numbers)}{more}")
        lines = "1 line" if self.count == 1 else f"{self.count} lines"
        return f"{lines} without a usable custom_id: {'; '.join(parts)}"
