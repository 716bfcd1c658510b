"""Signals to a server process: what runs may end, what comes is refused, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

import support.serve_scripted
from support.live_server import events, until

TIMEOUT = 20.0
LONG = 4000  # tokens; takes longer than any test
SHORT = 60


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    port: int

    def body(self, max_tokens: int, *, stream: bool = True) -> dict[str, object]:
        return {"prompt": "a", "max_tokens": max_tokens, "temperature": 0, "stream": stream}

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float) -> int:
        return self.process.wait(seconds)


@contextmanager
def server_process(drain_seconds: float) -> Iterator[ServerProcess]:
    script = Path(support.serve_scripted.__file__)
    command = [sys.executable, str(script), str(drain_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield ServerProcess(process, int(process.stdout.readline()))
        finally:
            process.kill()


class Stream:
    """A running stream of one client; `text` is all that it got."""

    def __init__(self, client: httpx.AsyncClient, body: dict[str, object]) -> None:
        self.text = ""
        self.has_begun = asyncio.Event()
        self._client = client
        self._body = body

    async def run(self) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._body) as response:
            async for part in response.aiter_text():
                self.text += part
                self.has_begun.set()


async def begun(streams: list[Stream]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    await asyncio.wait_for(asyncio.gather(*(stream.has_begun.wait() for stream in streams)), TIMEOUT)
    return tasks


async def statuses(client: httpx.AsyncClient, path: str) -> AsyncIterator[int]:
    while True:
        yield (await client.get(path)).status_code
        await asyncio.sleep(0.01)


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        return True


def test_sv_05_sigterm_drains() -> None:
    async def scenario(server: ServerProcess) -> list[Stream]:
        limits = httpx.Limits(max_connections=None)
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:
            streams = [Stream(client, server.body(count)) for count in (SHORT, SHORT, SHORT, LONG, LONG)]
            tasks = await begun(streams)
            server.send(signal.SIGTERM)
            async for status in statuses(client, "/health"):
                if status == 503:
                    break
            assert (await client.get("/health")).json() == {"status": "draining"}
            for stream in (True, False):
                refused = await client.post("/v1/completions", json=server.body(1, stream=stream))
                assert refused.status_code == 503
                assert "retry-after" in refused.headers
                assert "draining" in refused.json()["error"]["message"]
            await asyncio.gather(*tasks)
        return streams

    with server_process(drain_seconds=1.5) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        streams = asyncio.run(scenario(server))
        assert server.exit_code(TIMEOUT) == 0
        for stream in streams[:3]:
            chunks = events(stream.text)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert len(chunks) == SHORT
        for stream in streams[3:]:
            *chunks, last = events(stream.text)
            assert len(chunks) > SHORT
            assert "shutting down" in last["error"]["message"]
            assert last["error"]["type"] == "overloaded_error"
        assert not any(child.is_running() for child in children)
        assert is_free(server.port)


def test_sv_05_a_second_sigterm_quits() -> None:
    async def scenario(server: ServerProcess) -> str:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT) as client:
            stream = Stream(client, server.body(LONG))
            (task,) = await begun([stream])
            server.send(signal.SIGTERM)
            async for status in statuses(client, "/health"):
                if status == 503:
                    break
            server.send(signal.SIGTERM)
            await task
        return stream.text

    with server_process(drain_seconds=60) as server:
        start = time.monotonic()
        text = asyncio.run(scenario(server))
        assert server.exit_code(5) == 1
        assert time.monotonic() - start < 10
        assert "told to quit" in events(text)[-1]["error"]["message"]
        assert is_free(server.port)


def test_sv_05_a_second_sigterm_does_not_wait_for_a_client_that_does_not_read() -> None:
    """The first event is some 15 MB long, which no socket buffers."""
    body = {"prompt": "a" * 3000, "n": 5, "max_tokens": 4, "echo": True, "logprobs": 60, "stream": True}
    payload = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload)
    with (
        server_process(drain_seconds=60) as server,
        socket.create_connection(("127.0.0.1", server.port)) as deaf,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT) as client,
    ):
        deaf.sendall(head + payload)
        deaf.recv(1, socket.MSG_PEEK)
        server.send(signal.SIGTERM)
        assert until(lambda: client.get("/health").status_code == 503)
        server.send(signal.SIGTERM)
        assert server.exit_code(4) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sv_05_an_idle_server_stops_at_once(number: signal.Signals) -> None:
    with server_process(drain_seconds=60) as server:
        # A connection that is kept alive holds nothing up.
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
            assert client.get("/health").status_code == 200
            server.send(number)
            assert server.exit_code(5) == 0
        assert is_free(server.port)
