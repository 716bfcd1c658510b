"""The small file beside the output that says which job the output belongs to, and locks it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from ...errors import JobError
from .records import read_record
from .results import sync_directory

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class JobHeader:
    """Everything that the answers of a job depend on, and `created`: the Unix time that they carry."""

    input_sha256: str
    engine_key: str
    model_names: tuple[str, ...]
    seed: int
    created: int
    format: int = _FORMAT

    @property
    def job_id(self) -> str:
        """16 hex digits, equal for equal input, engine and options."""
        facts = {name: value for name, value in asdict(self).items() if name != "created"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> bytes:
        return json.dumps({"pelton_batch_job": self.job_id, **asdict(self)}, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> JobHeader | None:
        """None when `data` is torn or is no header of this format."""
        try:
            facts = json.loads(data)
            job_id = facts.pop("pelton_batch_job")
            header = cls(**{**facts, "model_names": tuple(facts["model_names"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return header if header.job_id == job_id else None


class JobJournal:
    """`OUTPUT.journal`, held locked (`flock`) from opening to closing, so that two processes cannot share an
    output. A process that is killed lets go of the lock. A refused job leaves no file behind.
    """

    def __init__(self, output: Path) -> None:
        """Raises `JobError` when another process holds it."""
        self.path = journal_path(output)
        self._output = output
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if not self._lock():
            os.close(self._fd)
            raise JobError(
                f"{output} is being written by another process ({self.path} is locked); wait for it to end, "
                "or name another output"
            )

    def claim(self, header: JobHeader, overwrite: bool) -> JobHeader:
        """Take the output for this job; return the header to work with: an earlier run's, if there was one.

        Raises `JobError` when the output belongs to something else, unless `overwrite`, which empties it. On
        return the header is on disk, and the output holds nothing but this job's records (if any).
        """
        found = JobHeader.from_json(self._read())
        if found is not None and found.job_id == header.job_id:
            return found
        if self._output.exists() and self._output.stat().st_size:
            # It may have been moved here without its journal.
            is_ours = found is None and self._first_job_id() == header.job_id
            if not overwrite and not is_ours:
                raise JobError(self._refusal(found, header))
            if not is_ours:
                os.truncate(self._output, 0)
        self._write(header.to_json())
        return header

    def close(self) -> None:
        if os.fstat(self._fd).st_size == 0:
            self.path.unlink()
        os.close(self._fd)

    def __enter__(self) -> JobJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # The holder before us may have removed the file between our opening and locking it.
        return self.path.exists() and os.path.samestat(os.fstat(self._fd), self.path.stat())

    def _read(self) -> bytes:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)

    def _write(self, data: bytes) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        os.fsync(self._fd)
        sync_directory(self.path)

    def _first_job_id(self) -> str | None:
        with self._output.open("rb") as file:
            head = read_record(file.readline())
        return None if head is None else head.key.job_id

    def _refusal(self, found: JobHeader | None, wanted: JobHeader) -> str:
        if found is None:
            reason = f"{self._output} exists and {self.path} does not say that a batch job made it"
        else:
            names = {
                "input_sha256": "input",
                "engine_key": "engine or chat template",
                "model_names": "model names",
            }
            changed = [
                names.get(name, name)
                for name, value in asdict(found).items()
                if name != "created" and value != asdict(wanted)[name]
            ]
            reason = f"{self._output} holds results of another job (not the same: {', '.join(changed)})"
        return f"{reason}; name another output, or discard what it holds with --overwrite"


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")
