"""The fields of a request body: names, JSON types, defaults.

A field that is null counts as absent. A field of the OpenAI API that cannot change the tokens is accepted and
ignored; every other name that is not declared here is an error that names it, so that nothing that a client
asks for is dropped silently. Defaults are those of the OpenAI API (temperature 1, top_p 1), not the model's
generation_config. Ranges are checked where the value is used, by `SamplingParams` or `protocol_call`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import RequestError

MAX_NUM_STOP_TOKEN_IDS = 1024
MAX_NUM_MESSAGES = 4096
MAX_CACHE_SALT_CHARS = 1024

_NOT_SUPPORTED = frozenset(
    {
        "audio",
        "documents",
        "function_call",
        "functions",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "reasoning_effort",
        "suffix",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
    }
)
"""Fields of the OpenAI API or of vLLM that Pelton knows and cannot serve: they get a message of their own."""


# Of 64 bits, signed or not: none of these is a field that needs more.
Int = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]


_TYPE_REASONS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "string_type": "must be a string",
}
"""What pydantic's errors of a wrong type say in the words of JSON."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; Pelton sends none


class Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: Int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Any = None
    seed: Int | None = None
    stop: Any = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None

    top_k: Int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: Annotated[list[Int], Field(max_length=MAX_NUM_STOP_TOKEN_IDS, fail_fast=True)] = []
    include_stop_str_in_output: bool = False
    min_tokens: Int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] = ""
    num_draft_tokens: Int | None = None

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Without effect on the tokens.
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: Any
    echo: bool = False
    logprobs: Int | None = None
    best_of: Int | None = None
    add_special_tokens: bool = True


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_NUM_MESSAGES, fail_fast=True)]
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(kind: type[AnyBody], members: Mapping[str, object]) -> AnyBody:
    """The typed body. Raises `RequestError` naming a field that is unknown, missing or of a wrong type."""
    present = {name: value for name, value in members.items() if value is not None}
    for name in present:
        if name not in kind.model_fields:
            raise _refusal(name)
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        raise RequestError(f"{field} is required", field=field, code="missing_required_parameter")
    kind_of_error = first["type"]
    if kind_of_error == "extra_forbidden":
        raise _refusal(field)
    if kind_of_error in _TYPE_REASONS:
        raise RequestError(f"{field} {_TYPE_REASONS[kind_of_error]}", field=field, code="invalid_type")
    if kind_of_error == "too_long":
        raise RequestError(f"{field}: at most {first['ctx']['max_length']} items", field=field)
    # Pydantic's messages read "Input should be ...".
    reason = first["msg"][:1].lower() + first["msg"][1:]
    raise RequestError(f"{field}: {reason}", field=field)


def _refusal(name: str) -> RequestError:
    if name in _NOT_SUPPORTED:
        return RequestError(f"{name} is not supported", field=name, code="unsupported_parameter")
    shown = name[:64]
    return RequestError(f"unknown field {shown!r}; leave it out", field=shown, code="unknown_parameter")
