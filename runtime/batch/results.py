"""The output file of a batch job: appended to, made durable in groups, and read back by the next run.

The output is its own journal. A record names its job and line, so the records found in the file are exactly
the lines that are done; a record cut short by a crash is dropped and its line runs again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ...errors import JobError
from .records import read_record


class DoneLines:
    """Which lines of a job have their record, one bit each."""

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self._bits = bytearray(num_lines // 8 + 1)
        self.count = 0

    def __contains__(self, line: int) -> bool:
        return bool(self._bits[line >> 3] >> (line & 7) & 1)

    def add(self, line: int) -> bool:
        """False when there is no such line, or it was done already."""
        if not 1 <= line <= self.num_lines or line in self:
            return False
        self._bits[line >> 3] |= 1 << (line & 7)
        self.count += 1
        return True


class ResultReader:
    """What an earlier run of the job `job_id` left in `path`: `done` lines, errors among them."""

    def __init__(self, path: Path, job_id: str, num_lines: int) -> None:
        self._path = path
        self._job_id = job_id
        self.done = DoneLines(num_lines)
        self.num_errors = 0

    def recover(self) -> int:
        """Read the file, remove what is no whole record of a line not seen before, return the bytes removed.

        Raises `JobError` for a record of another job, and changes nothing then.
        """
        if not self._path.exists():
            return 0
        kept_bytes = num_bytes = 0
        is_tail = True  # whether all that is dropped stands at the end
        with self._path.open("rb", buffering=1 << 20) as file:
            for data, is_kept in self._classify(file):
                num_bytes += len(data)
                if is_kept:
                    is_tail = is_tail and kept_bytes + len(data) == num_bytes
                    kept_bytes += len(data)
        if kept_bytes == num_bytes:
            return 0
        if is_tail:
            with self._path.open("r+b") as file:
                file.truncate(kept_bytes)
                os.fsync(file.fileno())
        else:
            self._rewrite()
        return num_bytes - kept_bytes

    def _classify(self, file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
        self.done, self.num_errors = DoneLines(self.done.num_lines), 0
        for number, data in enumerate(file, 1):
            head = read_record(data)
            if head is not None and head.key.job_id != self._job_id:
                raise JobError(
                    f"{self._path}, line {number}: a result of another job ({head.key.job_id}, this one is "
                    f"{self._job_id}); take it out, or name another output"
                )
            is_kept = head is not None and self.done.add(head.key.line)
            self.num_errors += is_kept and head is not None and head.is_error
            yield data, is_kept

    def _rewrite(self) -> None:
        """Good records follow the damage (a power cut may persist blocks out of order): copy those kept."""
        copy = self._path.with_name(self._path.name + ".recovered")
        with self._path.open("rb") as source, copy.open("wb") as target:
            target.writelines(data for data, is_kept in self._classify(source) if is_kept)
            target.flush()
            os.fsync(target.fileno())
        copy.replace(self._path)
        sync_directory(self._path)


class ResultWriter:
    """Appends records to `path`.

    Every `append` reaches the operating system at once, so a killed process loses no record that it appended.
    Against a power cut, records are flushed to the disk at most `sync_interval_s` after the first that is not
    yet, as long as `sync_if_due` is called.
    """

    def __init__(self, path: Path, sync_interval_s: float, clock: Callable[[], float]) -> None:
        self._path = path
        self._interval_s = sync_interval_s
        self._clock = clock
        self._unsynced_since: float | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = os.fstat(self._fd).st_size
        sync_directory(path)

    def append(self, records: Sequence[bytes]) -> None:
        """Raises `JobError` when the disk is full or broken; the file then ends with a whole record."""
        if not records:
            return
        data = b"".join(records)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise self._failure(error) from error
        self._size += len(data)
        if self._unsynced_since is None:
            self._unsynced_since = self._clock()

    def sync_if_due(self) -> None:
        if self._unsynced_since is not None and self._clock() - self._unsynced_since >= self._interval_s:
            self.sync()

    def sync(self) -> None:
        if self._unsynced_since is None:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error
        self._unsynced_since = None

    def close(self) -> None:
        """Flush and close; the file is closed even where flushing fails."""
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def _failure(self, error: OSError) -> JobError:
        return JobError(
            f"cannot write {self._path}: {error.strerror}. What is done is kept; mend that and run the same "
            "command again to go on"
        )


def sync_directory(path: Path) -> None:
    """Make the name of a new or renamed file durable."""
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
