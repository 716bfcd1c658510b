"""Streams and answers over HTTP, and what a client sees of faults in the engine."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
import numpy as np
import pytest

from support.live_server import events, live_server, until
from support.tiny_model import scripted_engine

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("n", [1, 3])
def test_st_08_sse_of_a_chat(n: int) -> None:
    with live_server(scripted_engine()) as server:
        response = server.chat(
            messages=USER, n=n, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks.pop()["usage"]["completion_tokens"] == 5 * n
    for index in range(n):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (
            len(choices) - 1
        )
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "abcde"


def test_a_stream_and_a_whole_answer_agree() -> None:
    with live_server(scripted_engine()) as server:
        for body in ({"prompt": "ab"}, {"prompt": ["ab", "x"], "n": 2, "stop": "h"}, {"prompt": "!"}):
            whole = server.complete(**body).json()
            chunks = events(server.complete(**body, stream=True).text)
            for choice in whole["choices"]:
                parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
                assert "".join(part["text"] for part in parts) == choice["text"]
                assert parts[-1]["finish_reason"] == choice["finish_reason"]
                assert parts[-1]["stop_reason"] == choice["stop_reason"]


def test_tc_07_150_clients_at_once_get_their_own_answers() -> None:
    """Chats, stop strings and truncation share one tokenizer, from many threads."""

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        letter = chr(ord("a") + number % 20)
        after = "".join(chr(ord(letter) + i) for i in range(1, 5))
        body = {
            "prompt": letter * 90,
            "temperature": 0,
            "max_tokens": 4,
            "truncate_prompt_tokens": 80 - number % 7,
        }
        expected = after
        if number % 3 == 0:
            body["stop"] = after[2]
            expected = after[:2]
        if number % 2:
            body["stream"] = True
        if number % 5 == 0:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": letter}, {"role": "assistant", "content": letter}]
            body["continue_final_message"] = True
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        parts = events(response.text) if number % 2 else [response.json()]
        choices = [part["choices"][0] for part in parts]
        texts = [
            c.get("text") or (c.get("delta") or c.get("message") or {}).get("content") or "" for c in choices
        ]
        assert "".join(texts) == expected

    async def all_of_them(url: str) -> None:
        limits = httpx.Limits(max_connections=150)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:
            await asyncio.gather(*(ask(client, number) for number in range(150)))

    with live_server(scripted_engine(max_batch_size=16)) as server:
        asyncio.run(all_of_them(server.url))
        assert server.metric("pelton_requests_finished_total", reason="abort") == 0


def test_small_answers_do_not_wait_for_a_delayed_acknowledgement() -> None:
    """With Nagle's algorithm on, each of these takes 40 ms."""
    with live_server(scripted_engine()) as server:
        times = []
        for _ in range(11):
            start = time.perf_counter()
            server.complete(prompt="a", max_tokens=1)
            times.append(time.perf_counter() - start)
    assert min(times) < 0.03


def fail_at(step: int) -> object:
    def hook(number: int, inputs: object) -> None:
        if number == step:
            raise RuntimeError("injected")

    return hook


def test_st_09_a_fault_in_the_middle_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    with live_server(scripted_engine(before_step=fail_at(5))) as server:
        response = server.complete(prompt="a", stream=True, headers=None)
        assert response.status_code == 200
        *chunks, last = events(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "bcde"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert set(last) == {"error"}
        assert last["error"]["type"] == "server_error"
        assert response.headers["x-request-id"] in caplog.text
        assert server.complete(prompt="a", max_tokens=1).status_code == 200
        assert server.metric("pelton_kv_cache_blocks_used") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_st_09_a_fault_before_the_first_token_has_a_status(stream: bool) -> None:
    with live_server(scripted_engine(before_step=fail_at(1))) as server:
        response = server.complete(prompt="a", stream=stream)
        assert response.status_code == 500
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert server.complete(prompt="a", stream=stream).status_code == 200


def test_st_09_a_fault_of_one_choice_ends_the_whole_call_and_no_other() -> None:
    def poison(step: int, logits: np.ndarray) -> None:
        if step == 4 and len(logits) == 3:
            logits[1] = np.nan

    with live_server(scripted_engine(after_step=poison)) as server:
        *chunks, last = events(server.complete(prompt="a", n=3, max_tokens=400, stream=True).text)
        assert "error" in last
        assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2}
        assert until(lambda: server.metric("pelton_requests_finished_total", reason="abort") == 2)
        assert server.metric("pelton_requests_running") == 0
        assert server.complete(prompt="a", n=3).status_code == 200


def test_request_ids() -> None:
    with live_server(scripted_engine()) as server:
        first = server.complete(prompt="a").headers["x-request-id"]
        second = server.complete(prompt="a").headers["x-request-id"]
        assert first != second
        own = server.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine:1/a-b_c.d"}
        )
        assert own.headers["x-request-id"] == "mine:1/a-b_c.d"
        for bad in ("a b", "x" * 129, "ä".encode("latin-1")):
            replaced = server.client.get("/nowhere", headers={"x-request-id": bad})
            assert replaced.status_code == 404
            assert len(replaced.headers["x-request-id"]) == 32


def test_a_bug_in_a_route_is_logged_and_shaped(caplog: pytest.LogCaptureFixture) -> None:
    engine = scripted_engine()
    with live_server(engine) as server:
        engine.tokenizer.encode = None  # type: ignore[assignment,method-assign]
        response = server.complete(prompt="a")
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "Traceback" not in response.text
        assert "NoneType" not in response.text
        request_id = response.headers["x-request-id"]
        assert until(lambda: any(request_id in record.getMessage() for record in caplog.records))
        (record,) = [record for record in caplog.records if request_id in record.getMessage()]
        assert record.levelno == logging.ERROR
        assert record.exc_info is not None
        assert server.client.get("/health").status_code == 200
