"""Sampling: order of processing, log-probabilities, seeds, and errors that stay in their row."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import EngineError, RequestError
from pelton.runtime.grammar.mask_filler import MaskRows
from pelton.runtime.outputs import TokenEvent, TokenLogprob
from pelton.runtime.penalties import TokenCounts
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sampler import LOGPROB_FLOOR, HostSampler, Verification, uniform_at
from pelton.runtime.sequence import Sequence
from pelton.runtime.truncation import draw, processed_weights
from support.sampling import sample_each

VOCAB = 300
EOS = 7


def sequence(
    output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2), index: int = 0, **params: Any
) -> Sequence:
    params = {"temperature": 0.0, "seed": 0, "max_tokens": None, **params}
    request = Request("r", prompt, SamplingParams(**params))
    return Sequence(request, index, [*prompt, *output])


def logits_of(*rows: dict[int, float], base: float = 0.0) -> np.ndarray:
    logits = np.full((len(rows), VOCAB), base, np.float32)
    for row, values in zip(logits, rows, strict=True):
        for token_id, value in values.items():
            row[token_id] = value
    return logits


def noise(rows: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * scale).astype(np.float32)


def sample(logits: np.ndarray, *sequences: Sequence, sampler: HostSampler | None = None) -> list[TokenEvent]:
    events = sample_each(sampler or HostSampler(VOCAB, [EOS]), logits, list(sequences))
    assert all(isinstance(event, TokenEvent) for event in events)
    return events  # type: ignore[return-value]


def chosen(logits: np.ndarray, *sequences: Sequence) -> list[int]:
    return [event.token_id for event in sample(logits, *sequences)]


def test_greedy_takes_the_largest_and_of_equal_ones_the_lowest_id() -> None:
    logits = logits_of({5: 3.0, 200: 3.0}, {9: 1.0}, {})
    greedy = [sequence(temperature=temperature) for temperature in (0.0, 1e-6, 0.0)]
    assert chosen(logits, *greedy) == [5, 9, 0]
    assert sample_each(HostSampler(VOCAB, []), logits[:0], []) == []


def test_the_models_logits_stay_unchanged() -> None:
    logits = noise(2)
    before = logits.copy()
    logits.flags.writeable = False
    sample(
        logits,
        sequence(logit_bias={1: 5.0}, min_tokens=1),
        sequence((3,), temperature=1.0, top_p=0.5, min_p=0.1),
    )
    assert np.array_equal(logits, before)


def test_min_tokens_masks_eos_and_stop_ids_until_it_is_reached() -> None:
    logits = logits_of({EOS: 9.0, 20: 8.0, 30: 7.0})
    params: dict[str, Any] = {"stop_token_ids": (20,), "min_tokens": 2}
    assert chosen(logits, sequence(**params)) == [30]
    assert chosen(logits, sequence((1,), **params)) == [30]
    assert chosen(logits, sequence((1, 1), **params)) == [EOS]
    # Also with ignore_eos, as in vLLM; ignore_eos alone masks nothing.
    assert chosen(logits, sequence(ignore_eos=True, **params)) == [30]
    assert chosen(logits, sequence(ignore_eos=True)) == [EOS]
    # A bias does not bring a masked token back.
    assert chosen(logits, sequence(logit_bias={EOS: 100.0}, **params)) == [30]


def test_eos_ids_outside_the_models_vocabulary_are_harmless() -> None:
    sampler = HostSampler(VOCAB, [EOS, VOCAB, -1])
    assert sample_each(sampler, logits_of({EOS: 1.0, 4: 0.5}), [sequence(min_tokens=1)]) == [TokenEvent(4)]


def test_bias_comes_before_penalties() -> None:
    # (2 + 2) / 2 = 2, not 2 / 2 + 2 = 3.
    logits = logits_of({50: 2.0, 60: 2.5})
    assert chosen(logits, sequence((50,), logit_bias={50: 2.0}, repetition_penalty=2.0)) == [60]


@pytest.mark.parametrize("value", [3.0, -3.0])
def test_repetition_penalty_counts_prompt_and_output(value: float) -> None:
    logits = logits_of({50: value, 60: value - 0.1}, base=-9.0)
    assert chosen(logits, sequence(repetition_penalty=1.2)) == [50]
    assert chosen(logits, sequence((50,), repetition_penalty=1.2)) == [60]
    assert chosen(logits, sequence(prompt=(50,), repetition_penalty=1.2)) == [60]
    assert chosen(logits, sequence(prompt=(50, 60), repetition_penalty=1.2)) == [50]
    assert chosen(logits, sequence((60,), repetition_penalty=0.8)) == [60]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_count_the_output_alone(name: str) -> None:
    logits = logits_of({50: 3.0, 60: 2.0})
    assert chosen(logits, sequence(prompt=(50, 50), **{name: 1.5})) == [50]
    assert chosen(logits, sequence((50,), **{name: 1.5})) == [60]
    assert chosen(logits, sequence((60,), **{name: -1.5})) == [60]
    twice = chosen(logits, sequence((50, 50), prompt=(50,), **{name: 0.6}))
    assert twice == [60 if name == "frequency_penalty" else 50]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(1, 60), st.data())
def test_penalties_counted_step_by_step_equal_those_of_a_fresh_start(
    output: list[int], num_prompt: int, data: st.DataObject
) -> None:
    """Counts are a function of the tokens, however many of them came at once."""
    prompt = tuple(range(num_prompt))
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4}
    grown, fresh = sequence(prompt=prompt, **params), sequence(tuple(output), prompt, **params)
    counts = TokenCounts(grown)
    while grown.num_output_tokens < len(output):
        start = grown.num_output_tokens
        grown.token_ids.extend(output[start : start + data.draw(st.integers(1, 20))])
        counts.update(grown)
    logits = noise(1, seed=len(output))[0]
    stepwise, at_once, expected = logits.copy(), logits.copy(), logits.astype(np.float64)
    counts.apply(stepwise, grown.request.params)
    once = TokenCounts(fresh)
    once.update(fresh)
    once.apply(at_once, fresh.request.params)
    for token_id in {*prompt, *output}:
        value = expected[token_id]
        expected[token_id] = value / 1.3 if value > 0 else value * 1.3
        expected[token_id] -= 0.2 * output.count(token_id) + 0.4 * (token_id in output)
    assert np.array_equal(stepwise, at_once)
    assert stepwise == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_sampler_keeps_counts_from_step_to_step(forgets: bool) -> None:
    """Also a sequence that was preempted, or restarted elsewhere, is penalised for all of its output."""
    logits = logits_of({50: 3.0, 60: 2.5, 70: 2.0})
    sampler, row = HostSampler(VOCAB, []), sequence(frequency_penalty=0.3)
    for _ in range(9):
        if forgets:
            sampler.forget(row)
        row.token_ids.append(sample(logits, row, sampler=sampler)[0].token_id)
    assert row.output_token_ids == [50, 50, 60, 50, 60, 50, 70, 60, 50]


def test_forget_twice_and_before_use() -> None:
    sampler, one = HostSampler(VOCAB, []), sequence((1,), presence_penalty=1.0)
    sampler.forget(one)
    sample(noise(1), one, sampler=sampler)
    sampler.forget(one)
    sampler.forget(one)


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 9_999_999, -1, 0])
def test_sa_01_top_k_of_the_vocabulary_and_beyond(top_k: int) -> None:
    logits = noise(40)
    rows = [sequence(temperature=0.9, seed=i, top_k=top_k) for i in range(40)]
    HostSampler(VOCAB, [EOS]).validate(rows[0].request.params)
    assert chosen(logits, *rows) == chosen(logits, *[sequence(temperature=0.9, seed=i) for i in range(40)])


def test_sa_01_a_batch_of_greedy_rows_and_rows_with_top_k() -> None:
    logits = noise(30)
    kinds = [{}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_k": 1}]
    rows = [sequence(seed=i, **kinds[i % 3]) for i in range(30)]
    together = chosen(logits, *rows)
    assert together == [chosen(logits[i : i + 1], rows[i])[0] for i in range(30)]
    assert [together[i] for i in range(2, 30, 3)] == logits[2::3].argmax(1).tolist()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: 1.0, 10**12: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (VOCAB,), "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": (5, VOCAB + 1)}, "stop_token_ids"),
    ],
)
def test_sa_02_token_ids_outside_the_models_vocabulary_name_the_field(
    params: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        HostSampler(VOCAB, [EOS]).validate(sequence(**params).request.params)
    assert caught.value.field == field
    # A model padded to more rows than the tokenizer has tokens knows the id.
    HostSampler(10**12 + 1, [EOS]).validate(sequence(**params).request.params)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_sa_02_more_logprobs_than_tokens(field: str) -> None:
    params = sequence(**{field: 12}).request.params
    HostSampler(12, []).validate(params)
    with pytest.raises(RequestError) as caught:
        HostSampler(11, []).validate(params)
    assert caught.value.field == field


def test_sa_02_the_last_id_of_the_vocabulary_is_valid() -> None:
    last = VOCAB - 1
    row = sequence(logit_bias={last: 100.0}, stop_token_ids=(last,))
    HostSampler(VOCAB, [EOS]).validate(row.request.params)
    assert chosen(logits_of({}), row) == [last]


def run_alone(logits: np.ndarray, num_steps: int = 12, **params: Any) -> list[int]:
    """Output of one sequence whose step s sees row s."""
    sampler, row = HostSampler(VOCAB, [EOS]), sequence(**params)
    for step in range(num_steps):
        row.token_ids.append(sample(logits[step : step + 1], row, sampler=sampler)[0].token_id)
    return row.output_token_ids


@pytest.mark.parametrize("mates", [0, 1, 7])
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9, "frequency_penalty": 0.3}])
def test_sa_04_a_seeded_request_does_not_depend_on_its_mates(
    mates: int, place: str, extra: dict[str, Any]
) -> None:
    logits = noise(12)
    params = {"temperature": 0.8, "seed": 1234, **extra}
    alone = run_alone(logits, **params)
    assert len(set(alone)) > 3
    sampler, row = HostSampler(VOCAB, [EOS]), sequence(**params)
    others = [sequence(temperature=1.0, seed=i * 31 + 5) for i in range(mates)]
    for step in range(12):
        if step in (5, 9):
            # Preempted: computed tokens are lost, the tokens themselves are not.
            row.num_computed_tokens = 0
            sampler.forget(row)
        batch = [row, *others] if place == "first" else [*others, row]
        matrix = noise(len(batch), seed=1000 + step)
        matrix[batch.index(row)] = logits[step]
        for member, event in zip(batch, sample(matrix, *batch, sampler=sampler), strict=True):
            member.token_ids.append(event.token_id)
    assert row.output_token_ids == alone


def test_sa_04_seed_choice_and_position_each_change_the_draw() -> None:
    logits = np.repeat(noise(1, scale=0.1), 12, axis=0)
    first = run_alone(logits, temperature=1.0, seed=1)
    assert first == run_alone(logits, temperature=1.0, seed=1)
    assert first != run_alone(logits, temperature=1.0, seed=2)
    assert len(set(first)) > 6
    choices = [sequence(temperature=1.0, seed=1, index=index) for index in range(12)]
    assert len(set(chosen(logits, *choices))) > 6


def test_sa_04_uniform_numbers_are_uniform_and_independent() -> None:
    draws = np.array([[uniform_at(seed, 0, position) for position in range(200)] for seed in range(-50, 50)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, 50, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 94.0  # chi-square of 49 degrees, p = 1e-4
    for lagged in (draws[1:].ravel() - 0.5, draws[:, 1:].ravel() - 0.5):
        other = draws[:-1].ravel() if len(lagged) == 99 * 200 else draws[:, :-1].ravel()
        assert abs(np.mean(lagged * (other - 0.5)) * 12) < 0.03
    edges = [-(2**63), -1, 0, 2**64 - 1]
    assert len({uniform_at(seed, 0, 0) for seed in edges}) == len(edges)


def test_a_sampling_request_without_a_seed_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(noise(1), sequence(temperature=1.0, seed=None))
    assert sample(noise(1), sequence(temperature=0.0, seed=None))
    with pytest.raises(ValueError, match="shape"):
        sample_each(HostSampler(VOCAB + 1, []), noise(1), [sequence()])


@pytest.mark.parametrize(
    "poison", [{3: math.nan}, {299: math.nan}, {3: math.inf}, {3: math.inf, 4: math.nan}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sa_06_a_poisoned_row_fails_alone(poison: dict[int, float], temperature: float) -> None:
    logits = noise(4)
    rows = [sequence(temperature=temperature, seed=i, logprobs=2, presence_penalty=i % 2) for i in range(4)]
    expected = sample(logits, *rows)
    for token_id, value in poison.items():
        logits[2, token_id] = value
    events = sample_each(HostSampler(VOCAB, [EOS]), logits, rows)
    assert isinstance(events[2], EngineError)
    assert "request r" in str(events[2])
    assert [events[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


def test_sa_06_rows_with_nothing_left_fail_alone() -> None:
    logits = logits_of({EOS: 1.0}, {}, base=-math.inf)
    logits[1] = -math.inf
    events = sample_each(
        HostSampler(VOCAB, [EOS]), logits, [sequence(min_tokens=1), sequence(temperature=1.0)]
    )
    assert [type(event) for event in events] == [EngineError, EngineError]
    assert "min_tokens" in str(events[0])
    assert sample_each(HostSampler(VOCAB, [EOS]), logits[:1], [sequence(temperature=1.0)]) == [
        TokenEvent(EOS)
    ]


def strict(logprob: TokenLogprob) -> str:
    return json.dumps([logprob.logprob, logprob.top, logprob.rank], allow_nan=False)


@pytest.mark.parametrize(
    "params", [{"top_k": 1, "temperature": 1.0}, {"min_tokens": 1}, {"logit_bias": {9: -100.0}}]
)
def test_sa_06_logprobs_are_finite_and_of_the_models_own_logits(params: dict[str, Any]) -> None:
    logits = noise(1)
    logits[0, 100:] = -np.inf
    logits[0, 50] = -3e38
    event = sample(logits, sequence(logprobs=5, **params))[0]
    assert event.logprob is not None
    assert strict(event.logprob)
    exact = logits[0].astype(np.float64)
    exact -= np.logaddexp.reduce(exact)
    order = np.argsort(-exact, kind="stable")[:5].tolist()
    assert [token_id for token_id, _ in event.logprob.top] == order
    assert [value for _, value in event.logprob.top] == pytest.approx(exact[order].tolist(), abs=1e-5)
    assert event.logprob.logprob == pytest.approx(exact[event.token_id], abs=1e-5)
    assert event.logprob.rank == 1 + (exact > exact[event.token_id]).sum()


@pytest.mark.parametrize("density", [0.005, 0.1, 0.4, 0.6, 0.99, 1.0])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1, "temperature": 3.0}], ids=str
)
def test_a_form_leaves_the_distribution_of_what_it_allows(density: float, params: dict[str, Any]) -> None:
    rng = np.random.default_rng(int(100 * density))
    for seed, logits in enumerate(noise(40, seed=3)):
        is_allowed = rng.random(VOCAB) < density
        is_allowed[rng.integers(VOCAB)] = True
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[:VOCAB] = is_allowed
        masks = MaskRows(np.packbits(bits, bitorder="little").view(np.int32)[None])
        drawing = sequence(seed=seed, **{"temperature": 1.0, **params})
        one = Verification(drawing, 0, masks=masks)
        [[event]] = HostSampler(VOCAB, [EOS]).verify(logits[None], [one])
        weights = processed_weights(
            np.where(is_allowed, logits, -np.inf).astype(np.float32), drawing.request.params
        )
        assert isinstance(event, TokenEvent)
        assert event.token_id == draw(weights, uniform_at(seed, 0, 0))


def test_sa_06_masked_entries_are_left_out_and_low_ones_clamped() -> None:
    logits = logits_of({3: 0.0, 4: -20000.0}, base=-math.inf)
    event = sample(logits, sequence(logprobs=5))[0]
    assert event.logprob == TokenLogprob(3, 0.0, ((3, 0.0), (4, LOGPROB_FLOOR)), 1)
    forced = HostSampler(VOCAB, []).prompt_logprobs(logits, [9], 1)[0]
    assert forced == TokenLogprob(9, LOGPROB_FLOOR, ((3, 0.0),), 10)
    assert strict(forced)


def test_equal_logits_are_ranked_by_id() -> None:
    logits = logits_of({5: 1.0, 8: 1.0, 2: 0.5})
    for token_id, rank in ((5, 1), (8, 2), (2, 3), (0, 4), (1, 5), (3, 6)):
        logprob = HostSampler(VOCAB, []).prompt_logprobs(logits, [token_id], 4)[0]
        assert logprob.rank == rank
        assert [top for top, _ in logprob.top] == [5, 8, 2, 0]


def test_prompt_logprobs_score_row_by_row() -> None:
    logits = noise(6)
    ids = [3, 299, 0, 7, 7, 100]
    scores = HostSampler(VOCAB, []).prompt_logprobs(logits, ids, 0)
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact, axis=1)[:, None]
    assert [score.logprob for score in scores] == pytest.approx(exact[range(6), ids].tolist(), abs=1e-5)
    assert all(score.top == () for score in scores)
    assert HostSampler(VOCAB, []).prompt_logprobs(logits[:0], [], 3) == []
    logits[4, 9] = np.nan
    with pytest.raises(EngineError):
        HostSampler(VOCAB, []).prompt_logprobs(logits, ids, 2)


def test_logprobs_zero_gives_the_chosen_token_alone() -> None:
    event = sample(noise(1), sequence(logprobs=0))[0]
    assert event.logprob is not None
    assert (event.logprob.token_id, event.logprob.top, event.logprob.rank) == (event.token_id, (), 1)
    assert sample(noise(1), sequence())[0].logprob is None
    many = sample(noise(1), sequence(logprobs=64))[0].logprob
    assert many is not None
    assert len(many.top) == 64
