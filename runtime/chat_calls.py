"""Calls of tools in the messages of a conversation, as clients send back what they were answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError
from .protocol_json import parse_json

MAX_NUM_CALLS = 256


def read_calls(calls: object, field: str) -> list[dict[str, Any]]:
    """Checked copies of a message's `tool_calls` whose arguments are objects, as templates want them.

    Arguments are the JSON text of an object, or an object. Raises `RequestError` naming the field, such as
    `messages[1].tool_calls[0].function.arguments`.
    """
    if not isinstance(calls, list):
        raise RequestError(f"{field} must be a list", field=field)
    if len(calls) > MAX_NUM_CALLS:
        raise RequestError(f"{field}: at most {MAX_NUM_CALLS} items", field=field)
    return [_read_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def arguments_as_text(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls for a template that wants the arguments as JSON text."""
    return [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]


def _read_call(call: object, field: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{field} must be an object with an id, the type and a function", field=field)
    for name in call:
        if name not in ("id", "type", "function", "index"):  # the index is of streamed answers
            shown = f"{field}.{str(name)[:64]}"
            raise RequestError(f"{shown} is not supported", field=shown, code="unsupported_parameter")
    if call.get("type", "function") != "function":
        raise RequestError(f'{field}.type must be "function"', field=f"{field}.type")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{field}.id must be a string", field=f"{field}.id")
    read: dict[str, Any] = {
        "type": "function",
        "function": _read_function(call["function"], f"{field}.function"),
    }
    return read if call_id is None else {"id": call_id, **read}


def _read_function(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    for key in function:
        if key not in ("name", "arguments"):
            shown = f"{field}.{str(key)[:64]}"
            raise RequestError(f"{shown} is not supported", field=shown, code="unsupported_parameter")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{field}.name must be a string", field=f"{field}.name")
    return {"name": name, "arguments": _read_arguments(function.get("arguments"), f"{field}.arguments")}


def _read_arguments(arguments: object, field: str) -> dict[str, Any]:
    reason = "it is no object"
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments.encode())
        except (RequestError, UnicodeEncodeError) as error:
            reason = str(error).removeprefix("the body cannot be read as JSON: ")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{field} must be the JSON text of an object: {reason}", field=field)
    return dict(arguments)
