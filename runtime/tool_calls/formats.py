"""The formats in which families of models write calls: how each is read, and how one is enforced.

hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen 2.5 and 3, Granite 4
llama3_json   {"name": ..., "parameters": {...}}; {...}                    Llama 3; also after <|python_tag|>
mistral       [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]        Mistral up to tokenizer v7
mistral_v11   [TOOL_CALLS]name[ARGS]{...}                                  Mistral since v11, also with [CALL_ID]
deepseek_v3   a block of calls, each with its type and fenced JSON         DeepSeek V3 and R1
deepseek_v31  a block of calls, name and JSON alone                        DeepSeek V3.1
granite       <|tool_call|>[{"name": ..., "arguments": {...}}, ...]        Granite 3
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..structured import StructuredOutput, Tag
from .reader import CallReader, Malformed, Reading
from .tools import Tool, nested

_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_BEGIN, _MISTRAL_ID, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME = re.compile(r"[\w.\-]*", re.ASCII)
_GRANITE_BEGIN = "<|tool_call|>"
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


class HermesReader(CallReader):
    """One call, or a list of calls. The end tag may be missing at the end of the answer."""

    markers = (_HERMES_BEGIN,)
    closers = (_HERMES_END,)

    def _read_block(self) -> Reading[None]:
        yield from self._skip_space()
        if (yield from self._peek()) == "[":
            yield from self._call_list()
        else:
            yield from self._call_object()
        yield from self._skip_space()
        if (yield from self._more()):
            yield from self._expect(_HERMES_END)
        self._settle()


class LlamaReader(CallReader):
    """Without `<|python_tag|>` calls stand at the start of the answer, and only of tools that the model was given:
    any other object is an answer in JSON.
    """

    markers = (_PYTHON_TAG,)

    def _read_start(self) -> Reading[None]:
        yield from self._skip_space()
        yield from self._calls(must_be_known=True)

    def _read_block(self) -> Reading[None]:
        yield from self._skip_space()
        yield from self._calls(must_be_known=False)

    def _calls(self, *, must_be_known: bool) -> Reading[None]:
        while True:
            yield from self._call_object(must_be_known=must_be_known)
            yield from self._skip_space()
            if not (yield from self._accept(";")):
                raise Malformed  # what follows the calls is content
            yield from self._skip_space()


class MistralReader(CallReader):
    """Both generations: a list of objects, or a name and its arguments."""

    markers = (_MISTRAL_BEGIN,)

    def _read_block(self) -> Reading[None]:
        yield from self._skip_space()
        char = yield from self._peek()
        if char == "[":
            yield from self._call_list()
        elif char == "{":
            yield from self._call_object()
        else:
            yield from self._named_call()

    def _named_call(self) -> Reading[None]:
        begin = self._position
        yield from self._skip(_MISTRAL_NAME)
        name = self._buffer[begin : self._position]
        yield from self._skip_space()
        call_id = None
        if (yield from self._accept(_MISTRAL_ID)):
            yield from self._skip_space()
            begin = self._position
            yield from self._skip(_MISTRAL_NAME)
            call_id = self._buffer[begin : self._position] or None
            yield from self._skip_space()
        yield from self._accept(_MISTRAL_ARGUMENTS)
        yield from self._skip_space()
        yield from self._stream_arguments(name, call_id)


class GraniteReader(CallReader):
    """A list of calls, or one call; an end tag is read where there is one."""

    markers = (_GRANITE_BEGIN, _HERMES_BEGIN)
    closers = (_HERMES_END,)

    def _read_block(self) -> Reading[None]:
        yield from self._skip_space()
        if (yield from self._peek()) == "[":
            yield from self._call_list()
        else:
            yield from self._call_object()
        yield from self._skip_space()
        if (yield from self._accept(_HERMES_END)):
            self._settle()
        else:
            self._position = 0


class DeepSeekReader(CallReader):
    """Both generations: with the call's type and fenced arguments, or with neither."""

    markers = (_CALLS_BEGIN, _CALL_BEGIN)
    closers = (_CALL_END, _CALLS_END)

    def _read_block(self) -> Reading[None]:
        if self._marker == _CALLS_BEGIN:
            yield from self._skip_space()
            yield from self._expect(_CALL_BEGIN)
        while True:
            yield from self._call()
            yield from self._skip_space()
            if (yield from self._accept(_CALLS_END)):
                self._settle()
                return
            yield from self._expect(_CALL_BEGIN)

    def _call(self) -> Reading[None]:
        name = yield from self._until(_CALL_SEP)
        yield from self._skip_space()
        is_fenced = (yield from self._peek()) != "{"
        if is_fenced:
            if name.strip() != "function":
                raise Malformed
            name = yield from self._until("\n")
            yield from self._expect(_FENCE)
            yield from self._accept("json")
            yield from self._skip_space()
        yield from self._stream_arguments(name.strip())
        yield from self._skip_space()
        if is_fenced:
            yield from self._accept(_FENCE)
            yield from self._skip_space()
        if (yield from self._more()):
            yield from self._expect(_CALL_END)
        self._settle()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    `literals` are the parts of the format that may be special tokens of a tokenizer: their text must reach the
    reader. `id_chars` is the length of the ids that its templates take, without a prefix (None: any). `enforce`
    gives the form of an answer that is calls of `tools` and nothing else, one of them or, with the second
    argument, one or more.
    """

    name: str
    reader: type[CallReader]
    literals: tuple[str, ...]
    enforce: Callable[[Sequence[Tool], bool], StructuredOutput]
    id_chars: int | None = None


def _tagged(
    make: Callable[[Tool], Tag], separator: str = ""
) -> Callable[[Sequence[Tool], bool], StructuredOutput]:
    def enforce(tools: Sequence[Tool], is_repeated: bool) -> StructuredOutput:
        return StructuredOutput(
            kind="tagged",
            tags=tuple(make(tool) for tool in tools),
            separator=separator,
            is_repeated=is_repeated,
            field="tools",
        )

    return enforce


def _hermes_tag(tool: Tool) -> Tag:
    head = f'{{"name": {_quoted(tool.name)}, "arguments": '
    return tool.tag(f"{_HERMES_BEGIN}\n{head}", f"}}\n{_HERMES_END}")


def _llama_tag(tool: Tool) -> Tag:
    return tool.tag(f'{{"name": {_quoted(tool.name)}, "parameters": ', "}")


def _mistral_tag(tool: Tool) -> Tag:
    return tool.tag(f"{_MISTRAL_BEGIN}{tool.name}{_MISTRAL_ARGUMENTS}", "")


def _deepseek_v3_tag(tool: Tool) -> Tag:
    begin = f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_CALL_SEP}{tool.name}\n{_FENCE}json\n"
    return tool.tag(begin, f"\n{_FENCE}{_CALL_END}{_CALLS_END}")


def _deepseek_v31_tag(tool: Tool) -> Tag:
    begin = f"{_CALLS_BEGIN}{_CALL_BEGIN}{tool.name}{_CALL_SEP}"
    return tool.tag(begin, f"{_CALL_END}{_CALLS_END}")


def _listed(begin: str) -> Callable[[Sequence[Tool], bool], StructuredOutput]:
    """All calls in one list, which is one JSON value."""

    def enforce(tools: Sequence[Tool], is_repeated: bool) -> StructuredOutput:
        pointers = [f"/items/anyOf/{index}/properties/arguments" for index in range(len(tools))]
        items = [_call_schema(tool, pointer) for tool, pointer in zip(tools, pointers, strict=True)]
        schema: dict[str, Any] = {"type": "array", "items": {"anyOf": items}, "minItems": 1}
        if not is_repeated:
            schema["maxItems"] = 1
        places = tuple((pointer, tool.field) for tool, pointer in zip(tools, pointers, strict=True))
        tag = Tag(begin, json.dumps(schema, ensure_ascii=False), "", places)
        return StructuredOutput(kind="tagged", tags=(tag,), field="tools")

    return enforce


def _call_schema(tool: Tool, pointer: str) -> dict[str, Any]:
    arguments = nested(tool.schema, pointer)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


_DEEPSEEK = ToolFormat(
    "deepseek_v3",
    DeepSeekReader,
    (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_SEP, _CALL_END),
    _tagged(_deepseek_v3_tag),
)
_MISTRAL = ToolFormat(
    "mistral",
    MistralReader,
    (_MISTRAL_BEGIN, _MISTRAL_ID, _MISTRAL_ARGUMENTS),
    _listed(f"{_MISTRAL_BEGIN} "),
    id_chars=9,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            ToolFormat("hermes", HermesReader, (_HERMES_BEGIN, _HERMES_END), _tagged(_hermes_tag, "\n")),
            ToolFormat("llama3_json", LlamaReader, (_PYTHON_TAG,), _tagged(_llama_tag, "; ")),
            _MISTRAL,
            replace(_MISTRAL, name="mistral_v11", enforce=_tagged(_mistral_tag)),
            _DEEPSEEK,
            replace(_DEEPSEEK, name="deepseek_v31", enforce=_tagged(_deepseek_v31_tag)),
            ToolFormat(
                "granite",
                GraniteReader,
                (_GRANITE_BEGIN, _HERMES_BEGIN, _HERMES_END),
                _listed(_GRANITE_BEGIN),
            ),
        )
    }
)
"""By the names that `--tool-call-parser` takes."""
