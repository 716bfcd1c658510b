"""Calls whose forms take long to compile: they wait alone, and there is a bound on how many do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from pelton.runtime.server.gateway import MAX_NUM_COMPILING
from support.gated_compiler import GatedCompiler, gate
from support.live_server import LiveServer, live_server, until
from support.tiny_model import scripted_engine


@pytest.fixture
def gated() -> Iterator[tuple[LiveServer, GatedCompiler]]:
    engine = scripted_engine(max_model_len=128)
    compiler = gate(engine)
    with live_server(engine) as server:
        try:
            yield server, compiler
        finally:
            compiler.gate.set()


def ask(server: LiveServer, pool: ThreadPoolExecutor, count: int) -> list[Future[httpx.Response]]:
    """Calls that wait for their forms; every one has a form of its own."""
    return [
        pool.submit(server.complete, prompt="a", max_tokens=9, guided_choice=[f"slow {number}"])
        for number in range(count)
    ]


def test_slow_forms_hold_up_no_other_call(gated: tuple[LiveServer, GatedCompiler]) -> None:
    server, compiler = gated
    with ThreadPoolExecutor(6) as pool:
        slow = ask(server, pool, 6)
        assert until(lambda: len(compiler.tries) == 6)
        assert server.complete(prompt="a", max_tokens=2).json()["choices"][0]["text"] == "bc"
        quick = server.complete(prompt="a", max_tokens=3, guided_choice=["quick"])
        assert quick.json()["choices"][0]["text"] == "qui"
        scored = server.complete(prompt="a", max_tokens=2, logprobs=1)
        assert len(scored.json()["choices"][0]["logprobs"]["tokens"]) == 2
        assert not any(future.done() for future in slow)
        compiler.gate.set()
        texts = [future.result().json()["choices"][0]["text"] for future in slow]
    assert texts == [f"slow {number}" for number in range(6)]


def test_a_running_stream_goes_on_beside_slow_forms(gated: tuple[LiveServer, GatedCompiler]) -> None:
    server, compiler = gated
    body = {"prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True, "logprobs": 0}
    with ThreadPoolExecutor(6) as pool:
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            slow = ask(server, pool, 6)
            assert until(lambda: len(compiler.tries) == 6)
            frames = [line for line in lines if line]
        assert frames[-1] == "data: [DONE]"
        assert json.loads(frames[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert not any(future.done() for future in slow)
        compiler.gate.set()


def test_too_many_slow_forms_are_turned_away(gated: tuple[LiveServer, GatedCompiler]) -> None:
    server, compiler = gated
    with ThreadPoolExecutor(MAX_NUM_COMPILING) as pool:
        slow = ask(server, pool, MAX_NUM_COMPILING)
        assert until(lambda: len(compiler.tries) == MAX_NUM_COMPILING)
        refused = server.complete(prompt="a", guided_choice=["one more"])
        assert refused.status_code == 503
        assert "forms" in refused.json()["error"]["message"]
        assert server.complete(prompt="a", max_tokens=2).status_code == 200
        compiler.gate.set()
        assert {future.result().status_code for future in slow} == {200}
    assert server.complete(prompt="a", max_tokens=3, guided_choice=["one more"]).status_code == 200


def test_a_form_that_is_compiled_counts_for_nothing(gated: tuple[LiveServer, GatedCompiler]) -> None:
    """With as many slow forms as may wait, one that everybody uses is still served."""
    server, compiler = gated
    assert server.complete(prompt="a", max_tokens=3, guided_choice=["quick"]).status_code == 200
    with ThreadPoolExecutor(MAX_NUM_COMPILING) as pool:
        slow = ask(server, pool, MAX_NUM_COMPILING)
        assert until(lambda: len(compiler.tries) == MAX_NUM_COMPILING + 1)
        again = server.complete(prompt="a", max_tokens=3, guided_choice=["quick"])
        assert again.json()["choices"][0]["text"] == "qui"
        new = server.complete(prompt="a", max_tokens=3, guided_choice=["another"])
        assert new.status_code == 503
        compiler.gate.set()
        assert all(future.result().status_code == 200 for future in slow)
