"""Speculation does not change the distribution of what is sampled, and the test would see it if it did.

A model of few tokens whose next logits are a function of the last two; what comes out of many short runs with drafts is
compared with the exact distribution, computed without drafts and without sampling.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pelton.runtime import sampler as sampler_module
from pelton.runtime.outputs import TokenEvent
from pelton.runtime.penalties import TokenCounts, has_penalties
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sampler import HostSampler, Verification
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import Draft
from pelton.runtime.truncation import processed_weights

VOCAB_SIZE = 5
PROMPT = (0, 1)
NUM_TOKENS = 3
IS_FULL = bool(os.environ.get("PELTON_FULL_TESTS"))
NUM_SAMPLES = 200_000 if IS_FULL else 9_000
"""Sampled tokens of a case."""

NUM_TO_SEE_A_MISTAKE = 24_000

# The target and a draft model that is often wrong; [last but one, last, next].
TARGET = np.random.default_rng(1).normal(0, 1.2, (VOCAB_SIZE,) * 3).astype(np.float32)
DRAFT = TARGET + np.random.default_rng(2).normal(0, 0.9, TARGET.shape).astype(np.float32)

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.25},
    "penalties": {"frequency_penalty": 1.1, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {2: 1.5, 3: -2.0}, "top_p": 0.9},
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.02,
        "frequency_penalty": 0.9,
        "logit_bias": {1: 0.7},
    },
}

Propose = Callable[[list[int], SamplingParams, np.random.Generator], Draft]


def drawn(context: list[int], params: SamplingParams, rng: np.random.Generator) -> Draft:
    tokens, probs = list(context), []
    for _ in range(rng.integers(1, NUM_TOKENS)):
        weights = processed_weights(DRAFT[tokens[-2], tokens[-1]], replace(params, top_p=1.0, min_p=0.0))
        probs.append((weights / weights.sum()).astype(np.float32))
        tokens.append(int(rng.choice(VOCAB_SIZE, p=probs[-1] / probs[-1].sum(dtype=np.float64))))
    return Draft(tuple(tokens[len(context) :]), np.array(probs))


def chosen(context: list[int], params: SamplingParams, rng: np.random.Generator) -> Draft:
    tokens = list(context)
    for _ in range(rng.integers(1, NUM_TOKENS)):
        tokens.append(int(DRAFT[tokens[-2], tokens[-1]].argmax()))
    return Draft(tuple(tokens[len(context) :]))


def run(
    sampler: HostSampler, params: SamplingParams, propose: Propose, rng: np.random.Generator
) -> list[int]:
    sequence = Sequence(Request("r", PROMPT, replace(params, seed=int(rng.integers(2**62)))))
    while sequence.num_output_tokens < NUM_TOKENS:
        context = list(sequence.token_ids)
        draft = propose(context, params, rng)
        tokens = [*context, *draft.token_ids]
        logits = np.stack(
            [TARGET[tokens[i - 2], tokens[i - 1]] for i in range(len(context), len(tokens) + 1)]
        )
        for event in sampler.verify(logits, [Verification(sequence, 0, draft)])[0]:
            assert isinstance(event, TokenEvent)
            sequence.token_ids.append(event.token_id)
    sampler.forget(sequence)
    return sequence.output_token_ids[:NUM_TOKENS]


def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of each output of `NUM_TOKENS` tokens."""
    probabilities: dict[tuple[int, ...], float] = {}
    for output in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS):
        tokens, probability = list(PROMPT), 1.0
        for token_id in output:
            row = TARGET[tokens[-2], tokens[-1]].copy()
            for biased, bias in params.logit_bias.items():
                row[biased] += np.float32(bias)
            if has_penalties(params):
                counts = TokenCounts(Sequence(Request("r", PROMPT, params)))
                counts.update(Sequence(Request("r", PROMPT, params), 0, tokens))
                counts.apply(row, params)
            weights = processed_weights(row, params)
            probability *= float(weights[token_id] / weights.sum(dtype=np.float64))
            tokens.append(token_id)
        probabilities[output] = probability
    return probabilities


def p_value(propose: Propose, params: SamplingParams, num_samples: int, seed: int = 0) -> float:
    """How likely a chi-square this large is if outputs have the exact distribution; 0 for an impossible output."""
    rng = np.random.default_rng(seed)
    sampler = HostSampler(VOCAB_SIZE, [])
    num_runs = num_samples // NUM_TOKENS
    seen = Counter(tuple(run(sampler, params, propose, rng)) for _ in range(num_runs))
    probabilities = exact(params)
    assert math.isclose(sum(probabilities.values()), 1.0, rel_tol=1e-6)
    if any(probabilities[output] == 0.0 for output in seen):
        return 0.0
    chi_square, num_cells = 0.0, 0
    rare_seen, rare_expected = 0.0, 0.0
    for output, probability in probabilities.items():
        expected = probability * num_runs
        if expected < 5:
            rare_seen, rare_expected = rare_seen + seen[output], rare_expected + expected
        else:
            chi_square += (seen[output] - expected) ** 2 / expected
            num_cells += 1
    if rare_expected >= 5:
        chi_square += (rare_seen - rare_expected) ** 2 / rare_expected
        num_cells += 1
    degrees = num_cells - 1
    # Wilson and Hilferty (1931).
    z = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return math.erfc(z / math.sqrt(2)) / 2


@pytest.mark.parametrize("propose", [drawn, chosen], ids=["drawn", "chosen"])
@pytest.mark.parametrize("name", PARAMS)
def test_what_comes_out_has_the_target_s_distribution(name: str, propose: Propose) -> None:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": None, **PARAMS[name]})
    assert p_value(propose, params, NUM_SAMPLES) > 1e-4


def plain_redraw(
    weights: np.ndarray, probs: np.ndarray, token_id: int, accept: float, leftover: float
) -> int:
    """Draws from the target where the leftover should be drawn from."""
    if accept * float(probs[token_id]) < weights[token_id] / weights.sum():
        return token_id
    return sampler_module.draw(weights, leftover)


def test_a_redraw_from_the_target_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "accept_or_redraw", plain_redraw)
    assert p_value(drawn, SamplingParams(max_tokens=None), NUM_TO_SEE_A_MISTAKE) < 1e-9


@pytest.mark.parametrize("propose", [drawn, chosen], ids=["drawn", "chosen"])
def test_penalties_that_do_not_see_the_draft_are_seen(
    monkeypatch: pytest.MonkeyPatch, propose: Propose
) -> None:
    monkeypatch.setattr(TokenCounts, "push", lambda self, token_id: None)
    monkeypatch.setattr(TokenCounts, "pop", lambda self, token_id: None)
    params = SamplingParams(max_tokens=None, **PARAMS["penalties"])
    assert p_value(propose, params, NUM_TO_SEE_A_MISTAKE) < 1e-9


def test_a_last_token_from_the_draft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(
        self: HostSampler, row: np.ndarray, likeliest: int, verification: Verification, place: int
    ) -> int:
        if place < len(verification.draft):
            return original(self, row, likeliest, verification, place)
        context = [*verification.sequence.token_ids, *verification.draft.token_ids]
        return original(self, DRAFT[context[-2], context[-1]], likeliest, verification, place)

    original = HostSampler._choose
    monkeypatch.setattr(HostSampler, "_choose", choose)
    assert p_value(drawn, SamplingParams(max_tokens=None), NUM_TO_SEE_A_MISTAKE) < 1e-9


def test_chosen_drafts_give_the_very_same_tokens_with_a_seed() -> None:
    """So a seed means the same tokens, whatever is drafted."""
    rng = np.random.default_rng(3)
    for name in PARAMS:
        params = SamplingParams(max_tokens=None, **PARAMS[name])
        for seed in range(40):
            nothing = lambda context, params, _: Draft()  # noqa: E731
            drafts = lambda context, params, _: chosen(context, params, rng)  # noqa: E731
            alone, drafted = (
                run(HostSampler(VOCAB_SIZE, []), params, propose, np.random.default_rng(seed))
                for propose in (nothing, drafts)
            )
            assert alone == drafted, (name, seed)
