"""Between HTTP and the engine: which calls are taken, and how their deltas reach the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ...errors import ConfigError, EngineError, OverloadedError, PeltonError, RequestError
from ..engine_loop import EngineLoop
from ..outputs import Delta
from ..protocol import ApiContext, Call, compile_call, parse_json, read_call
from .metrics import CallTimer, ServerMetrics

Result = TypeVar("Result")

_MAX_THREADS = 4
MAX_NUM_COMPILING = 32
"""Calls whose forms may be under compilation at once. Each has a thread that waits for the compiler."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`max_waiting` choices may wait beyond those that the engine runs at once; more are refused with 503.

    `hang_seconds` without a step (while there is work) and the engine counts as hung. `drain_seconds` is what
    running calls get to end after the server was told to stop. Raises `ConfigError`, naming the field.
    """

    max_waiting: int = 1024
    drain_seconds: float = 30.0
    hang_seconds: float = 60.0
    max_body_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        # Negated, so that NaN, which no comparison holds for, is refused too.
        for name in ("max_waiting", "drain_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be a number of at least 0, got {getattr(self, name)!r}")
        for name in ("hang_seconds", "max_body_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)!r}")


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


class CallStream:
    """The deltas of one call, on the event loop. `close` ends it, whatever became of it."""

    def __init__(self, call: Call, gateway: Gateway, timer: CallTimer) -> None:
        self.call = call
        self.num_open_choices = call.num_choices  # those that the engine works on, or will
        self._gateway = gateway
        self._timer = timer
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    async def take(self) -> list[Delta]:
        """The deltas since the last call, at least one. Raises what ended the call early."""
        await self._ready.wait()
        if not self._deltas and self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        if self._error is None:
            self._ready.clear()
        return deltas

    def push(self, delta: Delta) -> None:
        if self._error is not None:
            return  # of the step that was under way
        self._timer.observe(delta)
        self.num_open_choices -= delta.finish_reason is not None
        self._deltas.append(delta)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the call from outside: what it holds in the engine is released now, not at the next `take`."""
        if self._error is None:
            self._error = error
            self.num_open_choices = 0
            self._ready.set()
            self._gateway.abort(self.call)

    def close(self, *, is_done: bool) -> None:
        """The answer is sent, or never will be: without `is_done` the engine stops working on it."""
        if is_done:
            self._timer.finish()
        elif self._error is None:
            self._gateway.abort(self.call)
        self._gateway.forget(self)


class Gateway:
    """Takes calls up to a bound, runs them in `engine_loop`, and knows whether the server can take more.

    Everything but the engine's callbacks happens on one event loop, which waits neither for the engine nor for what
    takes long. That is done in threads, with pools of their own for what is read (tokenised), for forms that are
    compiled and for answers that are built: no call waits for another one's form, and no stream for a new call.
    """

    def __init__(
        self, engine_loop: EngineLoop, context: ApiContext, config: GatewayConfig, metrics: ServerMetrics
    ) -> None:
        self.context = context
        self.config = config
        self._engine_loop = engine_loop
        self._metrics = metrics
        self._capacity = context.limits.max_batch_size + config.max_waiting
        self._streams: set[CallStream] = set()
        self._num_parsing = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._arrivals: deque[tuple[CallStream, Delta | PeltonError]] = deque()
        self._is_flush_due = False
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._readers = ThreadPoolExecutor(num_threads, "pelton-protocol")
        self._builders = ThreadPoolExecutor(num_threads, "pelton-answers")
        self._compilers = ThreadPoolExecutor(MAX_NUM_COMPILING, "pelton-forms")
        self._num_compiling = 0
        self._watchdog = asyncio.create_task(self._watch_engine())

    @property
    def status(self) -> str:
        """`ok` while calls are taken, else `stopped`, `hung` or `draining`."""
        if not self._engine_loop.is_alive:
            return "stopped"
        if self._engine_loop.seconds_since_heartbeat() > self.config.hang_seconds:
            return "hung"
        return "draining" if self._is_draining else "ok"

    async def parse(self, endpoint: str, data: bytes, call_id: str) -> Call:
        """Raises `RequestError`; `OverloadedError` before any work is done on a call that is not taken, or when too
        many forms are being compiled.
        """
        self._check_open(num_choices=1)
        self._num_parsing += 1
        try:
            call = await self._loop.run_in_executor(
                self._readers, _read, endpoint, data, self.context, call_id
            )
            return call if call.form is None else await self._compile(call)
        finally:
            self._num_parsing -= 1

    async def _compile(self, call: Call) -> Call:
        if call.form is not None and self.context.is_compiled(call.form):
            return compile_call(call, self.context)
        if self._num_compiling >= MAX_NUM_COMPILING:
            raise OverloadedError("too many forms of output are being compiled; try again later")
        self._num_compiling += 1
        try:
            return await self._loop.run_in_executor(self._compilers, compile_call, call, self.context)
        finally:
            self._num_compiling -= 1

    async def build(self, work: Callable[[], Result]) -> Result:
        """Write a long part of an answer beside the event loop."""
        return await self._loop.run_in_executor(self._builders, work)

    def open(self, call: Call, arrival_time: float) -> CallStream:
        """Hand `call` to the engine. `arrival_time` is the `time.monotonic()` of its HTTP request."""
        if call.num_choices > self._capacity:
            raise RequestError(
                f"a call may ask for at most {self._capacity} choices (n, or best_of, times the prompts) here, "
                f"got {call.num_choices}; send several calls",
                field=_field_of_choices(call),
            )
        self._check_open(call.num_choices)
        stream = CallStream(call, self, CallTimer(self._metrics, arrival_time))
        self._streams.add(stream)
        self._idle.clear()
        admitted = self._engine_loop.submit(call.requests, lambda delta: self._arrive(stream, delta))
        admitted.add_done_callback(lambda future: self._report_refusal(stream, future))
        return stream

    def abort(self, call: Call) -> None:
        self._engine_loop.abort([request.request_id for request in call.requests])

    def forget(self, stream: CallStream) -> None:
        self._streams.remove(stream)
        if not self._streams:
            self._idle.set()

    def fail_all(self, error: PeltonError) -> None:
        for stream in list(self._streams):
            stream.fail(error)

    async def drain(self) -> None:
        """Take no more calls; return when the running ones have ended or, when time is up, been failed."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_seconds)
        except TimeoutError:
            _log.warning("%d calls did not end in the time to drain", len(self._streams))
            self.fail_all(OverloadedError("the server is shutting down"))

    def close(self) -> None:
        self._watchdog.cancel()
        for pool in (self._readers, self._builders, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_open(self, num_choices: int) -> None:
        status = self.status
        if status != "ok":
            raise OverloadedError(f"the server takes no requests: it is {status}")
        num_taken = self._num_parsing + sum(stream.num_open_choices for stream in self._streams)
        if num_taken + num_choices > self._capacity:
            raise OverloadedError("the queue is full; try again later")

    def _report_refusal(self, stream: CallStream, admitted: Future[None]) -> None:
        error = admitted.exception()
        if isinstance(error, PeltonError):
            self._arrive(stream, error)

    def _arrive(self, stream: CallStream, item: Delta | PeltonError) -> None:
        """On the engine's thread. Wakes the event loop once for all that a step made."""
        self._arrivals.append((stream, item))
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon_threadsafe(self._flush_arrivals)

    def _flush_arrivals(self) -> None:
        # Cleared first: what arrives from now on either is seen below or schedules a flush of its own.
        self._is_flush_due = False
        while self._arrivals:
            stream, item = self._arrivals.popleft()
            if isinstance(item, Delta):
                stream.push(item)
            else:
                stream.fail(item)

    async def _watch_engine(self) -> None:
        """Clients of an engine that hangs get an error instead of waiting for ever."""
        while True:
            await asyncio.sleep(min(1.0, self.config.hang_seconds / 4))
            if self._streams and self.status == "hung":
                seconds = self._engine_loop.seconds_since_heartbeat()
                _log.error(
                    "the engine has made no step for %.1f s; failing %d calls", seconds, len(self._streams)
                )
                self.fail_all(EngineError(f"the engine has made no step for {seconds:.1f} s"))


def _read(endpoint: str, data: bytes, context: ApiContext, call_id: str) -> Call:
    body = parse_json(data)
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return read_call(endpoint, body, context, call_id)


def _field_of_choices(call: Call) -> str:
    """What makes the choices of `call` many."""
    if call.num_choices_per_prompt < len(call.requests):
        return "prompt"
    return "n" if call.num_best is None else "best_of"
