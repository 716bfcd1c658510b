"""Tools through the `openai` client, against a `pelton serve` process with a real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

MODEL = "smollm2"
TEMPLATE = Path(__file__).parents[2] / "docs/templates/chatml_hermes.jinja"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "string", "maxLength": 20}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": PLACE, "get_time": ZONE}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": SCHEMAS[name]}}
    for name, what in (("get_weather", "Weather of a city"), ("get_time", "Time of day in a zone"))
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = {"role": "user", "content": "What is the weather in Paris, in celsius?"}


@pytest.fixture(scope="module")
def client(smollm2_float32_bundle: Path) -> Iterator[OpenAI]:
    """In float32, where an answer does not depend on what is cached."""
    command = [
        sys.executable,
        "-m",
        "pelton.scripts.cli",
        "serve",
        str(smollm2_float32_bundle),
        "--port",
        "0",
    ]
    command += ["--served-model-name", MODEL, "--chat-template", str(TEMPLATE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announcement = process.stdout.readline().split()
            assert announcement[:2] == ["serving", MODEL]
            with OpenAI(base_url=announcement[-1], api_key="none", max_retries=0, timeout=120) as client:
                yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def ask(client: OpenAI, *messages: Any, **options: Any) -> tuple[Any, str]:
    """The message and its finish reason, which must be the same when streamed (calls' ids aside)."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages or [QUESTION],
        "temperature": 0,
        "max_tokens": 80,
    }
    body |= {"tools": TOOLS, **options}
    whole = client.chat.completions.create(**body).choices[0]
    content: str | None = None
    calls: list[dict[str, str]] = []
    reasons = []
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        reasons.append(choice.finish_reason)
        if choice.delta.content is not None:
            content = (content or "") + choice.delta.content
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.function.name is not None:
                assert call.id
                assert call.index == len(calls)
                calls.append({"name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
    assert content == whole.message.content
    assert calls == [call.function.to_dict() for call in whole.message.tool_calls or ()]
    assert reasons == [None] * (len(reasons) - 1) + [whole.finish_reason]
    return whole.message, whole.finish_reason


def check_calls(message: Any) -> list[str]:
    """The names of the calls, whose arguments must satisfy the schemas."""
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in message.tool_calls]


def test_required(client: OpenAI) -> None:
    message, reason = ask(client, tool_choice="required", parallel_tool_calls=False)
    assert len(check_calls(message)) == 1
    assert message.content is None
    assert reason == "tool_calls"


def test_named(client: OpenAI) -> None:
    message, reason = ask(client, tool_choice=NAMED)
    assert check_calls(message) == ["get_weather"]
    assert (message.content, reason) == (None, "stop")


def test_sampled_calls_satisfy_the_schemas(client: OpenAI) -> None:
    for seed in range(3):
        options = {"temperature": 1.5, "seed": seed, "max_tokens": 300, "parallel_tool_calls": False}
        message, reason = ask(client, tool_choice="required", **options)
        assert reason == "tool_calls"
        check_calls(message)


def test_auto_leaves_the_model_free(client: OpenAI) -> None:
    message, reason = ask(client, max_tokens=24)
    assert message.content
    assert message.tool_calls is None
    assert reason in ("stop", "length")


def turn(city: str) -> list[dict[str, Any]]:
    """A question, and the call that it led to."""
    arguments = json.dumps({"city": city, "unit": "celsius"})
    call = {
        "id": f"call_{city}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    return [
        {"role": "user", "content": f"What is the weather in {city}, in celsius?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]


def test_auto_reads_the_calls_that_the_model_makes(client: OpenAI) -> None:
    """So small a model calls once it has seen how."""
    message, reason = ask(client, *turn("Rome"), *turn("Oslo"), QUESTION)
    assert reason == "tool_calls"
    assert check_calls(message) == ["get_weather"]
    assert message.content is None
    assert json.loads(message.tool_calls[0].function.arguments)["city"] == "Paris"


def test_a_conversation_of_call_result_and_answer(client: OpenAI) -> None:
    earlier = [
        *turn("Rome"),
        {"role": "tool", "tool_call_id": "call_Rome", "content": '{"sky": "sunny", "degrees": 21}'},
        {"role": "assistant", "content": "It is sunny in Rome, at 21 degrees."},
        QUESTION,
    ]
    called, reason = ask(client, *earlier, tool_choice="required", parallel_tool_calls=False)
    assert reason == "tool_calls"
    (call,) = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "snow", "degrees": -3}'}
    answer, reason = ask(client, *earlier, called.to_dict(), result)
    assert reason == "stop"
    assert "snow" in answer.content
    assert answer.tool_calls is None


def test_parallel_requests(client: OpenAI) -> None:
    def one(number: int) -> list[str]:
        question = {"role": "user", "content": f"What is the weather in city number {number}?"}
        choice: Any = "required" if number % 2 else NAMED
        message, _ = ask(client, question, tool_choice=choice, parallel_tool_calls=False)
        return check_calls(message)

    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(one, range(8)))
    assert all(len(each) == 1 for each in names)
    assert names[::2] == [["get_weather"]] * 4


def test_response_format(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    for options in ({"tools": None}, {"tool_choice": "none"}):
        message, reason = ask(client, response_format=form, **options)
        jsonschema.validate(json.loads(message.content), PLACE)
        assert (message.tool_calls, reason) == (None, "stop")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"


def test_so_01_a_bad_schema_is_the_clients_error(client: OpenAI) -> None:
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nope"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[{"type": "function", "function": bad}], tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters/properties/a/type"
    assert ask(client, max_tokens=4)
