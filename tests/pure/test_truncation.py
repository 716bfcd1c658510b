"""The processed distribution equals its definition, and samples follow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sampler import HostSampler
from pelton.runtime.sequence import Sequence
from pelton.runtime.truncation import draw, processed_weights
from support.sampling import sample_each


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities by the definition, one token at a time down the ranking."""
    weights = np.exp((logits - logits.max()) / logits.dtype.type(params.temperature)).astype(np.float64)
    ranking = sorted(range(len(weights)), key=lambda i: (-logits[i], i))
    kept = [i for i in ranking if weights[i] >= logits.dtype.type(params.min_p)]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    share, mass = params.top_p * sum(weights[i] for i in kept), 0.0
    probabilities = np.zeros_like(weights)
    for i in kept:
        probabilities[i] = weights[i]
        mass += weights[i]
        if params.top_p < 1.0 and mass >= share:
            break
    return probabilities / probabilities.sum()


def processed(logits: np.ndarray, **params: Any) -> np.ndarray:
    weights = processed_weights(logits, SamplingParams(**params))
    return weights / weights.sum(dtype=np.float64)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.floats(0.01, 4.0),
    st.floats(0.2, 5.0),
    st.floats(0.01, 1.0),
    st.integers(-1, 3000),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    st.booleans(),
)
def test_weights_equal_the_definition(
    seed: int,
    size: int,
    scale: float,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    masked: bool,
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * scale).astype(np.float32)
    if masked:
        logits[rng.random(size) < 0.5] = -np.inf
        logits[rng.integers(size)] = 1.0
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    ours, exact = processed(logits, **params), reference(logits, SamplingParams(**params))
    assert np.array_equal(ours > 0, exact > 0)
    assert ours == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.9, 4), (1e-9, 1)]
)
def test_top_p_keeps_the_smallest_set_that_has_the_share(top_p: float, kept: int) -> None:
    """Equal logits are kept by id, and a share that is met exactly needs no further token."""
    probabilities = processed(np.zeros(4, np.float32), top_p=top_p)
    assert np.flatnonzero(probabilities).tolist() == list(range(kept))


@pytest.mark.parametrize("size", [5000, 49152])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.3, 3.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999999])
def test_top_p_of_flat_and_peaked_rows(size: int, scale: float, top_p: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(size) * scale).astype(np.float32)
    weights = processed_weights(logits, SamplingParams(top_p=top_p))
    ranking = np.lexsort((np.arange(size), -logits))
    full = np.exp((logits - logits.max()).astype(np.float64))[ranking]
    count = int(np.count_nonzero(weights))
    assert np.flatnonzero(weights[ranking]).tolist() == list(range(count))
    mass = np.cumsum(full) / full.sum()
    assert mass[count - 1] >= top_p - 1e-6
    assert count == 1 or mass[count - 2] < top_p + 1e-6


def test_top_k_keeps_exactly_k_of_equal_logits_by_id() -> None:
    logits = np.array([0, 2, 1, 2, 1, 1, 0], np.float32)
    for k, kept in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 5])):
        assert np.flatnonzero(processed(logits, top_k=k)).tolist() == kept


def test_top_p_shares_what_top_k_and_min_p_leave() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert np.flatnonzero(processed(logits, top_p=0.6)).tolist() == [0, 1]
    assert np.flatnonzero(processed(logits, top_p=0.55, top_k=2)).tolist() == [0]
    assert np.flatnonzero(processed(logits, top_p=0.5, min_p=0.7)).tolist() == [0]
    # min_p is relative to the likeliest token, after the temperature.
    assert np.flatnonzero(processed(logits, min_p=0.6)).tolist() == [0, 1]
    assert np.flatnonzero(processed(logits, min_p=0.6, temperature=2.0)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([1e4, -1e4, 9999.0, -np.inf], np.float32)
    weights = processed_weights(logits, SamplingParams(temperature=temperature))
    assert np.isfinite(weights).all()
    assert weights[0] == 1.0
    assert weights[3] == 0.0


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}])
def test_zeros_of_both_signs_are_equal_logits(params: dict[str, Any]) -> None:
    for zeros in ((-0.0, 0.0, -0.0), (0.0, -0.0, 0.0)):
        logits = np.array([*zeros[:2], -9.0, zeros[2]], np.float32)
        weights = processed_weights(logits, SamplingParams(**params))
        assert np.flatnonzero(weights).tolist() == ([0, 1, 3] if "min_p" in params else [0, 1])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 700), st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 2**32), st.booleans())
def test_a_draw_inverts_the_cumulative_distribution(
    size: int, uniform: float, seed: int, sparse: bool
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(size).astype(np.float32)
    if sparse:
        weights[rng.random(size) < 0.95] = 0.0
        weights[rng.integers(size)] = 1.0
    place = draw(weights, uniform)
    assert weights[place] > 0.0
    cumulative = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    assert cumulative[place] >= uniform - 1e-9
    assert place == 0 or cumulative[place - 1] <= uniform + 1e-9


def test_the_ends_of_a_draw() -> None:
    weights = np.zeros(1000, np.float32)
    weights[[3, 600]] = 1.0
    last = float(np.nextafter(1.0, 0.0))
    assert [draw(weights, u) for u in (0.0, 0.4999, 0.5, last)] == [3, 3, 600, 600]
    # However the sums are rounded, the last draw is the last token that has weight.
    for seed in range(300):
        weights = np.zeros(700, np.float32)
        weights[300:450] = np.random.default_rng(seed).random(150) + 0.01
        assert draw(weights, last) == 449


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": -0.5},
    {"temperature": 1.2, "logit_bias": {0: 2.0, 5: -3.0}, "min_tokens": 9, "top_p": 0.95},
]
CRITICAL = {
    1: 15.1,
    2: 18.4,
    3: 21.1,
    4: 23.5,
    5: 25.7,
    6: 27.9,
    7: 29.9,
    8: 31.8,
    9: 33.7,
    10: 35.6,
    11: 37.4,
}


@pytest.mark.parametrize("params", CASES, ids=lambda params: "-".join(params))
def test_samples_follow_the_processed_distribution(params: dict[str, Any]) -> None:
    """Chi-square of draws with a seed each, at p = 1e-4 for 1 to 11 degrees of freedom."""
    size, eos, num_draws = 12, 11, 6_000
    logits = np.array([1.5, 0.3, -0.2, 0.9, 2.0, 1.1, -1.0, 0.0, 0.7, -2.0, 1.0, 1.8], np.float32)
    prompt, output = (1, 4), (4, 0, 4, 8)
    row = logits.astype(np.float64)
    if params.get("min_tokens"):
        row[eos] = -np.inf
    for token_id, bias in params.get("logit_bias", {}).items():
        row[token_id] += bias
    for token_id in {*prompt, *output}:
        penalty = params.get("repetition_penalty", 1.0)
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id in set(output):
        row[token_id] -= params.get("frequency_penalty", 0.0) * output.count(token_id)
        row[token_id] -= params.get("presence_penalty", 0.0)
    expected = reference(row, SamplingParams(max_tokens=None, **params)) * num_draws
    sampler = HostSampler(size, [eos])
    sequences = [
        Sequence(
            Request("r", prompt, SamplingParams(seed=seed, max_tokens=None, **params)), 0, [*prompt, *output]
        )
        for seed in range(num_draws)
    ]
    events = sample_each(sampler, np.repeat(logits[None], num_draws, axis=0), sequences)
    counts = np.bincount([event.token_id for event in events], minlength=size)  # type: ignore[union-attr]
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < CRITICAL[int(possible.sum()) - 1]
