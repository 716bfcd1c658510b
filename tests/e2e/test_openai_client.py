"""The `openai` client against a `pelton serve` process with a real model."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from support.live_server import read_metric, until

KEY = "test-key"
MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def base_url(smollm2_bundle: Path) -> Iterator[str]:
    """A server that must end well when it is told to stop."""
    command = [str(Path(sys.executable).with_name("pelton")), "serve", str(smollm2_bundle), "--port", "0"]
    command += ["--api-key", KEY, "--served-model-name", MODEL, "--drain-seconds", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announcement = process.stdout.readline().split()
            assert announcement[:2] == ["serving", MODEL]
            yield announcement[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=TIMEOUT) as client:
        yield client


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] >= 512


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_st_08_chat_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    usage = chunks.pop().usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.choices[0].finish_reason == "stop"
    shown = f"{answer.choices[0].message.content}<|im_end|>"  # what ended the turn was sampled too
    assert "".join(entry.token for entry in logprobs.content) == shown
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) < 1.001


def test_completions_of_texts_and_ids(client: OpenAI) -> None:
    prompts = ["Monday, Tuesday, Wednesday,", "One, two, three,"]
    both = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert "Thursday" in both.choices[0].text
    assert "four" in both.choices[1].text
    twice = client.completions.create(model=MODEL, prompt=prompts[1], n=2, temperature=0, max_tokens=8)
    assert [choice.text for choice in twice.choices] == [both.choices[1].text] * 2
    ids = client.completions.create(model=MODEL, prompt=[1, 2, 3], temperature=0, max_tokens=1)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_stop_strings_and_seeds(client: OpenAI) -> None:
    counting = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 24}
    stopped = client.completions.create(**counting, temperature=0, stop=[" six", "seven"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" four, five,", "stop")
    drawn = [
        client.completions.create(**counting, temperature=1.5, seed=seed, extra_body={"top_k": 50})
        .choices[0]
        .text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_extras_of_vllm(client: OpenAI) -> None:
    extras = {"min_tokens": 30, "ignore_eos": True, "repetition_penalty": 1.3, "min_p": 0.05}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=30, seed=3, extra_body=extras
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30


def test_sa_12_scoring_agrees_with_generation(client: OpenAI) -> None:
    prompt = "The capital of Italy is"
    made = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6, logprobs=0)
    text = prompt + made.choices[0].text
    scored = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0)
    assert scored.choices[0].text == text
    assert made.choices[0].logprobs is not None
    assert scored.choices[0].logprobs is not None
    expected = made.choices[0].logprobs.token_logprobs
    found = scored.choices[0].logprobs.token_logprobs
    assert expected is not None
    assert found is not None
    assert found[0] is None
    assert found[-6:] == pytest.approx(expected, abs=0.1)


def test_prefix_cache_shows_in_usage(client: OpenAI) -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant. " * 20}, *QUESTION]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
        for _ in range(2)
    ]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] > 64
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_errors_are_the_clients_own(client: OpenAI, base_url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert bad.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with (
        OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_64_streams_of_which_a_third_leaves_hold_nothing(base_url: str) -> None:
    chance = random.Random(7)
    leaves_after = {number: chance.randint(0, 8) for number in range(0, 64, 3)}

    async def one(client: AsyncOpenAI, number: int) -> int:
        question = f"Tell me about the number {number}. " * chance.randint(1, 6)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=400 if number in leaves_after else 12,  # who leaves is never done before
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        num_chunks, num_tokens = 0, 0
        async with stream:
            async for chunk in stream:
                num_chunks += 1
                if num_chunks > leaves_after.get(number, 1000):
                    return 0
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens
        return num_tokens

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=TIMEOUT) as http_client,
            AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0, http_client=http_client) as client,
        ):
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    def metrics() -> str:
        return httpx.get(
            f"{base_url.removesuffix('/v1')}/metrics", headers={"authorization": f"Bearer {KEY}"}
        ).text

    aborted_before = read_metric(metrics(), "pelton_requests_finished_total", reason="abort")
    results = asyncio.run(all_of_them())
    assert [count for number, count in enumerate(results) if number not in leaves_after] == [12] * 42

    def is_released() -> bool:
        text = metrics()
        names = ("pelton_kv_cache_blocks_used", "pelton_requests_running", "pelton_requests_waiting")
        return all(read_metric(text, name) == 0 for name in names)

    assert until(is_released, seconds=2.0)
    assert read_metric(metrics(), "pelton_requests_finished_total", reason="abort") > aborted_before
    assert httpx.get(f"{base_url.removesuffix('/v1')}/health").status_code == 200
