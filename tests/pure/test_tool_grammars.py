"""Enforced calls: what each format's form allows is read back as calls, whatever tokens are drawn."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from pelton.errors import RequestError
from pelton.runtime.detokenizer import Detokenizer
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.request import SamplingParams
from pelton.runtime.tokenizer import Tokenizer
from pelton.runtime.tool_calls import TOOL_FORMATS, Tool, parse_answer
from support.constrained import walk
from support.vocabularies import byte_level_backend

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *sorted({literal for each in TOOL_FORMATS.values() for literal in each.literals}),
)
TOKENIZER = Tokenizer(byte_level_backend(SPECIAL), special_tokens=SPECIAL, eos_token_ids=[2])
VOCAB_SIZE = 512
UNITS = {"enum": ["C", "F"]}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": UNITS},
}
TOOLS = (Tool("get_weather", PLACE), Tool("get_time"))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE)


@pytest.mark.parametrize(
    "name", [n for n, f in TOOL_FORMATS.items() if len(f.enforce(TOOLS, False).tags) == 2]
)
def test_so_01_the_tool_whose_arguments_cannot_be_is_named(name: str, compiler: GrammarCompiler) -> None:
    """Without the grammar that Pelton made of the tools."""
    both = {"allOf": [{"type": "string"}, {"type": "null"}]}
    impossible = {"type": "object", "properties": {"x": both}, "required": ["x"]}
    tools = (
        Tool("fine", PLACE, "tools[0].function.parameters"),
        Tool("not_fine", impossible, "tools[1].function.parameters"),
    )
    with pytest.raises(RequestError) as error:
        compiler.compile(TOOL_FORMATS[name].enforce(tools, False))
    assert error.value.field == "tools[1].function.parameters"
    assert str(error.value).startswith(f"{error.value.field} cannot be compiled: ")
    assert "unsatisfiable" in str(error.value)
    assert "tag_" not in str(error.value)


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_enforced_is_read_as_calls(name: str, is_repeated: bool, compiler: GrammarCompiler) -> None:
    tool_format = TOOL_FORMATS[name]
    grammar = compiler.compile(tool_format.enforce(TOOLS, is_repeated))
    rng = random.Random(7)
    params = SamplingParams(shown_special_tokens=TOKENIZER.special_ids_of(tool_format.literals))
    counts, called = set(), set()
    for number in range(24):
        token_ids = walk(grammar, TOKENIZER, VOCAB_SIZE, rng, num_free=number * 8)
        detokenizer = Detokenizer(TOKENIZER, params)
        text = detokenizer.push(token_ids).text + detokenizer.finish()
        answer = parse_answer(text, tool_format, tool_names=[tool.name for tool in TOOLS])
        assert answer.content == "", text
        for call in answer.calls:
            schema = next(tool.schema for tool in TOOLS if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), schema)
            called.add(call.name)
        counts.add(len(answer.calls))
    assert called == {"get_weather", "get_time"}
    assert counts == {1} if not is_repeated else max(counts) > 1
