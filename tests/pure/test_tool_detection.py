"""Which formats a chat template shows, from the words of the families' own."""

from __future__ import annotations

import pytest

from pelton.runtime.chat_template import ChatTemplate
from pelton.runtime.tool_calls import detect_reasoning_format, detect_tool_format
from support.vocabularies import CHATML

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "tool_format"),
    [
        (CHATML, None),
        (
            'return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>}'
            "{{ '\\n</tool_call>' }}",
            "hermes",
        ),
        ("{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", None),
        ("{{ '<tool_call>' + tc.name }}{{ '<arg_key>' }}", None),
        (
            '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
            "value}.' }}",
            "llama3_json",
        ),
        ('{{- "<|python_tag|>" + tool_call.name + ".call(" }}', "llama3_json"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_v11"),
        ("{{ '<｜tool▁calls▁begin｜>' + '\\n' + '```json' + '\\n' }}", "deepseek_v3"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("respond with <|tool_call|> followed by a JSON list of tools used.", "granite"),
    ],
)
def test_tool_formats(source: str, tool_format: str | None) -> None:
    template = ChatTemplate({"default": source + TOOLS}, {})
    found = detect_tool_format(template.literal_text)
    assert (None if found is None else found.name) == tool_format


@pytest.mark.parametrize(
    ("source", "reasoning_format"),
    [
        (CHATML, None),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("{{ '<|Assistant|><think>\\n' }}{% if '</think>' in content %}{% endif %}", "think"),
        ("{{ '[THINK]' + thinking + '[/THINK]' }}", "mistral"),
    ],
)
def test_reasoning_formats(source: str, reasoning_format: str | None) -> None:
    found = detect_reasoning_format(ChatTemplate({"default": source}, {}).literal_text)
    assert (None if found is None else found.name) == reasoning_format
