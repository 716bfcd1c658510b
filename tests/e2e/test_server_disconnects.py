"""Clients that leave: whatever their request was doing, the engine lets go of it."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pelton.runtime.server.gateway import GatewayConfig
from support.live_server import LiveServer, StepGate, live_server, read_metric, until
from support.tiny_model import scripted_engine


@contextmanager
def sent(server: LiveServer, **body: Any) -> Iterator[socket.socket]:
    """A raw connection with a completion request on it; closed when the block ends."""
    payload = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(payload), payload)
        )
        yield connection


def receive_events(connection: socket.socket, count: int) -> None:
    seen = b""
    while seen.count(b"data: ") < count:
        part = connection.recv(65536)
        assert part, "the server closed the connection"
        seen += part


def is_released(server: LiveServer, num_aborted: int) -> bool:
    text = server.client.get("/metrics").text
    names = ("pelton_requests_running", "pelton_requests_waiting", "pelton_kv_cache_blocks_used")
    is_idle = all(read_metric(text, name) == 0 for name in names)
    return is_idle and read_metric(text, "pelton_requests_finished_total", reason="abort") >= num_aborted


def paced(step: int, inputs: object) -> None:
    """A step takes a millisecond, so that no answer is over before its client has left."""
    threading.Event().wait(0.001)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_st_12_client_leaves_during_decode(stream: bool, n: int) -> None:
    engine = scripted_engine(max_model_len=4096, num_blocks=1024, before_step=paced)
    with live_server(engine) as server:
        with sent(server, prompt="a", max_tokens=4000, n=n, stream=stream) as connection:
            if stream:
                receive_events(connection, 3)
            else:
                assert until(lambda: server.metric("pelton_generation_tokens_total") >= 3)
        assert until(lambda: is_released(server, n), seconds=1.0)
        assert server.metric("pelton_generation_tokens_total") < 4000


@pytest.mark.parametrize("stream", [True, False])
def test_st_12_client_leaves_during_prefill(stream: bool) -> None:
    engine = scripted_engine(max_model_len=4096, max_step_tokens=16, num_blocks=512, before_step=paced)
    with live_server(engine) as server:
        with sent(server, prompt="a" * 4000, max_tokens=90, stream=stream):
            assert until(lambda: server.metric("pelton_kv_cache_blocks_used") > 0)
        assert until(lambda: is_released(server, 1), seconds=1.0)
        assert server.metric("pelton_generation_tokens_total") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_st_12_client_leaves_while_queued(stream: bool) -> None:
    engine = scripted_engine(max_batch_size=1, max_model_len=4096, num_blocks=1024, before_step=paced)
    with live_server(engine) as server, sent(server, prompt="a", max_tokens=4000, stream=True) as runs:
        receive_events(runs, 1)
        with sent(server, prompt="b", max_tokens=4, stream=stream):
            assert until(lambda: server.metric("pelton_requests_waiting") == 1)
        assert until(
            lambda: server.metric("pelton_requests_finished_total", reason="abort") == 1, seconds=1.0
        )
        assert server.metric("pelton_requests_waiting") == 0
        assert server.metric("pelton_requests_running") == 1


def test_st_12_client_leaves_while_the_engine_is_in_a_step() -> None:
    """The abort waits in the loop's inbox; the step's own delta goes nowhere."""
    gate = StepGate(pace=0.005)
    with live_server(scripted_engine(before_step=gate)) as server:
        with sent(server, prompt="a", max_tokens=500, stream=True):
            assert gate.is_held.wait(10)
        gate.open()
        assert until(lambda: is_released(server, 1), seconds=1.0)
        assert server.complete(prompt="a", max_tokens=2).json()["choices"][0]["text"] == "bc"


def test_a_client_that_sends_half_a_body_and_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with live_server(scripted_engine()) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b'{"prompt"'
            )
        assert server.complete(prompt="a").status_code == 200
    assert "Traceback" not in caplog.text


def test_a_client_that_does_not_read_keeps_no_place_in_the_queue() -> None:
    """One call takes all places of the server, and its answer is larger than the buffers of its socket."""
    engine = scripted_engine(max_batch_size=8, max_model_len=512)
    gateway = GatewayConfig(max_waiting=0, drain_seconds=0.2)
    with (
        live_server(engine, gateway=gateway) as server,
        sent(server, prompt="a", n=8, max_tokens=500, logprobs=60, stream=True),
    ):
        assert until(lambda: server.metric("pelton_requests_finished_total", reason="length") == 8)
        assert server.metric("pelton_call_latency_seconds_count") == 0, "the answer fits in the buffers"
        assert server.complete(prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("seed", range(3))
def test_64_streams_of_which_a_third_leaves_hold_nothing(seed: int) -> None:
    """The client side runs in asyncio: 64 sockets, each third one closed at a random moment."""
    chance = random.Random(seed)
    engine = scripted_engine(max_batch_size=16, max_model_len=1024, num_blocks=96, before_step=paced)
    leaves_after = {i: chance.randint(0, 40) for i in range(0, 64, 3)}

    async def one(port: int, number: int) -> int:
        body = {
            "prompt": "abc" * chance.randint(1, 30),
            "max_tokens": 900 if number in leaves_after else 60,  # who leaves is never done before
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "n": 1 + (number % 5 == 0),
        }
        payload = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(payload), payload)
        )
        num_events = 0
        try:
            while number not in leaves_after or num_events < leaves_after[number]:
                line = await reader.readline()
                if not line:
                    break
                num_events += line.startswith(b"data: {")
                if line.startswith(b"data: [DONE]"):
                    return num_events
            return -1
        finally:
            writer.close()

    async def all_of_them(port: int) -> list[int]:
        return await asyncio.gather(*(one(port, number) for number in range(64)))

    with live_server(engine) as server:
        results = asyncio.run(asyncio.wait_for(all_of_them(server.port), 60))
        stayed = [count for number, count in enumerate(results) if number not in leaves_after]
        assert set(stayed) <= {60, 120}
        assert len(stayed) == 42
        # Who leaves at once may be gone before there is a request to abort.
        num_left = sum(1 + (number % 5 == 0) for number, count in leaves_after.items() if count)
        assert until(lambda: is_released(server, num_left), seconds=1.0)
        assert server.engine.stats().num_used_blocks == 0
        assert server.complete(prompt="a", max_tokens=1).status_code == 200
