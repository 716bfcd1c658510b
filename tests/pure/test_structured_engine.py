"""Forms in the engine: models that prefer blanks, ends or anything else give outputs that have the form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from pelton.runtime.engine import Engine
from pelton.runtime.grammar.matcher import LlguidanceGrammar
from pelton.runtime.grammar.vocabulary import Vocabulary
from pelton.runtime.llm import LLM
from pelton.runtime.outputs import Delta
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.structured import StructuredOutput
from support.tiny_model import IM_END, IM_START, NUM_PADDED_LOGITS, byte_tokenizer, scripted_engine

TOKENIZER = byte_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x y", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMA_FORM = StructuredOutput("json_schema", json.dumps(SCHEMA))


def token_id(text: str) -> int:
    (one,) = TOKENIZER.encode(text, add_special_tokens=False)
    return one


def biased(bias: dict[str, float]) -> Callable[[int, np.ndarray], None]:
    """A hook that adds to the logits of these tokens."""

    def add(_: int, logits: np.ndarray) -> None:
        for text, value in bias.items():
            logits[:, token_id(text)] += value

    return add


def generate(engine: Engine, params: SamplingParams) -> tuple[str, str | None]:
    with LLM.from_engine(engine) as llm:
        (choice,) = llm.generate("prompt", params)[0].outputs
    return choice.text, choice.finish_reason


@pytest.mark.parametrize("form", [StructuredOutput("json_object"), SCHEMA_FORM], ids=lambda form: form.kind)
def test_so_02_a_model_that_prefers_blanks_comes_to_an_end(form: StructuredOutput) -> None:
    engine = scripted_engine(after_step=biased({" ": 100, "\n": 90, "}": 50, "0": 40}))
    text, reason = generate(engine, SamplingParams(max_tokens=200, temperature=0, structured_output=form))
    assert reason == "stop"
    assert json.loads(text) == ({} if form.kind == "json_object" else {"a": 0, "b": "x y"})
    assert max(map(len, re.findall(r"\s+", text))) == 8


@pytest.mark.parametrize("stop_token_ids", [(), (token_id(IM_START),)])
def test_so_05_every_end_is_masked_until_the_output_is_whole(stop_token_ids: tuple[int, ...]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token_ids |= {token_id("\n"), token_id(IM_START)}
    zero = token_id("0")
    engine = scripted_engine(
        tokenizer, next_token=lambda _: zero, after_step=biased({IM_END: 100, IM_START: 101, "\n": 102})
    )
    params = SamplingParams(
        max_tokens=100, temperature=0, structured_output=SCHEMA_FORM, stop_token_ids=stop_token_ids
    )
    text, reason = generate(engine, params)
    assert (json.loads(text), reason) == ({"a": 0, "b": "x y"}, "stop")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (SCHEMA_FORM, r'\{\s*"a"\s*:\s*(-?\d+)\s*,\s*"b"\s*:\s*("x y"|null)\s*\}'),
        (StructuredOutput("regex", "[a-c]{3}-[0-9]{2}"), "[a-c]{3}-[0-9]{2}"),
        (StructuredOutput("choice", choices=("yes", "yes please", "no")), "yes|yes please|no"),
        (StructuredOutput("grammar", 'root ::= "<" root? ">"'), "<+>+"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_drawn_outputs_of_a_batch_have_their_form(form: StructuredOutput, pattern: str) -> None:
    params = [
        SamplingParams(
            max_tokens=300, temperature=2.0, seed=seed, structured_output=form if seed % 3 else None
        )
        for seed in range(16)
    ]
    with LLM.from_engine(scripted_engine()) as llm:
        outputs = llm.generate(["prompt"] * len(params), params)
    whole = [
        output.outputs[0].text
        for output, one in zip(outputs, params, strict=True)
        if one.structured_output and output.outputs[0].finish_reason == "stop"
    ]
    assert len(whole) >= 5
    for text in whole:
        assert re.fullmatch(pattern, text), text


def test_so_01_a_form_that_outgrows_its_limits_ends_its_request_and_the_others_go_on() -> None:
    engine = scripted_engine()
    vocabulary = Vocabulary(TOKENIZER, NUM_PADDED_LOGITS, sorted(TOKENIZER.eos_token_ids))
    text = json.dumps({"grammars": [{"lark_grammar": "start: /([a-z]*[aeiou][a-z]{12}){2,}x/"}]})
    limits = LLParserLimits(max_lexer_states=60)
    grammar = LlguidanceGrammar(vocabulary, LLMatcher(vocabulary.table, text, log_level=0, limits=limits))
    form = StructuredOutput("regex", "of no consequence: it is compiled")
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=1, structured_output=form)
    free = SamplingParams(max_tokens=100, temperature=0)
    prompt = tuple(TOKENIZER.encode("a"))
    engine.admit(Request("outgrown", prompt, params, grammar=grammar))
    engine.admit(Request("free", prompt, free))
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}
    assert ends["outgrown"].finish_reason == "error"
    assert "make the schema or grammar simpler" in str(ends["outgrown"].error)
    assert ends["free"].finish_reason == "length"
    engine.close()
