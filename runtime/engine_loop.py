"""The one thread that owns a running engine; every other thread talks to it through its inbox."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ..errors import EngineError, OverloadedError, PeltonError
from .outputs import Delta
from .request import Request

if TYPE_CHECKING:
    from .engine import Engine, EngineStats

OnDelta = Callable[[Delta], None]

IDLE_BEAT_S = 0.25
"""How often an idle loop shows that it is alive."""

MAX_FAILED_STEPS = 3
"""Steps in a row that raise, each with all requests released after it, before the engine counts as broken."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Listener:
    on_delta: OnDelta
    num_open_choices: int


class EngineLoop:
    """Runs `engine.step()` while there is work; admits and aborts between two steps.

    All methods may be called from any thread. `on_delta` is called on the engine's thread and must return at
    once. A step that raises fails every request, each with an error delta, and the loop goes on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # of _is_closed: nothing enters the inbox of a loop that has ended
        self._is_closed = False
        self._is_stopping = False
        self._listeners: dict[str, _Listener] = {}
        self._num_failed_steps = 0
        self._heartbeat = time.monotonic()
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="pelton-engine", daemon=True)

    def start(self) -> None:
        self._heartbeat = time.monotonic()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closed

    def seconds_since_heartbeat(self) -> float:
        """How long the step in progress has taken. An idle loop beats every `IDLE_BEAT_S`."""
        return time.monotonic() - self._heartbeat

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def submit(self, requests: Sequence[Request], on_delta: OnDelta) -> Future[None]:
        """Admit all of `requests` or none. The future ends when they are admitted, before their first delta.

        It fails with the `RequestError` of the first one that cannot be served, or with `OverloadedError` if
        the loop has ended. Cancelling it before they are admitted withdraws them; later it takes `abort`.
        """
        admitted: Future[None] = Future()

        def admit() -> None:
            if not admitted.set_running_or_notify_cancel():
                return
            if self._is_closed:
                admitted.set_exception(OverloadedError("the engine has stopped"))
                return
            try:
                self._admit(requests, on_delta)
            except PeltonError as error:
                admitted.set_exception(error)
            else:
                admitted.set_result(None)

        if not self._post(admit):
            admit()
        return admitted

    def abort(self, request_ids: Sequence[str]) -> None:
        """Release what these requests hold; no delta of theirs arrives after the step in progress.

        Aborting a request that is finished, or unknown, does nothing.
        """
        self._post(lambda: self._abort(request_ids))

    def stop(self, timeout: float) -> bool:
        """End the loop after the step in progress and close the engine; requests left get an error delta.

        False if the step did not end within `timeout` seconds: the engine is then left as it is.
        """
        self._is_stopping = True
        self._post(lambda: None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._engine.close()
        return True

    def _post(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if not self._is_closed:
                self._inbox.put(command)
            return not self._is_closed

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._heartbeat = time.monotonic()
                self._run_commands(wait=not self._engine.has_work)
                if self._engine.has_work:
                    self._step()
        except Exception:
            _log.critical("the engine loop has ended", exc_info=True)
        finally:
            self._close()

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            try:
                command = self._inbox.get(timeout=IDLE_BEAT_S)
            except Empty:
                return
            command()
        self._drain_inbox()

    def _drain_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            command()

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:
            self._fail_step(error)
            return
        self._num_failed_steps = 0
        self._stats = self._engine.stats()  # before anyone learns from a delta that something has ended
        for delta in deltas:
            self._deliver(delta)

    def _fail_step(self, cause: Exception) -> None:
        """A step that raised names no culprit: every request fails and the engine goes on from empty. Only the log
        says what failed: the cause may hold what is no client's business.
        """
        self._num_failed_steps += 1
        request_ids = list(self._listeners)
        _log.error("a step failed; its requests: %s", ", ".join(request_ids), exc_info=cause)
        self._fail_all(EngineError("the engine failed; the log has the cause"))
        for request_id in request_ids:
            self._engine.abort(request_id)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed") from cause

    def _admit(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        for number, request in enumerate(requests):
            try:
                self._engine.admit(request)
            except Exception as error:
                self._abort([earlier.request_id for earlier in requests[:number]])
                if isinstance(error, PeltonError):
                    raise
                _log.error("cannot admit %s", request.request_id, exc_info=True)
                raise EngineError("the engine could not admit the request; the log has the cause") from error
            self._listeners[request.request_id] = _Listener(on_delta, request.params.n)

    def _abort(self, request_ids: Sequence[str]) -> None:
        if self._is_closed:
            return
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
            self._engine.abort(request_id)

    def _deliver(self, delta: Delta) -> None:
        listener = self._listeners.get(delta.request_id)
        if listener is None:
            return  # aborted
        if delta.finish_reason is not None:
            listener.num_open_choices -= 1
            if listener.num_open_choices == 0:
                del self._listeners[delta.request_id]
        try:
            listener.on_delta(delta)
        except Exception:
            _log.error("nobody takes the deltas of %s", delta.request_id, exc_info=True)
            self._abort([delta.request_id])

    def _fail_all(self, error: PeltonError) -> None:
        listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            try:
                listener.on_delta(Delta(request_id, 0, finish_reason="error", error=error))
            except Exception:
                _log.error("nobody takes the error of %s", request_id, exc_info=True)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._fail_all(EngineError("the engine has stopped"))
        self._drain_inbox()  # refuses what waits there
