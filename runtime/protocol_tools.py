"""Tools in a chat call: what the fields ask for, and how the answer is then read.

- Tools go to the chat template whatever the choice is, so that a conversation keeps its cached prefix when only
  `tool_choice` changes. A template without a place for tools is an error, but with `tool_choice` none, where it is
  the same as no tools.
- `auto` (the default) leaves the model free. `required` and a named function hold the whole answer to the format of
  calls, `required` to one or more of any tools; a prompt that ends inside reasoning gets the tag that ends it.
- `parallel_tool_calls` false: one call where calls are enforced; with `auto` those after the first are dropped.
- `strict` changes nothing: enforced calls keep to the schemas of all functions, and free ones to none.
- A `stop` beside enforced calls is refused: it could cut the arguments. With `auto` a call that it cuts does not give
  the finish reason `tool_calls`.
- An answer of another form (`response_format`, ...) excludes calls: it needs `tool_choice` none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from ..errors import RequestError
from ..features import unsupported_reason
from .structured import StructuredOutput
from .tool_calls import AnswerParser, ReasoningFormat, Tool, ToolFormat

if TYPE_CHECKING:
    from .chat_template import ChatTemplate
    from .request import SamplingParams
    from .tokenizer import Tokenizer

MAX_NUM_TOOLS = 128
MAX_DESCRIPTION_CHARS = 65536

_NAME = re.compile(r"[a-zA-Z0-9_\-.]{1,64}")
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
_ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_CHARS = 24
_NUM_TAIL_TOKENS = 16  # in which a tag and white space at the end of a prompt lie

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a call as the template gets them (None: none), and what the answer may do with them."""

    shown: tuple[dict[str, Any], ...] | None = None
    tools: tuple[Tool, ...] = ()
    choice: Choice = "none"
    is_parallel: bool = True

    @property
    def is_enforced(self) -> bool:
        return self.choice in ("required", "named")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of a call are read. Without formats their text is the content.

    `max_calls` is how many calls of an answer count (None: all). `is_named`: the caller chose the function, and the
    finish reason is then `stop`, as OpenAI's is.
    """

    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    tool_names: tuple[str, ...] = ()
    is_in_reasoning: bool = False
    max_calls: int | None = None
    is_named: bool = False

    @property
    def is_plain(self) -> bool:
        return self.tool_format is None and self.reasoning_format is None

    @property
    def literals(self) -> tuple[str, ...]:
        """Texts that must not be hidden as special tokens."""
        formats = (self.tool_format, self.reasoning_format)
        return tuple(text for each in formats if each is not None for text in each.literals)

    def parser(self) -> AnswerParser:
        return AnswerParser(
            self.tool_format,
            self.reasoning_format,
            tool_names=self.tool_names,
            is_in_reasoning=self.is_in_reasoning,
        )

    def call_id(self, call_id: str, choice: int, number: int) -> str:
        """The id of a call in an answer: a function of its place, so that equal jobs give equal records."""
        digest = int.from_bytes(
            blake2b(f"{call_id} {choice} {number}".encode(), digest_size=24).digest(), "little"
        )
        size = self.tool_format.id_chars if self.tool_format is not None else None
        digits = "".join(_ID_DIGITS[digest // 62**place % 62] for place in range(size or _ID_CHARS))
        return digits if size else f"call_{digits}"


def read_tool_use(
    tools: object, tool_choice: object, parallel_tool_calls: bool | None, template: ChatTemplate | None
) -> ToolUse:
    """The fields of these names, checked. Raises `RequestError` naming the field."""
    if tools is None:
        if tool_choice not in (None, "none"):
            raise RequestError("tool_choice needs tools", field="tool_choice")
        if parallel_tool_calls is not None:
            raise RequestError("parallel_tool_calls needs tools", field="parallel_tool_calls")
        return ToolUse()
    shown = _read_tools(tools)
    read = tuple(
        Tool(
            each["function"]["name"],
            each["function"].get("parameters"),
            f"tools[{index}].function.parameters",
        )
        for index, each in enumerate(shown)
    )
    choice, name = _read_choice(tool_choice, [tool.name for tool in read])
    is_parallel = parallel_tool_calls is not False
    if template is not None and not template.has_variable("tools"):
        if choice != "none":
            raise RequestError(
                "tools: the model's chat template has no place for tools; load the model with another one "
                "(--chat-template FILE)",
                field="tools",
                code="unsupported_parameter",
            )
        return ToolUse()
    for each in shown:
        each["function"].pop("strict", None)  # nothing for the model
    return ToolUse(shown, tuple(tool for tool in read if name in (None, tool.name)), choice, is_parallel)


def answer_format(
    use: ToolUse,
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
    *,
    is_held: bool,
    is_in_reasoning: bool,
) -> AnswerFormat:
    """How answers to a call with these tools are read. One that `is_held` to a form has no reasoning."""
    return AnswerFormat(
        tool_format=None if use.choice == "none" else tool_format,
        reasoning_format=None if is_held else reasoning_format,
        tool_names=tuple(tool.name for tool in use.tools),
        is_in_reasoning=is_in_reasoning and not is_held,
        max_calls=None if use.is_parallel else 1,
        is_named=use.choice == "named",
    )


def held_form(
    use: ToolUse, tool_format: ToolFormat | None, params: SamplingParams
) -> StructuredOutput | None:
    """The form that an answer must have: the one that is asked for, or that of calls, or None if it is free."""
    asked = params.structured_output
    if use.choice == "none" or tool_format is None:
        return asked
    if asked is not None:
        kind = "tool calls (enforced)" if use.is_enforced else "tool calls (auto)"
        reason = unsupported_reason("structured output", kind)
        raise RequestError(
            f"{asked.field}: {reason}; set tool_choice to none",
            field=asked.field,
            code="unsupported_value",
        )
    if not use.is_enforced:
        return None
    if params.stop:
        raise RequestError(
            "stop: it could end an enforced call within its arguments; leave it out, or set tool_choice to auto",
            field="stop",
            code="unsupported_value",
        )
    form = tool_format.enforce(use.tools, use.choice == "required" and use.is_parallel)
    return replace(form, field="tool_choice") if use.choice == "named" else form


def check_tool_format(tool_format: ToolFormat | None, use: ToolUse) -> None:
    """Raise `RequestError` if calls are asked for and nothing is known to read them."""
    if use.choice != "none" and tool_format is None:
        raise RequestError(
            "tools: it is not known how this model writes calls; start the server with --tool-call-parser NAME, load "
            "the model with a chat template that shows it (--chat-template FILE), or set tool_choice to none",
            field="tools",
            code="unsupported_parameter",
        )


def num_tool_chars(use: ToolUse) -> int:
    """Characters of what the template gets of the tools."""
    return 0 if use.shown is None else len(json.dumps(use.shown, ensure_ascii=False))


def ends_in_reasoning(
    reasoning_format: ReasoningFormat,
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    continued: Mapping[str, Any] | None,
) -> bool:
    """Whether a prompt leaves reasoning open: it ends with the opening tag, or continues a message inside one."""
    tail = tokenizer.decode(token_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(reasoning_format.begin):
        return True
    content = None if continued is None else continued.get("content")
    if not isinstance(content, str):
        return False
    return content.rfind(reasoning_format.begin) > content.rfind(reasoning_format.end)


def _read_tools(tools: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(tools, list) or not tools:
        raise RequestError("tools must be a list of at least one tool", field="tools")
    if len(tools) > MAX_NUM_TOOLS:
        raise RequestError(f"tools: at most {MAX_NUM_TOOLS} items", field="tools")
    shown = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, tool in enumerate(shown):
        name = tool["function"]["name"]
        if name in names:
            field = f"tools[{index}].function.name"
            raise RequestError(f"{field}: there are two tools named {name!r}", field=field)
        names.add(name)
    return shown


def _read_tool(tool: object, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{field} must be an object", field=field)
    if tool.get("type") != "function":
        shown = f"{field}.type"
        raise RequestError(f'{shown} must be "function"', field=shown, code="unsupported_value")
    _refuse_other_keys(tool, {"type", "function"}, field)
    function = tool.get("function")
    field += ".function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{field} must be an object", field=field)
    _refuse_other_keys(function, _FUNCTION_KEYS, field)
    present = {key: value for key, value in function.items() if value is not None}
    name = present.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{field}.name must be 1 to 64 characters out of a-z, A-Z, 0-9, '_', '-' and '.'",
            field=f"{field}.name",
        )
    if not isinstance(present.get("parameters", {}), Mapping):
        raise RequestError(f"{field}.parameters must be a JSON schema", field=f"{field}.parameters")
    kind = present.get("parameters", {}).get("type", "object")
    if kind != "object":
        shown = f"{field}.parameters.type"
        raise RequestError(f'{shown} must be "object": arguments are given by name', field=shown)
    description = present.get("description", "")
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS:
        shown = f"{field}.description"
        raise RequestError(
            f"{shown} must be a string of at most {MAX_DESCRIPTION_CHARS} characters", field=shown
        )
    if not isinstance(present.get("strict", False), bool):
        raise RequestError(
            f"{field}.strict must be true or false", field=f"{field}.strict", code="invalid_type"
        )
    return {"type": "function", "function": present}


def _read_choice(tool_choice: object, names: Sequence[str]) -> tuple[Choice, str | None]:
    """The kind of choice, and the name of the function that it names."""
    match tool_choice:
        case None:
            return "auto", None
        case "none" | "auto" | "required":
            return tool_choice, None
        case {"type": "function", "function": {"name": str(name), **others}, **more} if (
            not others and not more
        ):
            if name not in names:
                raise RequestError(f"tool_choice: no tool is named {name[:64]!r}", field="tool_choice")
            return "named", name
    raise RequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
        field="tool_choice",
        code="unsupported_value",
    )


def _refuse_other_keys(value: Mapping[str, Any], known: set[str] | frozenset[str], field: str) -> None:
    for name in value:
        if name not in known:
            shown = f"{field}.{name[:64]}"
            raise RequestError(f"{shown} is not supported", field=shown, code="unsupported_parameter")
