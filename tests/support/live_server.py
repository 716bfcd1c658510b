"""A real HTTP server on a loopback port, in a thread of the test process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from pelton.runtime.engine import Engine
from pelton.runtime.server.gateway import GatewayConfig
from pelton.runtime.server.serving import ServerConfig, StopRequest, bind, serve

TIMEOUT = 20.0
_POLL = 0.005


@dataclass
class LiveServer:
    engine: Engine
    client: httpx.Client
    port: int
    stop: Callable[[], None]
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"temperature": 0, **body})

    def chat(self, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"temperature": 0, **body})

    def metric(self, name: str, **labels: str) -> float:
        """The value of a sample of /metrics, 0 while it has none."""
        return read_metric(self.client.get("/metrics").text, name, **labels)


@contextmanager
def live_server(
    engine: Engine, *, gateway: GatewayConfig | None = None, api_keys: tuple[str, ...] = ()
) -> Iterator[LiveServer]:
    """Serves `engine` until the block ends."""
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    config = ServerConfig(("tiny",), api_keys, gateway or GatewayConfig(drain_seconds=0.2))
    is_ready = threading.Event()
    controls: list[tuple[asyncio.AbstractEventLoop, StopRequest]] = []

    async def main() -> bool:
        stop = StopRequest()
        controls.append((asyncio.get_running_loop(), stop))
        return await serve(engine, sock, config, stop, is_ready.set)

    def stop() -> None:
        loop, request = controls[0]
        loop.call_soon_threadsafe(request)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server", daemon=True)
    thread.start()
    assert is_ready.wait(TIMEOUT), "the server did not start"
    headers = {"content-type": "application/json"}
    if api_keys:
        headers["authorization"] = f"Bearer {api_keys[0]}"
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=TIMEOUT) as client:
        try:
            yield LiveServer(engine, client, port, stop, thread)
        finally:
            if thread.is_alive():
                stop()
                thread.join(TIMEOUT)
    assert not thread.is_alive(), "the server did not stop"


class StepGate:
    """A `before_step` hook: lets as many steps through as it is told to, then holds the engine's thread.

    Once open, each step takes `pace` seconds.
    """

    def __init__(self, num_steps: int = 0, *, pace: float = 0.0) -> None:
        self._pace = pace
        self._allowed = threading.Semaphore(num_steps)
        self._is_open = threading.Event()
        self.is_held = threading.Event()

    def __call__(self, step: int, inputs: object) -> None:
        if self._is_open.is_set():
            threading.Event().wait(self._pace)
            return
        if self._allowed.acquire(blocking=False):
            return
        self.is_held.set()
        assert self._allowed.acquire(timeout=TIMEOUT), "nobody opened the gate"
        self.is_held.clear()

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)

    def open(self) -> None:
        self._is_open.set()
        self._allowed.release(1)


def until(condition: Callable[[], bool], seconds: float = TIMEOUT) -> bool:
    """Whether `condition` came true in time; asks again and again."""
    pause = threading.Event()
    for _ in range(int(seconds / _POLL)):
        if condition():
            return True
        pause.wait(_POLL)
    return condition()


def read_metric(text: str, name: str, **labels: str) -> float:
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    sample = f"{name}{{{shown}}} " if labels else f"{name} "
    values = [line.removeprefix(sample) for line in text.splitlines() if line.startswith(sample)]
    return float(values[0]) if values else 0.0


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's `data:` frames; asserts the framing and the end marker."""
    frames = text.split("\n\n")
    assert frames.pop() == "", "the last frame is not closed"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    payloads = [frame.removeprefix("data: ") for frame in frames]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]
