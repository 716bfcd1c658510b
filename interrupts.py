"""Ctrl-C where it must not arrive in the middle of something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], bool]]:
    """Hold SIGINT back until the block ends, however it ends; then it acts as it does outside. Gives a function that
    says whether one is held.

    For imports: transformers and others take a KeyboardInterrupt in the middle of one for a module that is missing,
    and go on or fail with another error; and for C++ code whose frames an exception must not cross. Outside the main
    thread, and where SIGINT is ignored, nothing is held.
    """
    previous = _handler()
    if previous is None:
        yield lambda: False
        return
    num_held = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal num_held
        num_held += 1

    signal.signal(signal.SIGINT, hold)
    try:
        yield lambda: num_held > 0
    finally:
        signal.signal(signal.SIGINT, previous)
        if num_held:
            signal.raise_signal(signal.SIGINT)


def ignore_interrupts() -> None:
    """Ignore SIGINT from here to the end of the process, which would otherwise die of it with a traceback.

    The interpreter's own end is included: it gives signals back to the system, but for ignored ones.
    """
    if _handler() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _handler() -> signal._HANDLER:
    """What handles SIGINT; None where that is not ours to change."""
    handler = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and handler is not signal.SIG_IGN
    return handler if is_ours else None
