"""The forms that lines ask for, compiled beside the engine's loop."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from ...errors import RequestError
from ..protocol import ApiContext, Call, compile_call
from .records import RecordKey

_NUM_THREADS = 2  # no more than the compiler has: what waits for it would use up its time limit
_MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line whose requests are read. `num_tries` of its form ended at the time limit."""

    key: RecordKey
    custom_id: str
    call: Call
    num_tries: int = 0


class FormCompiler:
    """Compiles the forms of lines in threads. `close` it.

    The compiler's time limit protects a server. How long a form takes also depends on what else the machine does, so
    here it is tried again, behind the others, before its line is refused.
    """

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "pelton-forms")
        self._pending: dict[Future[Call], PendingLine] = {}

    @property
    def is_busy(self) -> bool:
        """Whether there are lines that `take` has not given back."""
        return bool(self._pending)

    def submit(self, line: PendingLine) -> None:
        self._pending[self._threads.submit(compile_call, line.call, self._context)] = line

    def take(self) -> list[tuple[PendingLine, Call | Exception]]:
        """The lines that have come to an end: each with its call, whose form is compiled, or with what went wrong."""
        taken: list[tuple[PendingLine, Call | Exception]] = []
        for future in [future for future in self._pending if future.done()]:
            line = self._pending.pop(future)
            error = future.exception()
            if error is None:
                taken.append((line, future.result()))
            elif _is_late(error) and line.num_tries + 1 < _MAX_TRIES:
                self.submit(replace(line, num_tries=line.num_tries + 1))
            elif isinstance(error, Exception):
                taken.append((line, error))
            else:
                raise error
        return taken

    def wait(self, seconds: float) -> None:
        """Until a form is compiled, `seconds` at most."""
        wait(self._pending, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Forget all lines."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pending.clear()


def _is_late(error: BaseException) -> bool:
    return isinstance(error, RequestError) and error.code == "grammar_too_complex"
