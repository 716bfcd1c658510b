"""Health of a server whose engine hangs or dies, and the metrics."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from pelton.runtime.server.gateway import GatewayConfig
from support.live_server import StepGate, events, live_server, read_metric, until
from support.tiny_model import scripted_engine

HANG_SECONDS = 1.5


def test_sv_04_a_hung_step_loop_is_unhealthy_and_clients_are_told() -> None:
    gate = StepGate(num_steps=3)
    gateway = GatewayConfig(hang_seconds=HANG_SECONDS, drain_seconds=0.2)
    engine = scripted_engine(max_batch_size=2, before_step=gate)
    with live_server(engine, gateway=gateway) as server, ThreadPoolExecutor(3) as pool:
        assert server.client.get("/health").json() == {"status": "ok"}
        streaming = pool.submit(server.complete, prompt="a", max_tokens=100, stream=True)
        assert gate.is_held.wait(10)
        whole = pool.submit(server.complete, prompt="b", max_tokens=100)
        queued = pool.submit(server.chat, messages=[{"role": "user", "content": "c"}], stream=True)
        assert until(lambda: server.client.get("/health").status_code == 503, seconds=HANG_SECONDS + 3)
        assert server.client.get("/health").json() == {"status": "hung"}
        *chunks, last = events(streaming.result(10).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "bcd"
        assert "no step" in last["error"]["message"]
        assert whole.result(10).status_code == 500
        assert queued.result(10).status_code == 500
        refused = server.complete(prompt="a")
        assert refused.status_code == 503
        assert "hung" in refused.json()["error"]["message"]

        gate.open()
        assert until(lambda: server.client.get("/health").status_code == 200)
        assert server.complete(prompt="a", max_tokens=2).json()["choices"][0]["text"] == "bc"
        assert server.metric("pelton_requests_running") == 0
        assert server.metric("pelton_kv_cache_blocks_used") == 0


def test_sv_04_a_failed_call_keeps_no_place_though_its_client_does_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes every place of the server, and its first event is larger than what sockets buffer."""
    gate = StepGate(num_steps=50)
    engine = scripted_engine(max_model_len=4096, num_blocks=1024, max_batch_size=5, before_step=gate)
    gateway = GatewayConfig(max_waiting=0, hang_seconds=HANG_SECONDS, drain_seconds=0.2)
    body = {"prompt": "a" * 3000, "n": 5, "max_tokens": 500, "echo": True, "logprobs": 60, "stream": True}
    payload = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload)
    with (
        live_server(engine, gateway=gateway) as server,
        socket.create_connection(("127.0.0.1", server.port)) as deaf,
    ):
        deaf.sendall(head + payload)
        deaf.recv(1, socket.MSG_PEEK)
        assert until(lambda: "failing 1 calls" in caplog.text)
        gate.open()
        assert until(lambda: server.client.get("/health").status_code == 200)
        assert server.complete(prompt="a", max_tokens=1).status_code == 200


def test_sv_04_an_idle_server_stays_healthy() -> None:
    gateway = GatewayConfig(hang_seconds=HANG_SECONDS, drain_seconds=0.2)
    with live_server(scripted_engine(), gateway=gateway) as server:
        turned = until(lambda: server.client.get("/health").status_code != 200, seconds=1.5 * HANG_SECONDS)
        assert not turned


def test_sv_04_a_dead_step_loop_is_unhealthy() -> None:
    engine = scripted_engine()
    with live_server(engine) as server:
        engine.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        assert server.complete(prompt="a").status_code == 500
        assert until(lambda: server.client.get("/health").status_code == 503)
        assert server.client.get("/health").json() == {"status": "stopped"}
        assert server.complete(prompt="a").status_code == 503


def test_metrics() -> None:
    with live_server(scripted_engine()) as server:
        for _ in range(2):
            server.complete(prompt="a" * 40, max_tokens=3)
        server.complete(prompt="!", n=2)
        response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    expected = {
        "pelton_requests_running": 0,
        "pelton_requests_waiting": 0,
        "pelton_kv_cache_usage_ratio": 0,
        "pelton_kv_cache_blocks": 256,
        "pelton_prompt_tokens_total": 81,
        "pelton_generation_tokens_total": 8,
        "pelton_prefix_cache_queries_total": 81,
        "pelton_prefix_cache_hits_total": 32,
        "pelton_preemptions_total": 0,
        "pelton_time_to_first_token_seconds_count": 3,
        "pelton_time_per_output_token_seconds_count": 2,
        "pelton_call_latency_seconds_count": 3,
    }
    assert {name: read_metric(response.text, name) for name in expected} == expected
    finished = {
        name.removeprefix("pelton_requests_finished_total"): float(value)
        for name, value in (line.rsplit(" ", 1) for line in response.text.splitlines())
        if name.startswith("pelton_requests_finished_total{")
    }
    counts = {"stop": 2, "length": 2, "abort": 0, "deadline": 0, "error": 0}
    assert finished == {f'{{reason="{reason}"}}': count for reason, count in counts.items()}


def test_two_servers_in_a_process_count_apart() -> None:
    with live_server(scripted_engine()) as one, live_server(scripted_engine()) as other:
        one.complete(prompt="abc")
        assert until(lambda: one.metric("pelton_prompt_tokens_total") == 3)
        assert other.metric("pelton_prompt_tokens_total") == 0
