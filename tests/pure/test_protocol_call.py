"""Bodies to calls: what is taken, what is refused, and under which field's name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pelton.errors import EngineError, OverloadedError, PeltonError, RequestError
from pelton.plugins_trt.sampling_memory import MAX_NUM_LOGPROBS
from pelton.runtime.protocol import CHAT_COMPLETIONS, COMPLETIONS, ApiContext, Call, error_reply, parse_call
from pelton.runtime.protocol_fields import MAX_NUM_MESSAGES
from pelton.runtime.protocol_prompt import MAX_NUM_PROMPTS
from pelton.runtime.request import MAX_NUM_CHOICES, MAX_NUM_STOPS
from support.calls import CONTEXT, LIMITS, TOKENIZER, USER, VOCAB, chat, completion, refusal
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer, reciting


def test_defaults_are_openais() -> None:
    params = completion().requests[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (16, 1.0, 1.0, 1)
    assert (params.logprobs, params.prompt_logprobs, params.seed, params.stop) == (None, None, None, ())
    assert chat().requests[0].params.max_tokens is None


def test_null_counts_as_absent() -> None:
    fields = ("max_tokens", "stop", "seed", "logit_bias", "stream_options", "suffix", "user", "n", "logprobs")
    assert completion(**dict.fromkeys(fields)).requests[0].params == completion().requests[0].params
    nothing = dict.fromkeys(("tools", "response_format", "tool_choice", "max_completion_tokens"))
    assert chat(**nothing).requests[0].params == chat().requests[0].params


def test_every_sampling_field_arrives() -> None:
    given: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "include_stop_str_in_output": True,
        "min_tokens": 3,
        "max_tokens": 9,
        "ignore_eos": True,
        "seed": 11,
        "skip_special_tokens": False,
        "num_draft_tokens": 0,
    }
    for parse in (completion, chat):
        params = parse(**given, stop="x", stop_token_ids=[5], logit_bias={"7": -1}).requests[0].params
        assert {name: getattr(params, name) for name in given} == given
        assert (params.stop, params.stop_token_ids, dict(params.logit_bias)) == (("x",), (5,), {7: -1})


def test_fields_without_effect_on_the_tokens_are_accepted() -> None:
    assert completion(
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", safety_identifier="s"
    ).requests
    assert chat(user="u", metadata={}, store=False, prompt_cache_key="k", tool_choice="none").requests
    assert chat(response_format={"type": "text"}).requests


@pytest.mark.parametrize("parse", [completion, chat])
def test_unknown_fields_are_named(parse: Any) -> None:
    error = refusal(parse, temprature=0.5)
    assert (error.field, error.code) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    ("parse", "field", "value"),
    [
        (completion, "suffix", "x"),
        (completion, "tools", []),
        (completion, "tool_choice", "auto"),
        (completion, "parallel_tool_calls", True),
        (chat, "reasoning_effort", "high"),
        (chat, "functions", []),
    ],
)
def test_what_is_not_supported_is_refused_by_name(parse: Any, field: str, value: object) -> None:
    error = refusal(parse, **{field: value})
    assert error.field == field
    assert error.code in ("unsupported_parameter", "unsupported_value")
    assert "support" in str(error)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 10**6}, "n"),
        ({"n": MAX_NUM_CHOICES + 1}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 0, "best_of": 2}, "n"),
        ({"best_of": MAX_NUM_CHOICES + 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "max_tokens": 0, "echo": True}, "best_of"),
        ({"prompt": ["a"] * 17, "best_of": MAX_NUM_CHOICES}, "best_of"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": MAX_NUM_LOGPROBS + 1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"stop": ["a"] * 10**5}, "stop"),
        ({"stop": ["a"] * (MAX_NUM_STOPS + 1)}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop_token_ids": [1] * 10**5}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        ({"prompt": ["a"] * (MAX_NUM_PROMPTS + 1)}, "prompt"),
        ({"prompt": [[1]] * (MAX_NUM_PROMPTS + 1)}, "prompt"),
        ({"prompt": ["a"] * 17, "n": MAX_NUM_CHOICES}, "n"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"model": "other"}, "model"),
    ],
)
def test_sv_11_values_are_bounded_and_typed(body: dict[str, Any], field: str) -> None:
    assert refusal(completion, **body).field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {str(NUM_PADDED_LOGITS): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(VOCAB + 1)}}, "logit_bias"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [NUM_PADDED_LOGITS]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, 2.0]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], [VOCAB]]}, "prompt[1]"),
        ({"stop_token_ids": [VOCAB], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [NUM_PADDED_LOGITS], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_sa_02_ids_outside_the_vocabulary(body: dict[str, Any], field: str) -> None:
    """Ids of the padding of the logits are refused too: no text maps to them."""
    assert refusal(completion, **body).field == field


def test_sa_02_too_many_logprobs_of_a_chat_are_named_as_the_chat_names_them() -> None:
    assert refusal(chat, logprobs=True, top_logprobs=VOCAB + 1).field == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=-1).field == "top_logprobs"
    assert refusal(chat, top_logprobs=1).field == "top_logprobs"
    assert refusal(chat, logprobs=1).field == "logprobs"
    assert chat(logprobs=True, top_logprobs=MAX_NUM_LOGPROBS).requests[0].params.logprobs == MAX_NUM_LOGPROBS


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
    ],
)
def test_sc_02_empty_prompts(prompt: object, field: str) -> None:
    assert refusal(completion, prompt=prompt).field == field


def test_sc_02_an_empty_prompt_is_bos_where_there_is_one() -> None:
    tokenizer = byte_tokenizer(has_bos=True)
    context = ApiContext(tokenizer, LIMITS, ("tiny",))
    for prompt in ("", [""], ["a", ""]):
        call = parse_call(COMPLETIONS, {"prompt": prompt}, context, "id")
        assert call.requests[-1].prompt_token_ids == (tokenizer.bos_token_id,)
    for prompt in ([], [[]]):
        with pytest.raises(RequestError):
            parse_call(COMPLETIONS, {"prompt": prompt}, context, "id")
    with pytest.raises(RequestError) as error:
        parse_call(COMPLETIONS, {"prompt": "", "add_special_tokens": False}, context, "id")
    assert error.value.field == "prompt"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "usr", "content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([*USER, {"role": "assistant", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "nmae": "y"}], "messages[0].nmae"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        (
            [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "messages[1].content[0]",
        ),
        ([{"role": "user", "content": "x"}] * (MAX_NUM_MESSAGES + 1), "messages"),
    ],
)
def test_messages_are_checked(messages: object, field: str) -> None:
    assert refusal(chat, messages=messages).field == field
    assert refusal(parse_missing).field == "messages"


@pytest.mark.parametrize(
    ("body", "field", "code", "words"),
    [
        ({"messages": []}, "messages", "invalid_value", "at least one message"),
        ({"messages": USER * (MAX_NUM_MESSAGES + 1)}, "messages", "invalid_value", "at most 4096 items"),
        ({"messages": {}}, "messages", "invalid_type", "must be a list"),
        ({"messages": [5]}, "messages[0]", "invalid_type", "must be an object"),
        ({"stream_options": 5}, "stream_options", "invalid_type", "must be an object"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter", "leave it out"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type", "must be an object"),
        ({"temperature": "hot"}, "temperature", "invalid_type", "must be a number"),
        ({"n": 1.5}, "n", "invalid_type", "must be an integer"),
        ({"stream": "yes"}, "stream", "invalid_type", "must be true or false"),
        ({"cache_salt": 5}, "cache_salt", "invalid_type", "must be a string"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "invalid_value", r"logit_bias\[5\] must be a number"),
    ],
)
def test_refusals_are_in_the_words_of_json(body: dict[str, Any], field: str, code: str, words: str) -> None:
    error = refusal(chat, **body)
    assert (error.field, error.code) == (field, code)
    assert re.search(words, str(error))
    assert "validation" not in str(error)


def parse_missing() -> Call:
    return parse_call(CHAT_COMPLETIONS, {}, CONTEXT, "id")


def test_chat_prompt_is_the_templates() -> None:
    ids = TOKENIZER.encode_chat(USER, add_generation_prompt=True)
    assert chat().requests[0].prompt_token_ids == tuple(ids)
    echoed = [
        *USER,
        {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "tool_calls": None},
    ]
    plain = [*USER, {"role": "assistant", "content": "a"}]
    assert chat(messages=echoed).requests[0].prompt_token_ids == tuple(TOKENIZER.encode_chat(plain))
    closed = TOKENIZER.encode_chat(USER, add_generation_prompt=False)
    assert chat(add_generation_prompt=False).requests[0].prompt_token_ids == tuple(closed)
    going_on = TOKENIZER.encode_chat(plain, add_generation_prompt=False, continue_final_message=True)
    assert chat(messages=plain, continue_final_message=True).requests[0].prompt_token_ids == tuple(going_on)
    assert (
        refusal(chat, continue_final_message=True, add_generation_prompt=True).field
        == "continue_final_message"
    )
    error = refusal(chat, chat_template_kwargs={"add_generation_prompt": True})
    assert error.field == "chat_template_kwargs.add_generation_prompt"


def test_sc_02_an_empty_content_is_still_a_chat() -> None:
    assert chat(messages=[{"role": "user", "content": ""}]).requests[0].num_prompt_tokens > 0


def test_prompt_lists_become_requests_with_ids_of_their_own() -> None:
    call = completion(prompt=["ab", "c"], n=3, cache_salt="s")
    assert [request.request_id for request in call.requests] == ["id-0", "id-1"]
    assert [request.prompt_token_ids for request in call.requests] == [
        tuple(TOKENIZER.encode("ab")),
        tuple(TOKENIZER.encode("c")),
    ]
    assert {request.cache_salt for request in call.requests} == {"s"}
    assert call.num_choices == 6
    assert completion(prompt=[5, 6]).requests[0].prompt_token_ids == (5, 6)
    assert [r.prompt_token_ids for r in completion(prompt=[[5], "a"]).requests] == [
        (5,),
        tuple(TOKENIZER.encode("a")),
    ]


def test_echo_keeps_the_prompt_as_it_was_written() -> None:
    text = "<|im_end|>caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    assert completion(prompt=text, echo=True).prompt_texts == (text,)
    assert completion(prompt=TOKENIZER.encode("xy"), echo=True).prompt_texts == ("xy",)
    assert completion().prompt_texts == ()


def test_model_names() -> None:
    assert completion().model == "tiny"
    assert completion(model="alias").model == "alias"
    error = refusal(completion, model="x" * 1000)
    assert error.code == "model_not_found"
    assert len(str(error)) < 300


def test_unknown_endpoint() -> None:
    with pytest.raises(RequestError) as error:
        parse_call("/v1/embeddings", {}, CONTEXT, "id")
    assert error.value.field == "url"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x", field="n"), 400, "invalid_request_error"),
        (RequestError("x", field="model", code="model_not_found"), 404, "invalid_request_error"),
        (RequestError("x", code="invalid_api_key"), 401, "authentication_error"),
        (RequestError("x", code="body_too_large"), 413, "invalid_request_error"),
        (OverloadedError("x"), 503, "overloaded_error"),
        (EngineError("x"), 500, "server_error"),
        (PeltonError("x"), 500, "server_error"),
    ],
)
def test_error_reply(error: PeltonError, status: int, kind: str) -> None:
    found, body = error_reply(error)
    assert found == status
    shown = body["error"]
    assert isinstance(shown, dict)
    assert set(shown) == {"message", "type", "param", "code"}
    assert (shown["message"], shown["type"], shown["param"]) == ("x", kind, getattr(error, "field", None))


def test_the_recital_of_the_tiny_model() -> None:
    """What the answers of the server tests rest on."""
    next_token = reciting(TOKENIZER)
    assert TOKENIZER.decode([next_token(TOKENIZER.encode(text)) for text in ("xa", "y", "z", " ")]) == "bzaa"
    assert {next_token(TOKENIZER.encode("!"))} == TOKENIZER.eos_token_ids
