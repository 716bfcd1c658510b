"""Runs the HTTP server on a bound socket until it is told to stop, then drains it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp

from ...errors import OverloadedError, PeltonError
from ..engine import Engine
from ..engine_loop import EngineLoop
from ..protocol import ApiContext
from .app import create_app, guard
from .gateway import Gateway, GatewayConfig
from .metrics import ServerMetrics

# Above the idle time after which common clients drop a connection, so that it is not cut under a request.
_KEEP_ALIVE_SECONDS = 75
# What the last frames get to reach their clients.
_FLUSH_SECONDS = 5
_ENGINE_STOP_SECONDS = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Without `api_keys` the server is open to all who can reach it. `model_names` are what it answers to. The
    parsers are as in `ApiContext`.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


class StopRequest:
    """Called once it drains the server, called again it ends it at once. Lives on the server's event loop."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.quit = asyncio.Event()

    def __call__(self) -> None:
        (self.quit if self.drain.is_set() else self.drain).set()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the caller's: uvicorn would cut running streams


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host`:`port` (0: any free port), not listening yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is given; with it each answer waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PeltonError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return sock


def run_server(
    engine: Engine, sock: socket.socket, config: ServerConfig, on_ready: Callable[[], None]
) -> bool:
    """`serve` on the main thread until SIGTERM or SIGINT."""

    async def main() -> bool:
        stop = StopRequest()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        return await serve(engine, sock, config, stop, on_ready)

    return asyncio.run(main())


async def serve(
    engine: Engine,
    sock: socket.socket,
    config: ServerConfig,
    stop: StopRequest,
    on_ready: Callable[[], None],
) -> bool:
    """Serve until `stop`; take over `engine` and `sock`, and close both.

    The first stop refuses new calls and lets the running ones end; those that do not within `drain_seconds`
    get an error, as do all at the second stop. False after a second stop, or if the engine does not stop.
    """
    engine_loop = EngineLoop(engine)
    metrics = ServerMetrics(engine_loop.stats)
    context = ApiContext(
        engine.tokenizer,
        engine.limits,
        config.model_names,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        grammars=engine.grammars,
    )
    # Read here, so that the first request does not wait for them.
    _ = context.max_prompt_chars
    engine.grammars.warm_up()
    gateway = Gateway(engine_loop, context, config.gateway, metrics)
    server = _Server(_uvicorn_config(guard(create_app(gateway, metrics), config.api_keys)), on_ready)
    engine_loop.start()
    is_engine_closed = False
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve([sock]))
            drain_asked = tasks.create_task(stop.drain.wait())
            quit_asked = tasks.create_task(stop.quit.wait())
            await asyncio.wait({serving, drain_asked}, return_when=asyncio.FIRST_COMPLETED)
            _log.info("stopping: running calls have %.0f s to end", config.gateway.drain_seconds)
            drained = tasks.create_task(gateway.drain())
            await asyncio.wait({serving, drained, quit_asked}, return_when=asyncio.FIRST_COMPLETED)
            is_quit = quit_asked.done()
            if is_quit:
                gateway.fail_all(OverloadedError("the server was told to quit"))
                server.force_exit = True
            server.should_exit = True
            await serving
            for task in (drain_asked, quit_asked, drained):
                task.cancel()
    finally:
        gateway.close()
        is_engine_closed = await asyncio.to_thread(engine_loop.stop, _ENGINE_STOP_SECONDS)
        if not is_engine_closed:
            _log.error("the engine did not stop within %.0f s", _ENGINE_STOP_SECONDS)
    return is_engine_closed and not is_quit


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # the default takes another parser where one happens to be installed
        lifespan="off",
        ws="none",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
