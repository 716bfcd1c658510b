"""Bounds on what a call may ask for: the context, the output, the size of the answer."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from pelton.errors import RequestError
from pelton.runtime.protocol import CHAT_COMPLETIONS, COMPLETIONS, ApiContext, Call, parse_call
from pelton.runtime.protocol_call import MAX_NUM_CALL_CHOICES
from pelton.runtime.request import MAX_NUM_CHOICES
from support.calls import LIMITS, TOKENIZER, USER, chat, completion, refusal


def test_sv_11_bound_on_choices_is_on_the_whole_call() -> None:
    num_prompts = MAX_NUM_CALL_CHOICES // MAX_NUM_CHOICES
    call = completion(prompt=["a"] * num_prompts, n=MAX_NUM_CHOICES)
    assert (len(call.requests), call.num_choices) == (num_prompts, MAX_NUM_CALL_CHOICES)


def test_sv_11_bound_on_output_logprobs_is_on_the_whole_call() -> None:
    limits = replace(LIMITS, max_model_len=2**17)
    context = ApiContext(TOKENIZER, limits, ("tiny",))

    def parse(endpoint: str, **body: Any) -> Call:
        return parse_call(endpoint, {"n": 4, **body}, context, "id")

    assert parse(CHAT_COMPLETIONS, messages=USER, logprobs=True, top_logprobs=5).requests
    error = refusal(parse, endpoint=CHAT_COMPLETIONS, messages=USER, logprobs=True, top_logprobs=20)
    assert error.field == "top_logprobs"
    short = parse(CHAT_COMPLETIONS, messages=USER, logprobs=True, top_logprobs=20, max_tokens=1000)
    assert short.requests
    assert parse(COMPLETIONS, prompt="a", logprobs=20).requests
    assert (
        refusal(parse, endpoint=COMPLETIONS, prompt="a", logprobs=20, max_tokens=100_000).field == "logprobs"
    )


def test_sv_11_bound_on_echoed_text_is_on_the_whole_call() -> None:
    prompts = ["\N{EURO SIGN}" * 21] * 16
    assert completion(prompt=prompts, n=128, echo=True, max_tokens=1).requests
    limits = replace(LIMITS, max_model_len=2**15)
    context = ApiContext(TOKENIZER, limits, ("tiny",))
    body = {"prompt": ["a" * 20_000] * 16, "n": 128, "max_tokens": 1}
    assert parse_call(COMPLETIONS, body, context, "id").requests
    with pytest.raises(RequestError) as error:
        parse_call(COMPLETIONS, {**body, "echo": True}, context, "id")
    assert error.value.field == "echo"


def test_sv_11_bound_on_prompt_logprobs_is_on_the_whole_call() -> None:
    prompts = ["a" * 60] * 500
    assert completion(prompt=prompts, prompt_logprobs=1).requests
    assert refusal(completion, prompt=prompts, prompt_logprobs=60).field == "prompt_logprobs"
    assert refusal(completion, prompt=prompts, logprobs=60, echo=True).field == "logprobs"
    assert completion(prompt=prompts, logprobs=60).requests
    # Every choice repeats them.
    assert completion(prompt="a" * 60, prompt_logprobs=60, n=128, max_tokens=1).requests
    assert refusal(completion, prompt=["a" * 60] * 3, prompt_logprobs=60, n=128).field == "prompt_logprobs"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_chat_limit_has_two_names(limit: str) -> None:
    assert chat(**{limit: 5}).requests[0].params.max_tokens == 5
    for value in (-1, 0, 10**4):
        assert refusal(chat, **{limit: value}).field == limit
    assert refusal(chat, max_tokens=4, max_completion_tokens=5).field == "max_completion_tokens"
    assert chat(max_tokens=5, max_completion_tokens=5).requests[0].params.max_tokens == 5


def test_sa_12_max_tokens_zero_needs_something_to_show() -> None:
    assert refusal(completion, max_tokens=0).field == "max_tokens"
    assert refusal(completion, max_tokens=0, logprobs=1).field == "max_tokens"
    assert refusal(chat, max_tokens=0).field == "max_tokens"
    assert completion(max_tokens=0, echo=True, logprobs=1).requests[0].params.prompt_logprobs == 1
    assert completion(max_tokens=0, echo=True, logprobs=0).requests[0].params.prompt_logprobs == 0
    assert completion(max_tokens=0, echo=True).requests[0].params.prompt_logprobs is None
    assert completion(max_tokens=0, prompt_logprobs=2).requests[0].params.prompt_logprobs == 2
    assert chat(max_tokens=0, prompt_logprobs=2).requests[0].params.max_tokens == 0


@pytest.mark.parametrize("value", [-1, 1.5, "5", True, []])
def test_sa_12_max_tokens_of_a_wrong_type(value: object) -> None:
    assert refusal(completion, max_tokens=value).field == "max_tokens"
    assert refusal(chat, max_tokens=value).field == "max_tokens"


def test_sa_10_longer_than_the_context() -> None:
    for call in (
        refusal(completion, prompt="a" * 128),
        refusal(completion, prompt="a" * 64),
        refusal(completion, prompt=[1] * 128),
        refusal(completion, prompt=["a", "a" * 64], max_tokens=1),
        refusal(chat, messages=[{"role": "user", "content": "a" * 128}]),
    ):
        assert call.code == "context_length_exceeded"
        assert call.field in ("prompt", "prompt[1]", "messages")
        assert "64" in str(call)
    error = refusal(completion, prompt="a" * 60, max_tokens=5)
    assert (error.field, error.code) == ("max_tokens", "context_length_exceeded")
    assert refusal(completion, prompt="a" * 60, min_tokens=5).field == "min_tokens"
    assert completion(prompt="a" * 60, max_tokens=4).requests[0].params.max_tokens == 4
    assert completion(prompt="a" * 64, max_tokens=0, echo=True).requests


def test_a_default_limit_gives_way_to_the_context() -> None:
    assert completion(prompt="a" * 60).requests[0].params.max_tokens == 4


def test_sa_10_truncation_is_asked_for_and_counted() -> None:
    call = completion(prompt="a" * 99 + "bc", truncate_prompt_tokens=4, max_tokens=1)
    assert call.requests[0].prompt_token_ids == tuple(TOKENIZER.encode("aabc"))
    assert call.num_truncated_tokens == (97,)
    call = completion(prompt=["a" * 10, [1, 2, 3]], truncate_prompt_tokens=2, max_tokens=1, echo=True)
    assert [request.num_prompt_tokens for request in call.requests] == [2, 2]
    assert call.num_truncated_tokens == (8, 1)
    assert call.prompt_texts[0] == "aa"
    assert completion(truncate_prompt_tokens=10).num_truncated_tokens == (0,)
    long = [{"role": "user", "content": "a" * 500}]
    call = chat(messages=long, truncate_prompt_tokens=-1, max_tokens=5)
    assert call.requests[0].num_prompt_tokens == 59
    assert call.num_truncated_tokens == (len(TOKENIZER.encode_chat(long)) - 59,)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    text = "a" * 4_000_000
    times = []
    for _ in range(5):
        start = time.process_time()
        error = refusal(completion, prompt=text)
        times.append(time.process_time() - start)
    assert min(times) < 0.05
    assert error.code == "context_length_exceeded"
    assert (
        refusal(chat, messages=[{"role": "user", "content": [{"type": "text", "text": text}]}]).field
        == "messages"
    )
