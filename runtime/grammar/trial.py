"""Compiling on trial, in a process of its own.

llguidance recurses on what it compiles and cannot be stopped: a chain of a thousand definitions overflows the stack,
some products of patterns take minutes and gigabytes. There they bring down a process that holds nothing.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time

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
        self._lock = threading.Lock()
        self._is_closed = False

    def check(self, grammar: str, seconds: float) -> None:
        """Compile `grammar` within `seconds`, waiting for others included. Raises `TrialError`."""
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise _late(seconds)
        try:
            answer = self._ask(grammar, deadline)
        finally:
            self._lock.release()
        if answer is None:
            raise _late(seconds)
        if not answer:
            raise TrialError("nested too deeply, or too large for the compiler")
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

    def _ask(self, grammar: str, deadline: float) -> bytes | None:
        """The answer; empty if the process broke down, None if there is none in time."""
        process = self._get_process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._stop()
            return b""
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        answer = process.stdout.readline() if ready else None
        if not answer:
            self._stop()
        return answer

    def _get_process(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise TrialError("the engine is closed")
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                [sys.executable, "-P", trial_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _late(seconds: float) -> TrialError:
    return TrialError(f"it takes longer than {seconds:g} s; make it simpler", is_late=True)
