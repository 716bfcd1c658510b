"""A draft model beside its target: one pool, one vocabulary, and pages that are right whatever the scheduler does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers

from pelton.errors import ConfigError
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.speculate.draft_model import DraftModelDrafter, check_same_tokens
from pelton.runtime.tokenizer import Tokenizer
from support.drafting import drafting_engine
from support.scripted import ScriptedExecutor, digest
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer

TOKENIZER = byte_tokenizer()
LIMITS = ExecutorLimits(
    max_model_len=160,
    max_batch_size=6,
    max_step_tokens=48,
    block_size=4,
    num_blocks=44,
    vocab_size=NUM_PADDED_LOGITS,
)


def outputs(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.admit(request)
    results: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            results.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            assert delta.error is None
    engine.close()
    return results


def some_requests(rng: random.Random, **params: Any) -> list[Request]:
    stem = [rng.randrange(200) for _ in range(30)]
    requests = []
    for number in range(24):
        prompt = (*stem[: rng.randrange(30)], *(rng.randrange(200) for _ in range(rng.randint(1, 12))))
        settings = {"temperature": 0.0, "n": rng.choice([1, 1, 2]), **params}
        salt = rng.choice(["", "", "x"])
        sampling = SamplingParams(max_tokens=rng.randint(2, 40), ignore_eos=True, **settings)
        requests.append(Request(f"r{number}", prompt, sampling, cache_salt=salt))
    return requests


@pytest.mark.parametrize("is_cached", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("max_step_tokens", [7, 48])
def test_a_draft_model_equal_to_its_target_is_always_right(is_cached: bool, max_step_tokens: int) -> None:
    """Its next token depends on every token in its own pages: one that is stale, foreign or missing would show."""
    config = EngineConfig(check_invariants=True, enable_prefix_caching=is_cached, max_chunk_tokens=11)
    requests = some_requests(random.Random(3))
    tight = replace(LIMITS, num_blocks=41)
    plain = outputs(Engine(ScriptedExecutor(digest(200), tight), TOKENIZER, config), requests)
    draft = ScriptedExecutor(digest(200), replace(tight, max_step_tokens=max_step_tokens))
    engine = drafting_engine(
        ScriptedExecutor(digest(200), tight),
        TOKENIZER,
        DraftModelDrafter(draft, tight),
        config=config,
        draft_limit=5,
    )
    assert outputs(engine, requests) == plain
    stats = engine.stats()
    assert stats.num_preemptions >= 2
    assert stats.num_draft_tokens > 200
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_draft_model_that_errs_changes_nothing() -> None:
    requests = some_requests(random.Random(4))
    plain = outputs(Engine(ScriptedExecutor(digest(200), LIMITS), TOKENIZER), requests)
    right = digest(200)
    draft = ScriptedExecutor(lambda context: (right(context) + (sum(context) % 3 == 0)) % 200, LIMITS)
    engine = drafting_engine(
        ScriptedExecutor(right, LIMITS), TOKENIZER, DraftModelDrafter(draft, LIMITS), draft_limit=5
    )
    assert outputs(engine, requests) == plain
    stats = engine.stats()
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


def test_prompts_that_the_pages_of_the_draft_hold_are_not_computed_again() -> None:
    draft = ScriptedExecutor(digest(200), LIMITS)
    engine = drafting_engine(
        ScriptedExecutor(digest(200), LIMITS), TOKENIZER, DraftModelDrafter(draft, LIMITS), draft_limit=3
    )
    prompt = tuple(range(60))
    counts = []
    for name in ("a", "b"):
        before = draft.num_computed_tokens
        engine.admit(Request(name, prompt, SamplingParams(temperature=0, max_tokens=4)))
        while engine.has_work:
            engine.step()
        counts.append(draft.num_computed_tokens - before)
    assert counts[0] >= 60
    assert counts[1] <= 8


def test_drawn_drafts_are_for_requests_without_a_seed() -> None:
    """A user's seed means the same tokens with a draft model and without."""
    rng_rows = np.random.default_rng(0).normal(0, 2, (200, NUM_PADDED_LOGITS)).astype(np.float32)
    make = lambda scale: ScriptedExecutor(  # noqa: E731
        lambda _: 0, LIMITS, logits_of=lambda context: rng_rows[context[-1] % 200] * np.float32(scale)
    )
    seeded = some_requests(random.Random(5), temperature=1.0, seed=11)
    plain = outputs(Engine(make(1.0), TOKENIZER), seeded)
    engine = drafting_engine(make(1.0), TOKENIZER, DraftModelDrafter(make(0.7), LIMITS), draft_limit=4)
    assert outputs(engine, seeded) == plain
    chosen_rate = engine.stats().num_accepted_tokens / engine.stats().num_draft_tokens
    engine = drafting_engine(make(1.0), TOKENIZER, DraftModelDrafter(make(0.7), LIMITS), draft_limit=4)
    outputs(engine, some_requests(random.Random(5), temperature=1.0))
    drawn_rate = engine.stats().num_accepted_tokens / engine.stats().num_draft_tokens
    assert drawn_rate > chosen_rate + 0.1, "drawn drafts are accepted more often, or they are not drawn"


def test_drafts_that_a_model_draws_keep_the_distribution() -> None:
    """Through the engine: 24,000 pairs of tokens that follow each other, beside the target's exact probabilities."""
    target = np.random.default_rng(1).normal(0, 1.2, (5, 5)).astype(np.float32)
    errs = target + np.random.default_rng(2).normal(0, 0.9, (5, 5)).astype(np.float32)

    def model(table: np.ndarray) -> ScriptedExecutor:
        def logits_of(context: Sequence[int]) -> np.ndarray:
            row = np.full(NUM_PADDED_LOGITS, -1e9, np.float32)
            row[:5] = table[context[-1] % 5]
            return row

        return ScriptedExecutor(lambda _: 0, wide, logits_of=logits_of)

    wide = replace(LIMITS, max_batch_size=32, max_step_tokens=256, num_blocks=600)
    engine = drafting_engine(
        model(target),
        TOKENIZER,
        DraftModelDrafter(model(errs), wide),
        draft_limit=3,
        config=EngineConfig(),
    )
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    requests = [Request(f"r{i}", (1,), params) for i in range(600)]
    pairs = Counter(pair for tokens in outputs(engine, requests).values() for pair in pairwise(tokens))
    assert 0.3 < engine.stats().num_accepted_tokens / engine.stats().num_draft_tokens < 0.95
    probabilities = np.exp(target) / np.exp(target).sum(1, keepdims=True)
    seen = np.array([[pairs[a, b] for b in range(5)] for a in range(5)], np.float64)
    expected = seen.sum(1, keepdims=True) * probabilities
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 52, "20 degrees of freedom: one in ten thousand"


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_of_the_draft_model_that_are_no_numbers_draft_nothing(poison: float) -> None:
    def broken(context: Sequence[int]) -> np.ndarray:
        return np.full(NUM_PADDED_LOGITS, poison, np.float32)

    draft = ScriptedExecutor(lambda _: 0, LIMITS, logits_of=broken)
    engine = drafting_engine(
        ScriptedExecutor(lambda context: 50 + context[-1] % 2, LIMITS),
        TOKENIZER,
        DraftModelDrafter(draft, LIMITS),
    )
    got = outputs(
        engine, [Request("r", (1,), SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.3))]
    )
    assert set(got["r", 0]) <= {50, 51}
    assert engine.stats().num_draft_tokens == 0


# --- SP-02 -----------------------------------------------------------------------------------------------------------


def permuted(first: int, second: int) -> Tokenizer:
    """`byte_tokenizer` with two ids exchanged."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    alphabet[first], alphabet[second] = alphabet[second], alphabet[first]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, eos_token_ids=TOKENIZER.eos_token_ids)


def test_sp_02_vocabularies_are_compared_by_content() -> None:
    check_same_tokens(TOKENIZER, byte_tokenizer())
    with pytest.raises(ConfigError, match="draft_bundle: token 40 is"):
        check_same_tokens(TOKENIZER, permuted(40, 90))
    with pytest.raises(ConfigError, match="token 258 is missing in the model's tokenizer, but '<s>'"):
        check_same_tokens(TOKENIZER, byte_tokenizer(has_bos=True))


@pytest.mark.parametrize("name", ["max_batch_size", "max_model_len", "num_blocks", "block_size"])
def test_a_draft_engine_with_smaller_limits_is_refused(name: str) -> None:
    small = replace(LIMITS, **{name: getattr(LIMITS, name) - 1})
    with pytest.raises(ConfigError, match="draft_bundle"):
        DraftModelDrafter(ScriptedExecutor(digest(200), small), LIMITS)
