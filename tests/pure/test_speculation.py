"""The engine with drafts: the same output as without, whatever else is asked for, and nothing behind an end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pelton.errors import EngineError
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.outputs import Delta
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.speculate.draft import Draft, DraftAsk, Drafter
from pelton.runtime.speculate.ngram import NgramDrafter
from pelton.runtime.speculate.suffix import SuffixDrafter
from pelton.runtime.structured import Grammar, StructuredOutput
from support.drafting import FixedDrafter, GuessingDrafter, drafting_engine
from support.draining import drain
from support.scripted import ScriptedExecutor, noise
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = next(iter(TOKENIZER.eos_token_ids))
LIMITS = ExecutorLimits(
    max_model_len=160,
    max_batch_size=6,
    max_step_tokens=48,
    block_size=4,
    num_blocks=50,
    vocab_size=NUM_PADDED_LOGITS,
)


def certain(outputs: Sequence[int], num_prompt_tokens: int) -> Any:
    return lambda context: outputs[min(len(context) - num_prompt_tokens, len(outputs) - 1)]


def summary(deltas: list[Delta]) -> dict[str, Any]:
    """All that a client sees of a choice, however it was cut into deltas."""
    last = deltas[-1]
    scores = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return {
        "tokens": [token for delta in deltas for token in delta.token_ids],
        "text": "".join(delta.text for delta in deltas),
        "logprobs": [logprob for delta in deltas for logprob in delta.logprobs],
        "prompt_logprobs": scores,
        "ending": (last.finish_reason, last.stop_reason, str(last.error)),
        "num_output_tokens": last.num_output_tokens,
    }


def outputs_of(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], dict[str, Any]]:
    for request in requests:
        engine.admit(request)
    results = {key: summary(deltas) for key, deltas in drain(engine).items()}
    engine.close()
    return results


def run_alone(outputs: Sequence[int], draft: Sequence[int], **params: Any) -> tuple[dict[str, Any], Engine]:
    """A model that says `outputs`, with `draft` drafted again and again, on the prompt (7, 8)."""
    executor = ScriptedExecutor(certain(outputs, 2), LIMITS)
    engine = drafting_engine(executor, TOKENIZER, FixedDrafter(draft))
    request = Request("r", (7, 8), SamplingParams(**{"temperature": 0, "max_tokens": None, **params}))
    return outputs_of(engine, [request])["r", 0], engine


# --- SP-01 -----------------------------------------------------------------------------------------------------------

RUN = [10, 11, EOS, 20, 21, 22]


@pytest.mark.parametrize(
    ("max_tokens", "expected", "reason"), [(5, [10, 11, EOS], "stop"), (2, [10, 11], "length")]
)
def test_sp_01_an_end_inside_a_run_of_drafts_ends_there(
    max_tokens: int, expected: list[int], reason: str
) -> None:
    got, engine = run_alone(RUN, RUN[1:], max_tokens=max_tokens)
    assert (got["tokens"], got["ending"][0]) == (expected, reason)
    assert got["num_output_tokens"] == len(expected) == engine.stats().num_output_tokens
    assert got["text"] == TOKENIZER.decode([10, 11], is_continuation=True)
    assert engine.stats().num_steps == 2


def test_sp_01_a_stop_token_of_the_user_ends_a_run() -> None:
    got, _ = run_alone([10, 11, 12, 13, 14, 15], [11, 12, 13, 14], max_tokens=6, stop_token_ids=[12])
    assert (got["tokens"], got["ending"][:2]) == ([10, 11, 12], ("stop", 12))


def test_sp_01_a_stop_string_over_two_drafted_tokens_ends_a_run() -> None:
    letters = TOKENIZER.encode("abcdefgh", add_special_tokens=False)
    for stop, text, num_tokens in (("cd", "ab", 4), ("bcde", "a", 5), ("h", "abcdefg", 8)):
        got, engine = run_alone(letters, letters[1:], max_tokens=8, stop=[stop], logprobs=0)
        assert (got["text"], got["ending"][:2]) == (text, ("stop", stop))
        assert got["num_output_tokens"] == len(got["tokens"]) == len(got["logprobs"]) == num_tokens
        assert engine.stats().num_output_tokens == num_tokens


def test_tokens_behind_an_end_are_not_cached_for_others() -> None:
    """Blocks that hold drafted tokens behind a stop are not what a later prompt finds."""
    letters = TOKENIZER.encode("abcdefghijkl", add_special_tokens=False)
    executor = ScriptedExecutor(certain(letters, 2), LIMITS)
    engine = drafting_engine(executor, TOKENIZER, FixedDrafter(letters[1:]))
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[letters[3]])
    engine.admit(Request("a", (7, 8), params))
    first = drain(engine)["a", 0]
    assert [t for d in first for t in d.token_ids] == letters[:4]
    engine.admit(Request("b", (7, 8, *letters[:10]), SamplingParams(temperature=0, max_tokens=1)))
    second = drain(engine)["b", 0]
    assert second[-1].num_cached_tokens == 4  # the block (7, 8, a, b); the next would need e and f
    engine.close()


# --- everything else that can be asked for --------------------------------------------------------------------------


def some_params(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "temperature": lambda: rng.choice([0.0, 0.0, 0.7, 1.5]),
        "top_p": lambda: rng.choice([0.3, 0.9]),
        "top_k": lambda: rng.choice([1, 3, 20]),
        "min_p": lambda: rng.choice([0.05, 0.4]),
        "frequency_penalty": lambda: rng.choice([-2.0, 0.7, 2.0]),
        "presence_penalty": lambda: rng.choice([-1.0, 1.5]),
        "repetition_penalty": lambda: rng.choice([0.7, 1.4]),
        "logit_bias": lambda: {rng.randrange(250): rng.choice([-100.0, 5.0, 100.0]) for _ in range(3)},
        "min_tokens": lambda: rng.randrange(12),
        "stop": lambda: [chr(97 + rng.randrange(26)), "zq"],
        "stop_token_ids": lambda: [rng.randrange(250) for _ in range(4)],
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.choice([0, 3]),
        "prompt_logprobs": lambda: 1,
        "n": lambda: rng.choice([2, 3]),
        "num_draft_tokens": lambda: rng.choice([0, 1, 3, 50]),
        "include_stop_str_in_output": lambda: True,
    }
    picked = rng.sample(sorted(choices), rng.randint(1, 6))
    params = {"temperature": 0.0, **{name: choices[name]() for name in picked}}
    params["max_tokens"] = max(params.get("min_tokens", 0), rng.randint(1, 40))
    return {"seed": rng.randrange(1000), **params}


def upper_case(prompt: tuple[int, ...], output: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
    """A processor that depends on the output so far."""
    logits[(sum(output) + len(output)) % 200 :: 7] -= 4.0
    return logits


SCHEMA = (
    '{"type": "object", "properties": {"name": {"enum": ["a", "bc"]}, "n": {"type": "integer"}}, '
    '"required": ["name", "n"], "additionalProperties": false}'
)


def grammars() -> list[tuple[StructuredOutput, Grammar]]:
    compiler = GrammarCompiler(TOKENIZER, NUM_PADDED_LOGITS)
    forms = [
        StructuredOutput("regex", "[ab]{3,9}c"),
        StructuredOutput("choice", choices=("yes", "yesterday", "no")),
        StructuredOutput("json_schema", SCHEMA),
    ]
    return [(form, compiler.compile(form)) for form in forms]


GRAMMARS = grammars()


def some_requests(rng: random.Random, count: int) -> list[Request]:
    requests = []
    stem = [rng.randrange(250) for _ in range(20)]
    for number in range(count):
        prompt = (*stem[: rng.randrange(20)], *(rng.randrange(97, 101) for _ in range(rng.randint(1, 20))))
        params = some_params(rng)
        grammar = None
        if rng.random() < 0.3:
            form, grammar = rng.choice(GRAMMARS)
            params["structured_output"] = form
            params.pop("logit_bias", None)  # which may leave nothing that the form allows
        if rng.random() < 0.2:
            params["logits_processors"] = [upper_case]
        requests.append(Request(f"r{number}", prompt, SamplingParams(**params), grammar=grammar))
    return requests


def drafters(seed: int) -> dict[str, Drafter]:
    likeliest = noise(NUM_PADDED_LOGITS, seed)
    guess = lambda context: int(likeliest(context).argmax())  # noqa: E731
    return {
        "model": GuessingDrafter(guess, 250, seed=seed),
        "lookup": GuessingDrafter(guess, 250, seed=seed, is_lookup=True),
        "ngram": NgramDrafter(2, 5),
        "suffix": SuffixDrafter(),
    }


@pytest.mark.parametrize("name", ["model", "lookup", "ngram", "suffix"])
@pytest.mark.parametrize("num_blocks", [50, 41], ids=["roomy", "tight"])
def test_every_combination_gives_the_same_output_with_drafts(name: str, num_blocks: int) -> None:
    """Also chunked prompts, a shared prefix, preemption, choices, requests in one batch that draft and do not, and
    masks that are filled beforehand or when they are asked for.
    """
    num_accepted = num_preemptions = 0
    for seed in range(3):
        requests = some_requests(random.Random(f"{seed}"), 24)
        config = EngineConfig(check_invariants=True, max_chunk_tokens=(None, 5, 16)[seed])
        limits = replace(LIMITS, num_blocks=num_blocks)
        whole, asked = (
            ScriptedExecutor(
                lambda _: 0, limits, logits_of=noise(NUM_PADDED_LOGITS, seed), reads_whole_masks=is_whole
            )
            for is_whole in (True, False)
        )
        first, second = (whole, asked) if seed % 2 else (asked, whole)
        plain = outputs_of(Engine(first, TOKENIZER, config), requests)
        drafter = drafters(seed)[name]
        engine = drafting_engine(second, TOKENIZER, drafter, config=config, is_adaptive=seed == 1)
        drafted = outputs_of(engine, requests)
        assert drafted.keys() == plain.keys()
        for key, expected in plain.items():
            assert drafted[key] == expected, (key, [r.params for r in requests if r.request_id == key[0]])
        stats = engine.stats()
        num_accepted += stats.num_accepted_tokens
        num_preemptions += stats.num_preemptions
    assert num_accepted > (60 if name in ("model", "lookup") else 5)
    assert num_preemptions > 3 or num_blocks == 50


def test_drafts_save_steps() -> None:
    letters = TOKENIZER.encode("the quick brown fox", add_special_tokens=False)
    got, engine = run_alone(letters, letters[1:9], max_tokens=9)
    assert got["tokens"] == letters[:9]
    assert engine.stats().num_steps == 2
    assert (engine.stats().num_draft_tokens, engine.stats().num_accepted_tokens) == (7, 7)


def test_num_draft_tokens_zero_switches_drafting_off_for_a_request() -> None:
    letters = TOKENIZER.encode("the quick brown fox", add_special_tokens=False)
    got, engine = run_alone(letters, letters[1:9], max_tokens=9, num_draft_tokens=0)
    assert (got["tokens"], engine.stats().num_steps, engine.stats().num_draft_tokens) == (letters[:9], 9, 0)


def test_a_form_that_forces_tokens_is_followed_without_sampling_each() -> None:
    form = StructuredOutput("regex", "(left|right) of the house")
    grammar = GrammarCompiler(TOKENIZER, NUM_PADDED_LOGITS).compile(form)
    params = SamplingParams(temperature=0, max_tokens=40, structured_output=form)
    executor = ScriptedExecutor(lambda _: 0, LIMITS, logits_of=noise(NUM_PADDED_LOGITS))
    engine = Engine(executor, TOKENIZER, EngineConfig(check_invariants=True))
    got = outputs_of(engine, [Request("r", (1, 2), params, grammar=grammar)])["r", 0]
    assert got["text"] in ("left of the house", "right of the house")
    assert got["ending"][0] == "stop"
    assert engine.stats().num_steps == 2


class FailingDrafter(FixedDrafter):
    def propose(self, asks: Any) -> Any:
        raise RuntimeError("the drafter is broken")


def test_a_drafter_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    executor = ScriptedExecutor(certain([5, 6, 7, 8], 2), LIMITS)
    engine = drafting_engine(executor, TOKENIZER, FailingDrafter([1]))
    request = Request("r", (7, 8), SamplingParams(temperature=0, max_tokens=4))
    assert outputs_of(engine, [request])["r", 0]["tokens"] == [5, 6, 7, 8]
    assert "drafting is switched off" in caplog.text


class BrokenMatcher:
    """A form that outgrows its limits behind token 4."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.is_finished = False
        self.is_broken = 4 in token_ids

    def fill(self, mask: np.ndarray) -> None:
        if self.is_broken:
            raise EngineError("the form outgrew its limits")
        mask[:] = -1

    def allows(self, token_id: int) -> bool:
        if self.is_broken:
            raise EngineError("the form outgrew its limits")
        return True

    def accept(self, token_id: int) -> bool:
        self.allows(token_id)
        self.is_broken |= token_id == 4
        return True

    def forced(self, max_tokens: int) -> list[int]:
        return []

    def copy(self) -> BrokenMatcher:
        return BrokenMatcher([4] if self.is_broken else [])


class BrokenGrammar:
    def start(self, token_ids: Sequence[int] = ()) -> BrokenMatcher:
        return BrokenMatcher(token_ids)


class RaisingMatcher(BrokenMatcher):
    """Fails as no matcher should."""

    def fill(self, mask: np.ndarray) -> None:
        raise ValueError("no mask")

    def allows(self, token_id: int) -> bool:
        raise ValueError("no token")


class RaisingGrammar:
    def start(self, token_ids: Sequence[int] = ()) -> RaisingMatcher:
        return RaisingMatcher(token_ids)


FORM_THAT_FAILS = SamplingParams(
    temperature=0, max_tokens=9, presence_penalty=0.1, structured_output=StructuredOutput("regex", "x")
)


@pytest.mark.parametrize("reads_whole_masks", [False, True])
def test_a_form_that_fails_ends_its_request_alone(reads_whole_masks: bool) -> None:
    executor = ScriptedExecutor(
        lambda context: (context[-1] + 1) % 90, LIMITS, reads_whole_masks=reads_whole_masks
    )
    engine = Engine(executor, TOKENIZER, EngineConfig(check_invariants=True))
    requests = [
        Request("bad", (1,), FORM_THAT_FAILS, grammar=BrokenGrammar()),
        Request("twice", (1,), replace(FORM_THAT_FAILS, n=3), grammar=BrokenGrammar()),
        Request("raising", (1,), FORM_THAT_FAILS, grammar=RaisingGrammar()),
        Request("asked", (1,), replace(FORM_THAT_FAILS, presence_penalty=0.0), grammar=RaisingGrammar()),
        Request("good", (1,), SamplingParams(temperature=0, max_tokens=9)),
    ]
    got = outputs_of(engine, requests)
    assert (got["bad", 0]["ending"][0], got["bad", 0]["tokens"]) == ("error", [2, 3, 4])
    assert "outgrew" in got["bad", 0]["ending"][2]
    assert [got["twice", choice]["ending"][0] for choice in range(3)] == ["error"] * 3
    for name in ("raising", "asked"):
        assert (got[name, 0]["ending"][0], got[name, 0]["tokens"]) == ("error", [])
        assert "cannot be kept: no" in got[name, 0]["ending"][2]
    assert got["good", 0]["tokens"] == list(range(2, 11))


@pytest.mark.parametrize("reads_whole_masks", [False, True])
def test_a_draft_that_breaks_a_form_does_not_end_its_request(reads_whole_masks: bool) -> None:
    executor = ScriptedExecutor(
        certain([11, 12, 13, 14, 15, 16], 1), LIMITS, reads_whole_masks=reads_whole_masks
    )
    engine = drafting_engine(executor, TOKENIZER, FixedDrafter([4, 4]))
    params = replace(FORM_THAT_FAILS, max_tokens=5, presence_penalty=0.0)
    got = outputs_of(engine, [Request("r", (1,), params, grammar=BrokenGrammar())])["r", 0]
    assert (got["tokens"], got["ending"][0]) == ([11, 12, 13, 14, 15], "length")


class DrawnDrafter(FixedDrafter):
    """Says that it drew its tokens, each for certain."""

    def _draft(self, ask: DraftAsk) -> Draft:
        draft = super()._draft(ask)
        return Draft(draft.token_ids, np.eye(NUM_PADDED_LOGITS, dtype=np.float32)[list(draft.token_ids)])


@pytest.mark.parametrize("reads_whole_masks", [False, True])
@pytest.mark.parametrize("drafted", [[12, 13, 4], [4, 12], [12, 4]])
def test_a_drawn_draft_that_breaks_a_form_does_not_end_its_request(
    drafted: list[int], reads_whole_masks: bool
) -> None:
    """Its masks end where the form broke, though tokens before that are accepted."""
    executor = ScriptedExecutor(
        lambda context: min(context[-1] + 1, 90) if context[-1] > 10 else 11,
        LIMITS,
        reads_whole_masks=reads_whole_masks,
    )
    engine = drafting_engine(executor, TOKENIZER, DrawnDrafter(drafted))
    params = replace(FORM_THAT_FAILS, max_tokens=5, presence_penalty=0.0, temperature=0.01)
    got = outputs_of(engine, [Request("r", (1,), params, grammar=BrokenGrammar())])["r", 0]
    assert (got["tokens"], got["ending"][0]) == ([11, 12, 13, 14, 15], "length")


def test_drafting_comes_back_when_a_text_begins_to_copy() -> None:
    """Noise, whose drafts are refused for long, then one passage again and again."""
    rng = random.Random(1)
    noise_tokens = [rng.randrange(8) for _ in range(300)]  # pairs of tokens come again, and go on otherwise
    passage = [rng.randrange(20, 200) for _ in range(60)]
    output = noise_tokens + passage * 10
    limits = replace(LIMITS, max_model_len=1000, block_size=16, num_blocks=80)
    engine = drafting_engine(
        ScriptedExecutor(certain(output, 1), limits), TOKENIZER, NgramDrafter(2, 16), is_adaptive=True
    )
    record_step = engine._speculator._lengths.record_step
    engine._speculator.record_step = lambda num_tokens, _: record_step(num_tokens, 1.0 + 0.2 * num_tokens)  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=890, ignore_eos=True)
    assert outputs_of(engine, [Request("r", (1,), params)])["r", 0]["tokens"] == output[:890]
    assert engine.stats().num_steps < 650


def test_the_drafter_hears_of_every_end_and_is_closed() -> None:
    executor = ScriptedExecutor(certain([5, 6, 7, 8], 2), LIMITS)
    drafter = FixedDrafter([6])
    engine = drafting_engine(executor, TOKENIZER, drafter)
    requests = [Request(f"r{i}", (7, 8), SamplingParams(temperature=0, max_tokens=4, n=2)) for i in range(3)]
    outputs_of(engine, requests)
    assert {(s.request.request_id, s.index) for s in drafter.ended} == {
        (f"r{i}", c) for i in range(3) for c in range(2)
    }
    assert drafter.is_closed
