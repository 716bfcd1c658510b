"""Fields that ask for an output of a form: what each stands for, and what is refused under which name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pelton.errors import RequestError
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.llm import LLM
from pelton.runtime.protocol import CHAT_COMPLETIONS, COMPLETIONS, ApiContext, parse_call
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.structured import StructuredOutput
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer, scripted_engine

LIMITS = ExecutorLimits(
    max_model_len=64, max_batch_size=4, max_step_tokens=32, block_size=16, num_blocks=32, vocab_size=NUM_PADDED_LOGITS
)  # fmt: skip
TOKENIZER = byte_tokenizer()
CONTEXT = ApiContext(TOKENIZER, LIMITS, ("tiny",), grammars=GrammarCompiler(TOKENIZER, LIMITS.vocab_size))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENDPOINTS = {
    COMPLETIONS: {"prompt": "abc"},
    CHAT_COMPLETIONS: {"messages": [{"role": "user", "content": "hi"}]},
}


def requests(endpoint: str, **fields: Any) -> tuple[Request, ...]:
    return parse_call(endpoint, {**ENDPOINTS[endpoint], **fields}, CONTEXT, "id").requests


def text(source: object) -> str:
    return json.dumps(source, separators=(",", ":"))


def wrapped(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutput("json_object", field="response_format"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutput("json_schema", text(SCHEMA), field="response_format.json_schema.schema"),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput("json_schema", text(SCHEMA), field="guided_json")),
        ({"guided_json": text(SCHEMA)}, StructuredOutput("json_schema", text(SCHEMA), field="guided_json")),
        ({"guided_regex": "[a-c]+"}, StructuredOutput("regex", "[a-c]+", field="guided_regex")),
        (
            {"guided_choice": ["a", "b"]},
            StructuredOutput("choice", choices=("a", "b"), field="guided_choice"),
        ),
        (
            {"guided_grammar": 'root ::= "a"'},
            StructuredOutput("grammar", 'root ::= "a"', field="guided_grammar"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}},
            StructuredOutput("json_schema", text(SCHEMA), field="structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            StructuredOutput("json_object", field="structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"choice": ["x"]}, "response_format": {"type": "text"}},
            StructuredOutput("choice", choices=("x",), field="structured_outputs.choice"),
        ),
    ],
)
def test_a_form_is_compiled_before_the_call_runs(
    endpoint: str, fields: dict[str, Any], form: StructuredOutput
) -> None:
    (request,) = requests(endpoint, **fields)
    assert request.params.structured_output == form
    assert request.grammar is not None
    assert not request.grammar.start().is_finished


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_without_a_form_there_is_no_grammar(fields: dict[str, Any]) -> None:
    (request,) = requests(COMPLETIONS, **fields)
    assert request.grammar is None
    assert request.params.structured_output is None


def test_prompts_of_one_call_share_a_grammar() -> None:
    call = parse_call(COMPLETIONS, {"prompt": ["a", "b"], "guided_regex": "a+"}, CONTEXT, "id")
    assert call.requests[0].grammar is call.requests[1].grammar is not None


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (wrapped(name="n"), "response_format.json_schema.schema"),
        (
            wrapped(schema={}, strict=1),
            "response_format.json_schema.strict",
        ),
        (
            wrapped(schema={}, mode=1),
            "response_format.json_schema.mode",
        ),
        (
            wrapped(schema={"properties": {"a": {"type": "nope"}}}),
            "response_format.json_schema.schema/properties/a/type",
        ),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"$ref": "#/$defs/x"}}, "guided_json/$ref"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ],
)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_so_01_a_form_that_cannot_be_kept_is_refused_by_its_field(
    endpoint: str, fields: dict[str, Any], at: str
) -> None:
    with pytest.raises(RequestError) as error:
        requests(endpoint, **fields)
    assert error.value.field == at


def test_an_llm_compiles_before_anything_runs() -> None:
    with LLM.from_engine(scripted_engine()) as llm:
        sound = SamplingParams(max_tokens=1)
        broken = replace(sound, structured_output=StructuredOutput("regex", "("))
        for run in (lambda: llm.generate(["a", "b"], [sound, broken]), lambda: llm.stream("a", broken)):
            with pytest.raises(RequestError, match=r"^structured_output: "):
                run()
        assert llm.engine.num_requests == 0
