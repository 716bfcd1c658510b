"""Chat templates: rendering, the forms of contents, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pelton.errors import BundleError, RequestError
from pelton.runtime.chat_template import ChatTemplate
from support.vocabularies import CHATML

USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
OF_PARTS = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};"
    "{% endfor %}"
)
OF_CALLS = "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
OF_BOTH = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"
)


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    options.setdefault("add_generation_prompt", False)
    return template.render(template.prepare(messages), **options)


def refusal(source: str, *messages: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(source, *messages, **options)
    return caught.value


def test_a_chat_with_and_without_a_new_turn() -> None:
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert render(CHATML, USER) == turn
    assert render(CHATML, USER, add_generation_prompt=True) == turn + "<|im_start|>assistant\n"


def test_blocks_are_trimmed_and_loops_have_break_and_continue() -> None:
    source = """{{ bos_token }}
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
{{ m.content }}
        {% break %}
    {% endfor %}"""
    assert render(source, {"role": "system", "content": "no"}, USER, USER) == "<s>\nhi\n"


def test_generation_tags_are_accepted() -> None:
    source = "{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}{{ x }}"
    assert render(source, USER) == "hi"


def test_helpers_of_transformers_templates() -> None:
    assert render("{{ {'é': '<a>'}|tojson }}", USER) == '{"é": "<a>"}'
    assert render("{{ [1]|tojson(indent=2) }}", USER) == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", USER)) == 10
    error = refusal("{{ raise_exception('roles must alternate') }}", USER)
    assert error.field == "messages"
    assert "roles must alternate" in str(error)


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (CHATML, PARTS, "<|im_start|>user\none\ntwo<|im_end|>\n"),
        (OF_PARTS, PARTS, "user:onetwo;"),
        (OF_PARTS, "hi", "user:hi;"),
        (OF_BOTH, PARTS, "user:onetwo;"),
        (OF_BOTH, "hi", "user:hi;"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", PARTS, "one\ntwo"),
    ],
)
def test_contents_take_the_form_that_the_template_reads(source: str, content: Any, text: str) -> None:
    assert render(source, {"role": "user", "content": content}) == text


def test_none_values_are_missing_and_reasoning_has_one_name() -> None:
    source = "{{ 'name' in messages[0] }} {{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    message = {**USER, "name": None, "reasoning": "because"}
    assert render(source, message) == "False because because"


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}
    render(OF_PARTS, message, continue_final_message=True)
    assert message == {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (CHATML, "so it ", "<|im_start|>user\nso it "),
        ("{% for m in messages %}{{ m.content|trim }}<end>{% endfor %}", "so it ", "so it"),
        (OF_PARTS, "so it", "user:so it"),
    ],
)
def test_continue_final_message(source: str, content: str, text: str) -> None:
    assert render(source, {"role": "user", "content": content}, continue_final_message=True) == text


@pytest.mark.parametrize(
    ("source", "message", "options"),
    [
        (CHATML, USER, {"add_generation_prompt": True}),
        (OF_CALLS, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, {}),
        ("{{ messages[0].role }}", USER, {}),
        (OF_PARTS, {"role": "user", "content": []}, {}),
    ],
)
def test_a_message_that_cannot_be_continued(source: str, message: Any, options: dict[str, Any]) -> None:
    assert refusal(source, message, continue_final_message=True, **options).field == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ((), "messages"),
        (("hi",), "messages[0]"),
        (({"content": "hi"},), "messages[0].role"),
        ((USER, {"role": 1, "content": "hi"}), "messages[1].role"),
        (({"role": "user", "content": 5},), "messages[0].content"),
        (({"role": "user", "content": [*PARTS, {"type": "image_url"}]},), "messages[0].content[2]"),
        (({"role": "user", "content": ["text"]},), "messages[0].content[0]"),
        (({"role": "user", "content": [{"type": "text", "text": 5}]},), "messages[0].content[0]"),
        (({"role": "user"},), "messages[0].content"),
        (({"role": "assistant", "content": None, "tool_calls": []},), "messages[0].content"),
    ],
)
def test_bad_messages_name_their_field(messages: tuple[Any, ...], field: str) -> None:
    assert refusal(CHATML, *messages).field == field


def test_what_the_template_has_no_place_for_is_refused() -> None:
    error = refusal(CHATML, USER, tools=[{"type": "function"}])
    assert error.field == "tools"
    error = refusal(CHATML + "{{ documents }}", USER, template_kwargs={"enable_thinking": False})
    assert error.field == "chat_template_kwargs"
    assert "documents" in str(error)
    for reserved in ("messages", "bos_token"):
        source = CHATML + "{{ bos_token }}"
        assert refusal(source, USER, template_kwargs={reserved: []}).field == "chat_template_kwargs"
    assert render("{{ enable_thinking }}", USER, template_kwargs={"enable_thinking": False}) == "False"
    assert render("{{ tools|length }}", USER, tools=[{}]) == "1"
    assert render(CHATML, USER, tools=[]) == render(CHATML, USER)


def test_templates_run_in_a_sandbox() -> None:
    assert refusal("{{ ''.__class__.__mro__ }}", USER).field == "messages"
    assert refusal("{{ messages.append(1) }}", USER).field == "messages"


def test_a_source_that_is_no_template() -> None:
    with pytest.raises(BundleError, match="'default', line 2"):
        ChatTemplate({"default": "a\n{% for %}"}, {})


def test_no_default_template() -> None:
    template = ChatTemplate({"rag": "x"}, {})
    with pytest.raises(RequestError, match="rag"):
        template.render(template.prepare([USER]), add_generation_prompt=False)


CALL = {"id": "call_1234", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\u00e9"}'}}
CALLING = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if m.content is none %}ARGUMENTS{% endif %}"
    "{% endfor %}{{ m.content or '' }}{% endfor %}"
)


@pytest.mark.parametrize(
    "write",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ '```' + c.function.arguments }}",
        "{% for key, value in c.function.arguments.items() %}{{ key ~ value }}{% endfor %}",
    ],
)
def test_arguments_of_calls_take_the_form_that_the_template_reads(write: str) -> None:
    source = CALLING.replace("ARGUMENTS", write)
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "so"}]
    text = render(source, *messages)
    assert "é" in text
    assert text.endswith("so")
    parsed = {**CALL, "function": {"name": "f", "arguments": {"a": "é"}}}
    assert render(source, USER, {"role": "assistant", "tool_calls": [parsed]}, messages[2]) == text
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "\\u00e9"}', "left as it was"


def test_calls_are_not_left_out() -> None:
    message = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
    assert refusal(OF_BOTH, USER, message).field == "messages[1].tool_calls"
    only_with_tools = CALLING.replace("ARGUMENTS", "{% if tools %}{{ c.function.arguments }}{% endif %}")
    silent = {**message, "content": None}
    assert render(only_with_tools, USER, silent, tools=[{}]) == 'hi{"a": "é"}'
    strict = "{% if messages|length == 2 %}{{ raise_exception('no') }}{% endif %}{{ messages|length }}"
    assert render(strict, USER, message, USER) == "3", "what cannot be found out is not refused"


@pytest.mark.parametrize(
    ("calls", "field"),
    [
        ({"a": 1}, "messages[0].tool_calls"),
        ([1], "messages[0].tool_calls[0]"),
        ([CALL] * 257, "messages[0].tool_calls"),
        ([{**CALL, "type": "x"}], "messages[0].tool_calls[0].type"),
        ([{**CALL, "id": 1}], "messages[0].tool_calls[0].id"),
        ([{**CALL, "x": 1}], "messages[0].tool_calls[0].x"),
        ([{"function": {"name": ""}}], "messages[0].tool_calls[0].function.name"),
        (
            [{"function": {"name": "f", "arguments": "{\ud800}"}}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_calls_name_their_field(calls: Any, field: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert refusal(CALLING, message).field == field


def test_the_template_of_the_docs_writes_what_it_says() -> None:
    source = Path(__file__).parents[2].joinpath("docs/templates/chatml_hermes.jinja").read_text("utf-8")
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    text = render(source, *messages, tools=tools, add_generation_prompt=True)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert '\n{"type": "function", "function": {"name": "f"}}\n' in text
    assert text.endswith(
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{call}\n{call}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(source, *messages[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )
