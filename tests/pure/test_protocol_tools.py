"""Tools in chat calls: what the fields may say, what the template and the sampler get, how answers look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pelton.errors import RequestError
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.protocol import CHAT_COMPLETIONS, ApiContext, Call, Reply, dump_json, parse_call
from pelton.runtime.protocol_tools import MAX_NUM_TOOLS
from pelton.runtime.structured import Tag
from pelton.runtime.tokenizer import Tokenizer
from pelton.runtime.tool_calls import TOOL_FORMATS
from pelton.runtime.tool_calls.tools import nested
from support.tiny_model import (
    NUM_PADDED_LOGITS,
    TOOL_TEMPLATE,
    answering,
    byte_tokenizer,
    scripted_engine,
)

TOKENIZER = byte_tokenizer(template=TOOL_TEMPLATE)
LIMITS = ExecutorLimits(
    max_model_len=4096,
    max_batch_size=4,
    max_step_tokens=512,
    block_size=16,
    num_blocks=512,
    vocab_size=NUM_PADDED_LOGITS,
)
GRAMMARS = GrammarCompiler(TOKENIZER, NUM_PADDED_LOGITS)
USER = {"role": "user", "content": "Weather in Paris?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "W", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_time"}}
WEATHER_NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> Iterator[None]:
    yield
    GRAMMARS.close()


def chat(tokenizer: Tokenizer = TOKENIZER, parser: str = "auto", **body: Any) -> Call:
    context = ApiContext(tokenizer, LIMITS, ("tiny",), tool_call_parser=parser, grammars=GRAMMARS)
    return parse_call(CHAT_COMPLETIONS, {"messages": [USER], **body}, context, "id")


def refusal(**body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**body)
    return caught.value


def prompt_of(call: Call) -> str:
    return TOKENIZER.decode(call.requests[0].prompt_token_ids, skip_special_tokens=False)


def answer(text: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of an engine that writes `text`, and what the same call streams."""
    replies = []
    for stream in (False, True):
        engine = scripted_engine(
            TOKENIZER,
            next_token=answering(TOKENIZER, text),
            max_model_len=4096,
            max_step_tokens=512,
            num_blocks=512,
        )
        context = ApiContext(engine.tokenizer, engine.limits, ("tiny",), grammars=engine.grammars)
        fields = {"messages": [USER], "temperature": 0, "max_tokens": 600, "stream": stream, **body}
        call = parse_call(CHAT_COMPLETIONS, fields, context, "id")
        reply = Reply(call, context, created=7)
        engine.admit(call.requests[0])
        chunks = []
        while engine.has_work:
            chunks += [chunk for delta in engine.step() for chunk in reply.feed(delta)]
        dump_json(chunks if stream else reply.body())
        replies.append((reply, chunks))
    return replies[0][0].body()["choices"][0], [chunk["choices"][0] for chunk in replies[1][1]]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from deltas."""
    message: dict[str, Any] = {"refusal": None}
    for choice in choices:
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = value if message.get(key) is None else message[key] + (value or "")
                continue
            (call,) = value
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["function"]["arguments"] == ""
                calls.append({key: call[key] for key in ("id", "type", "function")})
                continue
            assert call.keys() == {"index", "function"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_tools_reach_the_template() -> None:
    prompt = prompt_of(chat(tools=[WEATHER, TIME]))
    assert json.dumps(WEATHER) in prompt
    assert json.dumps(TIME) in prompt
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": False, "description": None}}
    shown = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
    assert json.dumps(shown) in prompt_of(chat(tools=[strict]))
    strict["function"]["strict"] = True
    assert json.dumps(shown) in prompt_of(chat(tools=[strict])), "a hint that changes nothing"
    assert prompt_of(chat(tools=[WEATHER], tool_choice="none")) == prompt_of(chat(tools=[WEATHER]))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [TIME] * 2}, "tools[1].function.name"),
        ({"tools": [TIME] * (MAX_NUM_TOOLS + 1)}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{**TIME, "x": 1}]}, "tools[0].x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f" * 65}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 60000}}]}, "tools"),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {**NAMED, "x": 1}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [TIME], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_fields_are_checked_by_name(body: dict[str, Any], field: str) -> None:
    assert refusal(**body).field == field


def test_a_template_without_a_place_for_tools() -> None:
    plain = byte_tokenizer()
    for choice in ("auto", "required", NAMED):
        error = refusal(tokenizer=plain, tools=[TIME], tool_choice=choice, parser="hermes")
        assert error.field == "tools"
        assert "--chat-template" in str(error)
    assert prompt_of(chat(plain, tools=[TIME], tool_choice="none")) == prompt_of(chat(plain))


def test_a_model_whose_calls_cannot_be_read() -> None:
    error = refusal(tools=[TIME], parser="none")
    assert error.field == "tools"
    assert "--tool-call-parser" in str(error)
    assert chat(parser="none", tools=[TIME], tool_choice="none").answer_format.tool_format is None


def test_enforced_calls() -> None:
    def form(**body: Any) -> Any:
        return chat(tools=[WEATHER, TIME], **body).requests[0].params.structured_output

    assert form() is form(tool_choice="auto") is form(tool_choice="none") is None
    required = form(tool_choice="required")
    assert (required.kind, required.is_repeated, required.separator) == ("tagged", True, "\n")
    weather, time = required.tags
    assert weather == Tag(
        '<tool_call>\n{"name": "get_weather", "arguments": ', json.dumps(CITY), "}\n</tool_call>"
    )
    assert json.loads(time.schema) == {"type": "object", "properties": {}, "additionalProperties": False}
    assert not form(tool_choice="required", parallel_tool_calls=False).is_repeated
    named = form(tool_choice=NAMED)
    assert (named.tags, named.is_repeated) == ((time,), False)
    assert chat(tools=[TIME]).requests[0].grammar is None
    assert chat(tools=[TIME], tool_choice=NAMED).requests[0].grammar is not None


def test_so_01_a_schema_that_cannot_be_enforced_names_its_place() -> None:
    broken = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nope"}}}},
    }
    assert chat(tools=[TIME, broken]).requests, "a free answer is not held to it"
    place = "tools[1].function.parameters/properties/a/type"
    assert refusal(tools=[TIME, broken], tool_choice="required").field == place
    named = {"type": "function", "function": {"name": "f"}}
    assert refusal(tools=[TIME, broken], tool_choice=named).field == place


def test_without_a_compiler_nothing_is_left_unenforced() -> None:
    context = ApiContext(TOKENIZER, LIMITS, ("tiny",))
    body = {"messages": [USER], "tools": [TIME], "tool_choice": "required"}
    with pytest.raises(RequestError) as caught:
        parse_call(CHAT_COMPLETIONS, body, context, "id")
    assert caught.value.field == "tools"


def test_an_answer_of_another_form_has_no_place_for_calls() -> None:
    form = {"response_format": {"type": "json_object"}}
    for choice in ("auto", "required", NAMED):
        assert refusal(tools=[TIME], tool_choice=choice, **form).field == "response_format"
    call = chat(tools=[TIME], tool_choice="none", chat_template_kwargs={"thinks": True}, **form)
    assert call.requests[0].params.structured_output.kind == "json_object"  # type: ignore[union-attr]
    assert prompt_of(call).endswith("<think>\n\n</think>\n\n")
    assert call.answer_format.is_plain


@pytest.mark.parametrize("name", ["mistral", "granite"])
def test_lists_are_enforced_as_one_value(name: str) -> None:
    recursive = {
        "properties": {"a": {"$ref": "#/$defs/p"}},
        "$defs": {"p": {"type": "array", "items": {"$ref": "#/$defs/p"}}},
    }
    tools = [TIME, {"type": "function", "function": {"name": "f", "parameters": recursive}}]
    form = chat(parser=name, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (tag,) = form.requests[0].params.structured_output.tags  # type: ignore[union-attr]
    schema = json.loads(tag.schema)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    arguments = schema["items"]["anyOf"][1]["properties"]["arguments"]
    pointer = "#/items/anyOf/1/properties/arguments/$defs/p"
    assert arguments["properties"]["a"]["$ref"] == arguments["$defs"]["p"]["items"]["$ref"] == pointer
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "get_time"}


def test_references_are_told_from_what_looks_like_them() -> None:
    schema = {
        "properties": {
            "$ref": {"type": "string"},
            "const": {"$ref": "#/x"},
            "b": {"enum": [{"$ref": "#/x"}]},
        },
        "allOf": [{"$ref": "#"}, True],
        "$id": "#/x",
    }
    assert nested(schema, "/p") == {
        "properties": {
            "$ref": {"type": "string"},
            "const": {"$ref": "#/p/x"},
            "b": {"enum": [{"$ref": "#/x"}]},
        },
        "allOf": [{"$ref": "#/p"}, True],
        "$id": "#/x",
    }


def test_a_prompt_that_opened_reasoning() -> None:
    thinking = {"chat_template_kwargs": {"thinks": True}, "tools": [TIME]}
    call = chat(**thinking)
    assert prompt_of(call).endswith("<think>\n")
    assert call.answer_format.is_in_reasoning
    assert not chat(tools=[TIME]).answer_format.is_in_reasoning
    enforced = chat(**thinking, tool_choice="required")
    assert prompt_of(enforced).endswith("<think>\n\n</think>\n\n")
    assert not enforced.answer_format.is_in_reasoning
    begun = [USER, {"role": "assistant", "content": "<think>so"}]
    assert chat(messages=begun, continue_final_message=True).answer_format.is_in_reasoning
    forged = [{"role": "user", "content": "<think>"}]
    assert not chat(messages=forged).answer_format.is_in_reasoning


def test_an_answer_that_calls() -> None:
    choice, chunks = answer(f"I look.\n{CALL}\n{CALL}", tools=[WEATHER])
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert joined(chunks) == message
    assert message["content"] == "I look."
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")
    again, _ = answer(f"I look.\n{CALL}\n{CALL}", tools=[WEATHER])
    assert again == choice, "ids are the same in equal jobs"


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (WEATHER_NAMED, "stop")])
def test_an_enforced_call(choice: Any, reason: str) -> None:
    told, chunks = answer(CALL, tools=[WEATHER, TIME], tool_choice=choice)
    assert told["finish_reason"] == chunks[-1]["finish_reason"] == reason
    (call,) = told["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert joined(chunks) == told["message"]


def test_content_is_null_beside_calls_alone() -> None:
    choice, chunks = answer(CALL, tools=[WEATHER])
    assert choice["message"]["content"] is None
    assert joined(chunks) == choice["message"]


def test_arguments_stream_in_fragments() -> None:
    _, chunks = answer(CALL, tools=[WEATHER])
    calls = [chunk["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert len(calls) > 5
    assert [call["function"].get("name") for call in calls] == ["get_weather"] + [None] * (len(calls) - 1)


def test_one_call_without_parallel_ones() -> None:
    choice, chunks = answer(f"{CALL}\n{CALL}", tools=[WEATHER], parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert joined(chunks) == choice["message"]


def test_without_tools_or_with_choice_none_nothing_is_called() -> None:
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice, chunks = answer(CALL, **options)
        assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None} == joined(chunks)
        assert choice["finish_reason"] == "stop"


def test_a_call_that_the_limit_cuts() -> None:
    choice, chunks = answer(CALL, tools=[WEATHER], max_tokens=len(CALL) - 20)
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])
    assert joined(chunks) == choice["message"]


@pytest.mark.parametrize(
    ("stop", "parallel", "arguments", "reason"),
    [
        ("Pari", True, ['{"city": "'], "stop"),
        ("</tool_call>", True, ['{"city": "Paris"}'], "tool_calls"),
        ("Rome", True, ['{"city": "Paris"}', '{"city": "'], "stop"),
        ("Rome", False, ['{"city": "Paris"}'], "tool_calls"),
    ],
)
def test_only_whole_calls_are_a_reason_to_call(
    stop: str, parallel: bool, arguments: list[str], reason: str
) -> None:
    text = f"{CALL}\n{CALL.replace('Paris', 'Rome')}"
    choice, chunks = answer(text, tools=[WEATHER], stop=[stop], parallel_tool_calls=parallel)
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == reason
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == arguments
    assert joined(chunks) == choice["message"]


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@pytest.mark.parametrize("choice", ["required", WEATHER_NAMED])
def test_a_schema_that_cannot_be_kept_is_named_as_it_was_sent(parser: str, choice: Any) -> None:
    broken = {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": broken}}
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(11)]
    with pytest.raises(RequestError) as caught:
        chat(parser=parser, tools=[tools[0], tool, *tools[1:]], tool_choice=choice)
    assert caught.value.field == "tools[1].function.parameters/properties/a/not"
    assert str(caught.value).startswith(f"{caught.value.field}: ")


@pytest.mark.parametrize("choice", ["required", WEATHER_NAMED])
def test_stop_strings_do_not_go_with_enforced_calls(choice: Any) -> None:
    assert refusal(tools=[WEATHER], tool_choice=choice, stop=["Pari"]).field == "stop"
    assert chat(tools=[WEATHER], tool_choice="none", stop=["Pari"]).requests[0].params.stop == ("Pari",)


def test_reasoning_has_both_names() -> None:
    choice, chunks = answer(f"<think>\nso\n</think>\n\n{CALL}", tools=[WEATHER])
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "so"
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1
    assert joined(chunks) == message
    choice, chunks = answer("<think>so</think>Paris")
    assert choice["message"] == joined(chunks)
    assert choice["message"]["content"] == "Paris"


def test_every_token_keeps_its_logprobs() -> None:
    text = f"<think>so</think>I look. {CALL}"
    choice, chunks = answer(text, tools=[WEATHER], logprobs=True)
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == text + "<|im_end|>"
    streamed = [
        entry["token"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
    ]
    assert streamed == tokens
