"""Compiling on trial, in a process of its own.

llguidance recurses on what it compiles and cannot be stopped: a chain of a thousand definitions overflows the stack,
some products of patterns take minutes and gigabytes. There they bring down a process that holds nothing.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from ...errors import EngineError, OverloadedError
from . import trial_process


class TrialError(Exception):
    """Says why a grammar must not be compiled. `is_late`: for the time it takes."""

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late


class Trial:
    """One process, started when it is needed and again when a grammar has brought it down. Safe for use from many
    threads, one grammar at a time. Close it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # what the process writes to stderr
        self._is_ready = False
        self._lock = threading.Lock()
        self._is_closed = False

    def check(self, grammar: str, deadline: float) -> None:
        """Compile `grammar` before `deadline` (`time.monotonic()`), waiting for others included.

        Raises `TrialError` if the grammar is at fault, `OverloadedError` if its turn did not come in time, and
        `EngineError` if the process cannot work.
        """
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise OverloadedError("too many forms of output are waiting to be compiled; try again later")
        try:
            answer = self._ask(grammar, deadline)
        except BaseException:
            if self._is_ready:
                self._stop()  # an answer that nobody reads would be the next grammar's
            raise
        finally:
            self._lock.release()
        reason = json.loads(answer)
        if reason:
            raise TrialError(" ".join(reason.split())[:300])

    def start(self) -> None:
        """Start the process, so that the first grammar does not wait for it."""
        with self._lock:
            self._get_process()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._stop()

    def _ask(self, grammar: str, deadline: float) -> bytes:
        process = self._get_process()
        if not self._is_ready:
            # What ends a process that has read nothing is no fault of a grammar.
            line = _read_line(process, deadline)
            if line is None:
                raise OverloadedError(
                    "the process that compiles forms of output is not ready; try again later"
                )
            if not line:
                raise self._breakdown("cannot start")
            self._is_ready = True
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._breakdown("has ended") from None
        answer = _read_line(process, deadline)
        if answer is None:
            raise TrialError("it takes too long; make it simpler", is_late=True)
        if not answer:
            if process.wait() == -signal.SIGKILL:  # the kernel's, for want of memory, or somebody's
                raise self._breakdown("was killed")
            raise TrialError("nested too deeply, or too large for the compiler")
        return answer

    def _get_process(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise TrialError("the engine is closed")
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_stop` closes it
            self._process = subprocess.Popen(
                [sys.executable, "-P", trial_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        return self._process

    def _breakdown(self, what: str) -> EngineError:
        assert self._process is not None
        assert self._errors is not None
        status = self._process.wait()
        size = self._errors.seek(0, 2)
        self._errors.seek(max(0, size - 300))
        tail = " ".join(self._errors.read().decode("utf-8", "replace").split())
        return EngineError(
            f"the process that compiles forms of output {what} (exit status {status}): {tail or 'no message'}"
        )

    def _stop(self) -> None:
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        self._is_ready = False
        if process is not None:
            process.kill()
            process.communicate()
        if errors is not None:
            errors.close()


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """The next line; empty if the process has ended, None if there is none in time."""
    assert process.stdout is not None
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(process.stdout, select.POLLIN)
    ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
    return process.stdout.readline() if ready else None
