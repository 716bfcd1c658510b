"""Requests that ask for too much, or for what is not there: refused by name, and the server goes on."""

from __future__ import annotations

import gc
import http.client
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from pelton.runtime.server.gateway import GatewayConfig
from support.live_server import TIMEOUT, LiveServer, StepGate, live_server
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer, scripted_engine

VOCAB = byte_tokenizer().vocab_size
MILLION = 10**6


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(scripted_engine(max_model_len=128)) as running:
        yield running


def assert_refused(
    server: LiveServer, response: httpx.Response, field: str | None, status: int = 400
) -> None:
    """An error in OpenAI's shape that names the field, after which a normal request is served."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    assert "Traceback" not in response.text
    good = server.complete(prompt="a", max_tokens=2)
    assert good.status_code == 200
    assert good.json()["choices"][0]["text"] == "bc"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {str(NUM_PADDED_LOGITS): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [NUM_PADDED_LOGITS], "min_tokens": 1}, "stop_token_ids"),
        ({"logprobs": VOCAB + 1}, "logprobs"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [NUM_PADDED_LOGITS]}, "prompt"),
    ],
)
def test_sa_02_ids_outside_the_vocabulary(server: LiveServer, body: dict[str, Any], field: str) -> None:
    assert_refused(server, server.complete(**{"prompt": "a", **body}), field)


def test_sa_02_top_logprobs_of_a_chat(server: LiveServer) -> None:
    user = [{"role": "user", "content": "a"}]
    response = server.chat(messages=user, logprobs=True, top_logprobs=VOCAB + 1)
    assert_refused(server, response, "top_logprobs")


def test_sa_02_a_payload_repeated_beside_others_harms_none(server: LiveServer) -> None:
    for _ in range(20):
        assert server.complete(prompt="a", logit_bias={str(VOCAB): 1}).status_code == 400
    assert_refused(server, server.complete(prompt=[VOCAB]), "prompt")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "", "b"]}, "prompt[1]"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {}, "messages"),
    ],
)
def test_sc_02_empty_prompts(server: LiveServer, path: str, body: dict[str, Any], field: str) -> None:
    assert_refused(server, server.post(path, body), field)


def test_sc_02_empty_prompts_of_a_tokenizer_with_bos() -> None:
    with live_server(scripted_engine(byte_tokenizer(has_bos=True))) as server:
        choices = server.complete(prompt=["a", ""], max_tokens=2).json()["choices"]
        assert [choice["text"] for choice in choices] == ["bc", "ab"]
        for prompt in ([], [[]], ["a", []]):
            assert server.complete(prompt=prompt).status_code == 400
        empty = server.chat(messages=[{"role": "user", "content": ""}], max_tokens=2).json()
        assert empty["choices"][0]["message"]["content"] == "ab"
        assert server.complete(prompt="a", max_tokens=1).json()["choices"][0]["text"] == "b"


@pytest.mark.parametrize("prompt", ["a" * 256, list(range(250)) + list(range(6)), "a" * 128])
def test_sa_10_longer_than_the_window(server: LiveServer, prompt: object) -> None:
    response = server.complete(prompt=prompt)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert_refused(server, response, "prompt")


def test_sa_10_truncation_is_explicit_and_reported(server: LiveServer) -> None:
    body = server.complete(prompt="z" * 250 + "abc", truncate_prompt_tokens=100, max_tokens=2).json()
    assert body["choices"][0]["text"] == "de"
    assert body["choices"][0]["truncated_prompt_tokens"] == 153
    assert body["usage"]["prompt_tokens"] == 100


@pytest.mark.parametrize("stream", [True, False])
def test_sc_01_larger_than_the_kv_cache(stream: bool) -> None:
    """The window has room for it, the cache never will: refused at once, and it blocks nobody."""
    with live_server(scripted_engine(max_model_len=512, num_blocks=4)) as server:
        refused = server.complete(prompt="a" * 100, stream=stream)
        assert refused.json()["error"]["code"] == "kv_cache_exceeded"
        assert_refused(server, refused, "prompt")
        both = server.complete(prompt=["a" * 10, "a" * 100], stream=stream)
        assert_refused(server, both, "prompt")
        assert server.metric("pelton_requests_running") == 0


@pytest.mark.parametrize("logprobs", [0, 1])
def test_sa_12_scoring_without_output(server: LiveServer, logprobs: int) -> None:
    response = server.complete(prompt="abc", max_tokens=0, echo=True, logprobs=logprobs)
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert_refused(server, server.complete(prompt="abc", max_tokens=0, logprobs=logprobs), "max_tokens")
    assert_refused(server, server.complete(prompt="abc", max_tokens=0), "max_tokens")
    echo = server.complete(prompt="abc", max_tokens=0, echo=True, n=2).json()
    assert [choice["text"] for choice in echo["choices"]] == ["abc", "abc"]


@pytest.mark.parametrize("value", [-1, 1.5, "5", [1]])
def test_sa_12_max_tokens_of_a_wrong_kind(server: LiveServer, value: object) -> None:
    assert_refused(server, server.complete(prompt="a", max_tokens=value), "max_tokens")


def test_sa_12_null_max_tokens_is_the_default(server: LiveServer) -> None:
    body = server.complete(prompt="a", max_tokens=None).json()
    assert body["usage"]["completion_tokens"] == 16


HOSTILE = {
    "n": '{"prompt": "a", "n": 1000000}',
    "best_of": '{"prompt": "a", "n": 2, "best_of": 1}',
    "logprobs": '{"prompt": "a", "logprobs": 1000000}',
    "prompt_logprobs": '{"prompt": "a", "prompt_logprobs": -1}',
    "max_tokens": '{"prompt": "a", "max_tokens": 1000000000000}',
    "ids": '{"prompt": [' + "1," * MILLION + "1]}",
    "strings": '{"prompt": [' + '"a",' * MILLION + '"a"]}',
    "lists": '{"prompt": [' + "[1]," * MILLION + "[1]]}",
    "stops": '{"prompt": "a", "stop": [' + '"a",' * 10**5 + '"a"]}',
    "stop ids": '{"prompt": "a", "stop_token_ids": [' + "1," * 10**5 + "1]}",
    "nested lists": '{"prompt": ' + "[" * 10**5 + "]" * 10**5 + "}",
    "nested objects": '{"a":' * 10**5 + "1" + "}" * 10**5,
    "1e400": '{"prompt": "a", "temperature": 1e400}',
    "long integer": '{"prompt": "a", "logit_bias": {"1": 1' + "0" * 4000 + "}}",
    "duplicate keys": '{"prompt": "a", "prompt": "b"}',
    "NaN": '{"prompt": "a", "temperature": NaN}',
    "-Infinity": '{"prompt": "a", "temperature": -Infinity}',
    "long text": '{"prompt": "' + "a" * MILLION + '"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_sv_11_hostile_bodies_are_refused_fast(server: LiveServer, name: str) -> None:
    payload = HOSTILE[name].encode()
    times: list[float] = []
    while len(times) < 10 and min(times, default=1) >= 0.05:
        start = time.process_time()
        response = server.client.post("/v1/completions", content=payload)
        times.append(time.process_time() - start)
        assert response.status_code == 400, response.text[:200]
    assert min(times) < 0.05
    assert "error" in response.json()
    assert len(response.content) < 1000


def test_sv_11_memory_stays_flat(server: LiveServer) -> None:
    def send_all() -> int:
        for payload in HOSTILE.values():
            assert server.client.post("/v1/completions", content=payload.encode()).status_code == 400
        gc.collect()
        return psutil.Process().memory_info().rss

    send_all()
    before = send_all()
    for _ in range(3):
        after = send_all()
    assert after - before < 32 * 2**20


def test_a_body_above_the_limit_is_413() -> None:
    with live_server(
        scripted_engine(), gateway=GatewayConfig(max_body_bytes=1000, drain_seconds=0.2)
    ) as server:
        fits = b'{"prompt": "a"' + b" " * 985 + b"}"
        assert len(fits) == 1000
        assert server.client.post("/v1/completions", content=fits).status_code == 200
        assert_refused(server, server.client.post("/v1/completions", content=fits + b" "), None, 413)

        def in_chunks() -> Iterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        assert_refused(server, server.client.post("/v1/completions", content=in_chunks()), None, 413)
        # This client sends everything before it looks for an answer.
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
        connection.request("POST", "/v1/completions", body=b" " * (16 << 20))
        assert connection.getresponse().status == 413
        connection.close()
        # These wait for an answer before they send anything.
        for headers in ("expect: 100-continue\r\ncontent-length: 1001", f"content-length: {80 << 20}"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as client:
                client.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n".encode())
                assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_large_body_that_does_not_come_is_413_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.runtime.server.app._DISCARDING_SECONDS", 0.1)
    with (
        live_server(scripted_engine(), gateway=GatewayConfig(max_body_bytes=9, drain_seconds=0.2)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as client,
    ):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_other_content_types_are_415(server: LiveServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = server.client.post("/v1/completions", content=body, headers={"content-type": kind})
        assert_refused(server, response, None, 415)
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        response = server.client.post("/v1/completions", content=body, headers={"content-type": kind})
        assert response.status_code == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"a"', b"{", b"\xff"])
def test_a_body_that_is_no_object(server: LiveServer, body: bytes) -> None:
    assert_refused(server, server.client.post("/v1/completions", content=body), None)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/models/nothing/of/this", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
def test_wrong_routes_have_errors_in_the_same_shape(
    server: LiveServer, method: str, path: str, status: int
) -> None:
    response = server.client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_models(server: LiveServer) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 128)
    assert model["limits"]["max_batch_size"] == 8
    assert server.client.get("/v1/models/tiny").json() == model
    assert server.complete(prompt="a", model="tiny").status_code == 200
    response = server.complete(prompt="a", model="gpt-4")
    assert response.json()["error"]["code"] == "model_not_found"
    assert_refused(server, response, "model", 404)


def test_a_full_queue_is_503_with_retry_after() -> None:
    gate = StepGate()
    gateway = GatewayConfig(max_waiting=3, drain_seconds=0.2)
    engine = scripted_engine(max_batch_size=2, before_step=gate)
    with live_server(engine, gateway=gateway) as server, ThreadPoolExecutor(1) as pool:
        for body, field in (
            ({"prompt": ["a", "b"], "n": 3}, "n"),
            ({"prompt": ["a", "b"], "best_of": 3}, "best_of"),
            ({"prompt": ["a", "b"], "n": 3, "best_of": 3}, "n"),
            ({"prompt": ["a"] * 6}, "prompt"),
        ):
            never = server.complete(**body)
            assert (never.status_code, never.json()["error"]["param"]) == (400, field)
        taken = pool.submit(server.complete, prompt="a", n=5, max_tokens=2)
        assert gate.is_held.wait(10)
        for stream in (False, True):
            refused = server.complete(prompt="a", stream=stream)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "overloaded_error"
        gate.open()
        assert taken.result(10).status_code == 200
        assert server.complete(prompt="a", n=5, max_tokens=2).status_code == 200
