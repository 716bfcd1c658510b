"""Speculation on the real model: the same tokens and log-probabilities as without, whatever is asked for.

PELTON_FULL_TESTS=1 takes 50 prompts of 128 tokens; otherwise there are few.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pelton import LLM, SamplingParams
from pelton.errors import ConfigError
from pelton.runtime.outputs import RequestOutput
from pelton.runtime.speculate.config import SpeculationConfig
from pelton.runtime.structured import StructuredOutput
from support.json_schemas import SCHEMAS
from support.text import passages

IS_FULL = bool(os.environ.get("PELTON_FULL_TESTS"))
NUM_PROMPTS = 50 if IS_FULL else 6
NUM_TOKENS = 128 if IS_FULL else 40

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORM = StructuredOutput("json_schema", json.dumps(SCHEMA))


@dataclass(frozen=True)
class Case:
    params: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    is_half_off: bool = False


CASES = {
    "plain": Case(),
    "penalties": Case({"frequency_penalty": 0.7, "presence_penalty": -0.3, "repetition_penalty": 1.1}),
    "frequency up": Case({"frequency_penalty": -2.0}),
    "bias and min_tokens": Case(
        {"logit_bias": {253: 3.0, 260: -100.0}, "min_tokens": 20, "ignore_eos": False}
    ),
    "stop strings": Case({"stop": ["the ", "\n\n"], "ignore_eos": False}),
    "form": Case({"structured_output": FORM, "ignore_eos": False}),
    "sampled with a seed": Case({"temperature": 0.8, "top_p": 0.9, "seed": 7}),
    "chunked": Case(engine={"max_chunk_tokens": 24}),
    "no prefix cache": Case(engine={"enable_prefix_caching": False}),
    "preempted": Case(engine={"kv_cache_bytes": (60 if IS_FULL else 16) << 20, "check_invariants": True}),
    "half of the batch does not draft": Case(is_half_off=True),
}


CI_CASES = ("plain", "penalties")
"""What every change runs; tests/pure/test_speculation.py has everything at once, on a scripted model."""

SECOND = {"plain": ("draft-model",), "form": ("suffix",), "penalties": ("suffix",)}
"""Further drafters of a case where PELTON_FULL_TESTS does not ask for all."""


def seen(output: RequestOutput) -> tuple[Any, ...]:
    one = output.outputs[0]
    return one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs


def prompts_for(llm: LLM) -> list[list[int]]:
    """Half of them repeat what they say, so that there is something to look up."""
    texts = passages(llm.tokenizer.encode, [20 + 7 * i for i in range(NUM_PROMPTS)])
    return [tokens + tokens[: len(tokens) // 2] if i % 2 else tokens for i, tokens in enumerate(texts)]


class Answers:
    """What a client sees of each answer of a case, by drafter; engines with the usual settings are loaded once."""

    def __init__(self, bundle: Path, draft_bundle: Path) -> None:
        self._bundle = bundle
        self.drafters: dict[str, SpeculationConfig | None] = {
            "nobody": None,
            "ngram": SpeculationConfig("ngram", is_adaptive=False),
            "suffix": SpeculationConfig("suffix", is_adaptive=False),
            "draft-model": SpeculationConfig("draft-model", draft_bundle=draft_bundle, is_adaptive=False),
        }
        self._engines: dict[str, LLM] = {}

    def of(self, case: Case, drafter: str) -> tuple[list[Any], int, int]:
        """The answers, and how many tokens were accepted and sequences preempted on the way."""
        if case.engine:
            with LLM(self._bundle, speculation=self.drafters[drafter], **case.engine) as llm:
                return self._run(llm, case)
        if drafter not in self._engines:
            self._engines[drafter] = LLM(self._bundle, speculation=self.drafters[drafter])
        return self._run(self._engines[drafter], case)

    def close(self) -> None:
        for llm in self._engines.values():
            llm.close()

    def _run(self, llm: LLM, case: Case) -> tuple[list[Any], int, int]:
        base: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 2}
        params = SamplingParams(**{**base, **case.params})
        before = llm.engine.stats()
        prompts = prompts_for(llm)
        settings = [
            replace(params, num_draft_tokens=0) if case.is_half_off and i % 2 else params
            for i in range(len(prompts))
        ]
        outputs = llm.generate(prompts, settings)
        outputs += llm.generate(prompts[:3], settings[:3])  # found in the prefix cache, and by suffixes
        after = llm.engine.stats()
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        return (
            [seen(output) for output in outputs],
            num_accepted,
            after.num_preemptions - before.num_preemptions,
        )


@pytest.fixture(scope="module")
def answers(smollm2_float32_bundle: Path, smollm2_bundle: Path) -> Iterator[Answers]:
    """Float32; the draft model is the same model in bfloat16: most of its tokens are right, and some are not."""
    engines = Answers(smollm2_float32_bundle, smollm2_bundle)
    yield engines
    engines.close()


@pytest.mark.parametrize("name", CASES if IS_FULL else CI_CASES)
def test_drafts_change_nothing_that_a_client_sees(name: str, answers: Answers) -> None:
    case = CASES[name]
    plain, _, num_preemptions = answers.of(case, "nobody")
    if name == "preempted":
        assert num_preemptions > 0, "the pool is too large to preempt anybody"
    chosen = ("ngram", "suffix", "draft-model") if IS_FULL else ("ngram", *SECOND.get(name, ()))
    for drafter in chosen:
        drafted, num_accepted, _ = answers.of(case, drafter)
        for number, (expected, got) in enumerate(zip(plain, drafted, strict=True)):
            assert got == expected, f"{drafter}, prompt {number}"
        assert num_accepted > 10 or name == "stop strings", drafter


def test_sp_04_a_repetitive_prompt_gives_the_same_ids(smollm2_float32_bundle: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=32)
    prompts = ["serving " * 48, "The capital of France is", "one two three one two three one two"]
    with LLM(smollm2_float32_bundle) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(smollm2_float32_bundle, speculation=SpeculationConfig("ngram", is_adaptive=False)) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.engine.stats().num_accepted_tokens > 10
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8, 15] if IS_FULL else [1, 15])
def test_sp_06_forms_with_drafts_are_valid_and_end(
    num_draft_tokens: int, smollm2_float32_bundle: Path
) -> None:
    speculation = SpeculationConfig("ngram", num_draft_tokens, is_adaptive=False)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=120, structured_output=FORM)
    example = json.dumps({"name": "Ann", "age": 31, "tags": ["a", "b"]})
    prompts = [f"Records: {example} {example}\nRecord {i}: " for i in range(16)]
    with LLM(smollm2_float32_bundle, speculation=speculation) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.engine.stats().num_accepted_tokens > 20
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)


@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")
def test_documents_of_many_schemas_are_the_same_and_valid_with_drafts(tiny_bundles: dict[str, Path]) -> None:
    """300 whole documents and more over all schemas with PELTON_FULL_TESTS, else one of every second."""
    schemas = [SCHEMAS[name] for name in SCHEMAS][:: 1 if IS_FULL else 2]
    asks = [(schema, seed) for seed in range(5 if IS_FULL else 1) for schema in schemas]
    prompts = [f"A value of {json.dumps(schema)[:150]}: " for schema, _ in asks]
    params = [
        SamplingParams(
            temperature=0.3 * (1 + seed), seed=seed, max_tokens=200,
            structured_output=StructuredOutput("json_schema", json.dumps(schema)),
        )
        for schema, seed in asks
    ]  # fmt: skip
    texts: dict[str, list[tuple[str, str | None]]] = {}
    for drafter in ("nobody", "ngram", "suffix"):
        drafting = None if drafter == "nobody" else SpeculationConfig(drafter, is_adaptive=False)
        settings = [replace(one, num_draft_tokens=0) for one in params] if drafting is None else params
        with LLM(tiny_bundles["llama"], speculation=drafting) as llm:
            choices = [output.outputs[0] for output in llm.generate(prompts, settings)]
            assert (llm.engine.stats().num_accepted_tokens > 100) == (drafting is not None)
        texts[drafter] = [(choice.text, choice.finish_reason) for choice in choices]
    assert texts["ngram"] == texts["suffix"] == texts["nobody"]
    ended = [
        (schema, text)
        for (schema, _), (text, why) in zip(asks, texts["nobody"], strict=True)
        if why == "stop"
    ]
    assert len(ended) >= (300 if IS_FULL else 0.8 * len(asks))
    for schema, text in ended:
        validator = jsonschema.Draft202012Validator
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


def test_sp_02_a_draft_model_of_another_vocabulary_is_refused(
    smollm2_float32_bundle: Path, tiny_bundles: dict[str, Path]
) -> None:
    speculation = SpeculationConfig("draft-model", draft_bundle=tiny_bundles["llama"])
    with pytest.raises(ConfigError, match=r"draft_bundle: token \d+ is .* in the model's tokenizer"):
        LLM(smollm2_float32_bundle, speculation=speculation)
