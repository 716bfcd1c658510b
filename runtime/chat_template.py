"""Chat templates: the Jinja programs that write a conversation as text.

Templates are rendered as `transformers` renders them (its `utils/chat_template_utils.py`): the same
environment, the same helper functions, the same reading of messages. What transformers drops silently, such
as tools for a template that has no place for them, is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import BundleError, RequestError
from .chat_calls import arguments_as_text, read_calls

Message = dict[str, Any]

# Names under which a message carries its reasoning; templates read the first, gpt-oss's the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def replacement_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """A user's template in place of a model's. Raises `BundleError` where it is none."""
    template = ChatTemplate({"default": source}, special_tokens)
    if not template.has_variable("messages"):
        raise BundleError("chat template: the source does not read `messages`, so it is no chat template")
    return template


class ChatTemplate:
    """The chat templates of one model. Immutable, so it may be used from many threads.

    `sources` maps names to Jinja sources: `default`, and `tool_use` for chats with tools where a model has
    one. `special_tokens` are the variables `bos_token`, `eos_token`, ... that every template can read. Raises
    `BundleError` for a source that is no template.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        if not sources:
            raise ValueError("a chat template needs a source")
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, frozenset[str]] = {}
        self.literal_text = ""
        for name, source in sources.items():
            try:
                tree = environment.parse(source)
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise BundleError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
            self._variables[name] = frozenset(jinja2.meta.find_undeclared_variables(tree))
            self.literal_text += "\0".join(_literals(tree)) + "\0"
        self._reads_text, self._reads_parts = self._probe_contents()
        self._reads_argument_text, self._drops_calls = self._probe_calls()

    def has_variable(self, name: str) -> bool:
        """Whether any of the templates reads the variable `name`."""
        return any(name in variables for variables in self._variables.values())

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Checked copies of `messages` in the form that the template reads.

        Keys that are None are left out. Where the template wants strings, a list of text parts is joined by
        newlines; where it wants lists of parts, a string becomes one. A message needs a role and, unless it
        calls tools, a content, which is None then. Arguments of calls, JSON text or an object, become what the
        template wants of the two. Raises `RequestError` naming the field, such as `messages[0].content`.
        """
        if not messages:
            raise _bad("messages: the conversation is empty; send at least one message")
        return [self._prepare_message(message, index) for index, message in enumerate(messages)]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of prepared `messages`.

        Raises `RequestError`: `messages` when the template refuses the conversation, `tools` or
        `chat_template_kwargs` when the template has no place for what is given, `continue_final_message` when
        the final message cannot be continued.
        """
        kwargs = dict(template_kwargs or {})
        template = self._choose(tools, kwargs)
        chat = [_alias_reasoning(message) for message in messages]
        if not continue_final_message:
            return self._call(template, chat, tools, add_generation_prompt, kwargs)
        if add_generation_prompt:
            raise _cannot_continue("it excludes add_generation_prompt; set one of them to false")
        final_text = _tag_final_message(chat)
        text = self._call(template, chat, tools, add_generation_prompt, kwargs)
        return _cut_at_tag(text, final_text)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise _bad(f"messages: the model has no default chat template, only: {known}")
        variables = self._variables[name]
        if tools and "tools" not in variables:
            raise RequestError(
                "tools: the model's chat template has no place for tools",
                field="tools",
                code="unsupported_parameter",
            )
        for key in kwargs:
            if key in _OWN_VARIABLES or key in self._special_tokens or key not in variables:
                own = variables - _OWN_VARIABLES - self._special_tokens.keys() - _globals().keys()
                raise RequestError(
                    f"chat_template_kwargs: the model's chat template has no variable {key[:64]!r}; "
                    f"it has: {', '.join(sorted(own)) or 'none'}",
                    field="chat_template_kwargs",
                    code="unsupported_parameter",
                )
        return name

    def _call(
        self,
        name: str,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": chat,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._templates[name].render(variables)
        except Exception as error:  # templates are programs of the model's author, run on the client's data
            reason = str(error) or type(error).__name__
            raise _bad(f"messages: the model's chat template refused the conversation: {reason}") from error

    def _probe_contents(self) -> tuple[bool, bool]:
        """Whether the template shows a content that is a string, and one that is a list of text parts."""

        def shows(content: object) -> bool:
            try:
                name = "default" if "default" in self._templates else next(iter(self._templates))
                text = self._call(name, [{"role": "user", "content": content}], None, False, {})
            except RequestError:
                return False
            return "PROBE" in text and "'text'" not in text and '"text"' not in text

        return shows("PROBE"), shows([{"type": "text", "text": "PROBE"}])

    def _probe_calls(self) -> tuple[bool, bool]:
        """Whether the template wants the arguments of calls as JSON text (it cannot write an object, or not as JSON),
        and whether it is known to leave calls out.
        """
        name = "tool_use" if "tool_use" in self._templates else next(iter(self._templates))
        tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}

        def write(arguments: object, tools: list[dict[str, Any]] | None, content: str | None) -> str | None:
            function = {"name": "probe", "arguments": arguments}
            call = {"id": "probe1234", "type": "function", "function": function}
            chat: list[Message] = [
                {"role": "user", "content": "PROBE"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
            ]
            try:
                return self._call(name, chat, tools, False, {})
            except RequestError:
                return None

        objects, texts = (
            [write(arguments, tools, content) for tools in (None, [tool]) for content in (None, "")]
            for arguments in ({"needle": "hay"}, '{"needle": "hay"}')
        )
        if any(text and "needle" in text and "'needle'" not in text for text in objects):
            return False, False
        wants_text = any(text and "needle" in text for text in texts)
        is_refused = all(text is None for text in objects + texts)
        return wants_text, not wants_text and not is_refused

    def _prepare_message(self, message: Mapping[str, Any], index: int) -> Message:
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{field} must be an object with a role and a content", field=field)
        prepared = {key: value for key, value in message.items() if value is not None}
        if not isinstance(prepared.get("role"), str):
            raise RequestError(f"{field}.role must be a string", field=f"{field}.role")
        content = prepared.get("content")
        if content is None and not prepared.get("tool_calls"):
            raise RequestError(
                f"{field}.content is required", field=f"{field}.content", code="missing_required_parameter"
            )
        if prepared.get("tool_calls"):
            calls = read_calls(prepared["tool_calls"], f"{field}.tool_calls")
            if self._drops_calls:
                raise RequestError(
                    f"{field}.tool_calls: the model's chat template has no place for calls of tools",
                    field=f"{field}.tool_calls",
                    code="unsupported_parameter",
                )
            prepared["tool_calls"] = arguments_as_text(calls) if self._reads_argument_text else calls
            prepared.setdefault("content", None)  # templates ask whether it is none
        if isinstance(content, str):
            if self._reads_parts and not self._reads_text:
                prepared["content"] = [{"type": "text", "text": content}]
        elif content is not None:
            parts = _text_parts(content, f"{field}.content")
            prepared["content"] = parts if self._reads_parts else "\n".join(part["text"] for part in parts)
        return prepared


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here its body is simply written."""

    tags = {"generation"}  # noqa: RUF012 (the attribute's type is jinja2's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(_globals())
    return environment


def _globals() -> dict[str, Callable[..., Any]]:
    return {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _literals(tree: jinja2.nodes.Template) -> set[str]:
    """The strings that the template itself can write or compare with."""
    texts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    return texts | {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}


def _alias_reasoning(message: Message) -> Message:
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _text_parts(content: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise RequestError(f"{field} must be a string or a list of text parts", field=field)
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{field}[{number}] must be {{"type": "text", "text": ...}}; other parts are not supported',
                field=f"{field}[{number}]",
            )
    return [dict(part) for part in content]


def _tag_final_message(chat: list[Message]) -> str:
    """Mark the end of the final message's text, to be found again in what is rendered; returns that text."""
    final = chat[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_TAG
        return content
    if not content:
        raise _cannot_continue("the final message has no content")
    parts = [dict(part) for part in content]
    text: str = parts[-1]["text"]
    parts[-1]["text"] = text + _CONTINUE_TAG
    final["content"] = parts
    return text


def _cut_at_tag(text: str, final_text: str) -> str:
    if final_text.strip() not in text or _CONTINUE_TAG.strip() not in text:
        raise _cannot_continue("the model's chat template does not write the final message unchanged")
    end = text.rindex(_CONTINUE_TAG.strip())
    if text[end:].startswith(_CONTINUE_TAG):
        return text[:end]
    # The template trimmed the message, and the tag's own trailing space with it.
    return text[:end].rstrip()


def _bad(message: str) -> RequestError:
    return RequestError(message, field="messages")


def _cannot_continue(reason: str) -> RequestError:
    return RequestError(f"continue_final_message: {reason}", field="continue_final_message")
