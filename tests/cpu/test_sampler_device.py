"""`DeviceSampler` on tensors of the CPU: the host's tokens, and each row as if it were alone."""

from __future__ import annotations

import math
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pelton.errors import EngineError, RequestError
from pelton.plugins_trt.sampling_memory import (
    DRAWN_LOGIT,
    GREEDY_LOGIT,
    SCORED_LOGIT,
    SORTED_LOGIT,
    SamplerSizes,
    sampler_sizes,
)
from pelton.runtime.outputs import TokenEvent, TokenLogprob
from pelton.runtime.penalties_device import CountSlots
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sampler import HostSampler, uniform_at
from pelton.runtime.sampler_device import DeviceSampler
from pelton.runtime.sequence import Sequence
from pelton.runtime.truncation import draw as host_draw
from pelton.runtime.truncation import processed_weights
from pelton.runtime.truncation_device import costs, draw, weights_of
from support.sampling import sample_each

EOS = 3
# Where the host's token changes when what is compared changes by this share, rounding may decide: float32 weights are
# good to some 2^-23.
ROUNDING = 2.0**-20


def small_sizes(vocab_size: int) -> SamplerSizes:
    """Rows are worked on two or three at a time, few fit into a pass, and fewer have counts."""
    sizes = sampler_sizes(vocab_size, 7)
    return replace(sizes, num_count_slots=3, scratch_bytes=200 * vocab_size)


def sequence(output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2), **params: Any) -> Sequence:
    params = {"temperature": 0.0, "seed": 0, "max_tokens": None, **params}
    return Sequence(Request("r", prompt, SamplingParams(**params)), 0, [*prompt, *output])


def some_params(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    token = lambda: rng.randrange(vocab_size)  # noqa: E731
    choices: dict[str, Callable[[], Any]] = {
        "top_k": lambda: rng.choice([-1, 1, 2, 5, 50, vocab_size - 1, vocab_size, vocab_size + 3]),
        "top_p": lambda: rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999]),
        "min_p": lambda: rng.choice([0.01, 0.1, 0.9, 1.0]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3, 2.0]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.3]),
        "presence_penalty": lambda: rng.choice([-0.5, 0.3]),
        "logit_bias": lambda: {
            token(): rng.uniform(-1, 1) * rng.choice([1, 9, 100]) for _ in range(rng.randrange(1, 9))
        },
        "min_tokens": lambda: rng.choice([1, 5]),
        "stop_token_ids": lambda: (token(), token(), token()),
        "logprobs": lambda: min(vocab_size, rng.choice([0, 1, 5, 64])),
    }
    params = {name: choose() for name, choose in choices.items() if rng.random() < 0.3}
    temperature = rng.choice([0.0, 0.0, 1e-6, 1e-5, 0.3, 0.7, 1.0, 1.0, 1.5, 100.0])
    return {"temperature": temperature, "seed": rng.getrandbits(60), **params}


def some_batch(rng: random.Random, vocab_size: int) -> list[Sequence]:
    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(low, high)))

    return [
        sequence(tokens(0, 30), tokens(1, 40), **some_params(rng, vocab_size))
        for _ in range(rng.randrange(1, 20))
    ]


def some_logits(rng: random.Random, num_rows: int, vocab_size: int) -> np.ndarray:
    """Peaked or flat; at times with ties, zeros of both signs, masked tokens, and rows that nothing can be made of."""
    noise = np.random.default_rng(rng.getrandbits(32))
    logits = (noise.standard_normal((num_rows, vocab_size)) * rng.choice([0.1, 3, 10])).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    if rng.random() < 0.3:
        logits[:, noise.random(vocab_size) < 0.5] = -np.inf
    for value in (np.nan, np.inf, -np.inf):
        if rng.random() < 0.1:
            logits[
                rng.randrange(num_rows), rng.randrange(vocab_size) if value != -np.inf else slice(None)
            ] = value
    return logits


def rounded_tokens(host: HostSampler, logits: np.ndarray, member: Sequence) -> set[int]:
    """The tokens that the host draws when the uniform number, top_p or min_p are changed by `ROUNDING`."""
    params = member.request.params
    if params.temperature < 1e-5 or params.seed is None:
        return set()
    processed = host._process(logits, member, (), None, host._counts_of(member))
    uniform = uniform_at(params.seed, member.index, member.num_output_tokens)
    tokens = set()
    for up in (-ROUNDING, 0.0, ROUNDING):
        for share in (-ROUNDING, 0.0, ROUNDING):
            changed = replace(
                params,
                top_p=min(params.top_p * (1 + share), 1.0) if params.top_p < 1.0 else 1.0,
                min_p=min(params.min_p * (1 + share), 1.0),
            )
            weights = processed_weights(logits if processed is None else processed, changed)
            tokens.add(host_draw(weights, min(max(uniform + up, 0.0), 1.0 - 2.0**-53)))
    return tokens


def check_logprob(got: TokenLogprob | None, expected: TokenLogprob | None) -> None:
    assert (got is None) == (expected is None)
    if got is None or expected is None:
        return
    assert (got.token_id, got.rank) == (expected.token_id, expected.rank)
    assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in expected.top]
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert [x for _, x in got.top] == pytest.approx([x for _, x in expected.top], abs=1e-5)


@pytest.mark.parametrize("vocab_size", [5, 256, 300, 5000])
@pytest.mark.parametrize("sizes", [sampler_sizes, small_sizes], ids=["roomy", "tight"])
def test_tokens_logprobs_and_errors_are_the_host_s(
    vocab_size: int, sizes: Callable[..., SamplerSizes]
) -> None:
    """Some hundreds of combinations over three steps each; rows are shared and in any order."""
    rng = random.Random(vocab_size)
    given = sampler_sizes(vocab_size, 64) if sizes is sampler_sizes else small_sizes(vocab_size)
    num_rounded = num_tokens = num_errors = 0
    for _ in range(12):
        batch = some_batch(rng, vocab_size)
        host = HostSampler(vocab_size, [EOS, vocab_size])
        device = DeviceSampler(vocab_size, [EOS, vocab_size], sizes=given)
        for _ in range(3):
            logits = some_logits(rng, len(batch) + 2, vocab_size)
            rows = [rng.randrange(len(logits)) for _ in batch]
            before = logits.copy()
            events = sample_each(device, torch.from_numpy(logits), batch, rows)
            np.testing.assert_array_equal(logits, before, "logits stay unchanged")
            for member, row, got, expected in zip(
                batch, rows, events, sample_each(host, logits, batch, rows), strict=True
            ):
                if isinstance(expected, EngineError):
                    num_errors += 1
                    assert (type(got), str(got)) == (EngineError, str(expected))
                    continue
                assert isinstance(got, TokenEvent)
                num_tokens += 1
                if got.token_id == expected.token_id:
                    check_logprob(got.logprob, expected.logprob)
                else:
                    num_rounded += 1
                    assert got.token_id in rounded_tokens(host, logits[row], member), member.request.params
                member.token_ids.append(expected.token_id)
    assert num_tokens > 200
    assert num_errors > 0
    assert num_rounded <= num_tokens // 200


@pytest.mark.parametrize("count", [0, 1, 9, 64])
@pytest.mark.parametrize("sizes", [None, small_sizes(300)], ids=["roomy", "tight"])
def test_prompt_logprobs_are_the_host_s(count: int, sizes: SamplerSizes | None) -> None:
    rng = random.Random(count)
    logits = np.round(np.random.default_rng(0).standard_normal((20, 300)) * 5, 1).astype(np.float32)
    logits[3, 10:] = -np.inf
    logits[4, 7] = -3e38
    ids = [rng.randrange(300) for _ in range(20)]
    device = DeviceSampler(300, [], sizes=sizes)
    expected = HostSampler(300, []).prompt_logprobs(logits, ids, count)
    for got, wanted in zip(
        device.prompt_logprobs(torch.from_numpy(logits), ids, count), expected, strict=True
    ):
        check_logprob(got, wanted)
    assert device.prompt_logprobs(torch.from_numpy(logits[:0]), [], count) == []
    for poison in (np.nan, np.inf):
        logits[13, 5] = poison
        with pytest.raises(EngineError, match="NaN or infinite"):
            device.prompt_logprobs(torch.from_numpy(logits), ids, count)


def test_a_row_is_the_same_to_the_bit_in_every_batch() -> None:
    """Alone, among others, elsewhere in the batch, in another chunk, with more threads; log-probabilities included."""
    vocab_size, rng = 3001, random.Random(1)
    logits = torch.from_numpy(some_logits(random.Random(11), 40, vocab_size))
    batch = [
        sequence((5, 9, 5), (1, 2, 7), **{**some_params(rng, vocab_size), "logprobs": rng.choice([None, 4])})
        for _ in range(40)
    ]
    fresh = lambda: DeviceSampler(vocab_size, [EOS])  # noqa: E731
    alone = [str(sample_each(fresh(), logits, [member], [i])[0]) for i, member in enumerate(batch)]
    assert len(set(alone)) > 20
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for sizes in (None, small_sizes(vocab_size)):
                order = rng.sample(range(40), 40)
                sampler = DeviceSampler(vocab_size, [EOS], sizes=sizes)
                events = sample_each(sampler, logits, [batch[i] for i in order], order)
                assert [str(event) for event in events] == [alone[i] for i in order]
            pair = sample_each(fresh(), logits[10:12], batch[10:12])
            assert [str(event) for event in pair] == alone[10:12]
    finally:
        torch.set_num_threads(threads)


def test_zeros_of_both_signs_are_one_cost() -> None:
    """A device's sort may look at bits."""
    for zero in (0.0, -0.0):
        logits = torch.tensor([[0.0, -0.0, -1.0]])
        assert not costs(logits, torch.tensor([zero]), torch.tensor([0.5])).signbit().any()


def test_weights_do_not_depend_on_where_a_row_stands() -> None:
    """What batch invariance rests on: the same bits from exp at any alignment, and sums in any order."""
    row = torch.randn(3001) * 4
    row = row.max() - row
    expected = weights_of(row.clone()[None])[0]
    for offset in range(1, 20):
        shifted = torch.zeros(3001 * 2 + offset)[offset:].view(2, 3001)
        shifted[1] = row
        assert torch.equal(weights_of(shifted)[1], expected)
    assert expected.sum() == expected.flip(0).sum() == sum(expected.tolist())


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]
# Of chi-square at p = 1e-4, by degrees of freedom.
CRITICAL = dict(enumerate([15.1, 18.4, 21.1, 23.5, 25.7, 27.9, 29.9, 31.8, 33.7, 35.6, 37.4], 1))


@pytest.mark.parametrize("params", CASES, ids=lambda params: "-".join(params))
def test_samples_follow_the_processed_distribution(params: dict[str, Any]) -> None:
    logits = np.array([1.5, 0.3, -0.2, 0.9, 2.0, 1.1, -1.0, 0.0, 0.7, -2.0, 1.0, 1.8], np.float32)
    num_draws = 6000
    batch = [sequence(**{**params, "seed": seed}) for seed in range(num_draws)]
    sampler = DeviceSampler(12, [], sizes=sampler_sizes(12, num_draws))
    events = sample_each(sampler, torch.from_numpy(np.repeat(logits[None], num_draws, 0)), batch)
    counts = np.bincount([event.token_id for event in events], minlength=12)  # type: ignore[union-attr]
    weights = processed_weights(logits, batch[0].request.params).astype(np.float64)
    expected = weights / weights.sum() * num_draws
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < CRITICAL[int(possible.sum()) - 1]


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 512, 1000])
def test_the_ends_of_a_draw(size: int) -> None:
    """Never a token without weight, nor one past the end; the smallest number is the first, the largest the last."""
    ends = torch.tensor([0.0, math.nextafter(1.0, 0.0), 0.5], dtype=torch.float64)
    costs = torch.full((3, size), torch.inf)
    kept = sorted({size // 3, size // 2, (2 * size) // 3})
    costs[:, kept] = 0.0
    assert draw(weights_of(costs), ends).tolist() == [kept[0], kept[-1], kept[len(kept) // 2]]
    assert draw(weights_of(torch.zeros(3, size)), ends).tolist() == [0, size - 1, size // 2]


def test_counts_are_bounded_and_freed_and_made_again() -> None:
    """More sequences with penalties than slots, and forgotten ones: each is penalised for all of its output."""
    sizes = small_sizes(300)
    sampler, host = DeviceSampler(300, [], sizes=sizes), HostSampler(300, [])
    logits = (np.random.default_rng(3).standard_normal((9, 300)) * 0.3).astype(np.float32)
    batch = [sequence(frequency_penalty=0.5, repetition_penalty=1.2, prompt=(i, 9)) for i in range(9)]
    for step in range(8):
        some = batch if step % 2 else batch[: 2 + step // 2]
        rows = list(range(len(some)))
        events = sample_each(sampler, torch.from_numpy(logits), some, rows)
        assert events == sample_each(host, logits, some, rows)
        for member, event in zip(some, events, strict=True):
            assert isinstance(event, TokenEvent)
            member.token_ids.append(event.token_id)
        sampler.forget(batch[step])
        sampler.forget(batch[step])
        assert len(sampler._counts) <= sizes.num_count_slots
    for member in batch:
        sampler.forget(member)
    assert len(sampler._counts) == 0
    assert sampler._table is not None
    assert sampler._table.shape == (3, 300)


def test_a_sequence_of_the_batch_loses_its_slot_to_no_other_one() -> None:
    slots = CountSlots(2, 10)
    first, second, third = (sequence(prompt=(i,)) for i in range(3))
    assert slots.update([first, second]).slots.tolist() == [0, 1]
    first.token_ids += [7]
    update = slots.update([first, third])
    assert (update.slots.tolist(), update.fresh.tolist()) == ([0, 1], [1]), (
        "the second's, which is not in the batch"
    )
    assert update.places.tolist() == [7, 10 + 2]
    assert slots.update([second, third]).fresh.tolist() == [0]


def test_a_sequence_that_ran_on_elsewhere_is_counted_again() -> None:
    """A lag longer than the vocabulary would not fit into the parameters token by token."""
    sampler, host = DeviceSampler(8, []), HostSampler(8, [])
    member = sequence(frequency_penalty=0.1)
    logits = np.zeros((1, 8), np.float32)
    sample_each(sampler, torch.from_numpy(logits), [member])
    member.token_ids += [5, 1, 2] * 300
    assert sampler._counts.max_increments(member) <= 16
    assert sample_each(sampler, torch.from_numpy(logits), [member]) == sample_each(host, logits, [member])


def test_no_counts_without_penalties() -> None:
    sampler = DeviceSampler(300, [])
    sample_each(sampler, torch.zeros(2, 300), [sequence(temperature=1.0), sequence(logit_bias={1: 2.0})])
    assert sampler._table is None


def test_what_does_not_fit_is_a_bug_of_the_caller() -> None:
    sampler, logits = DeviceSampler(300, []), torch.zeros(2, 300)
    with pytest.raises(ValueError, match="seed"):
        sample_each(sampler, logits[:1], [sequence(temperature=1.0, seed=None)])
    for rows in ([2], [-1]):
        with pytest.raises(ValueError, match=r"rows|shape"):
            sample_each(sampler, logits, [sequence()], rows)
    with pytest.raises(ValueError, match="shape"):
        sample_each(DeviceSampler(301, []), logits, [sequence()] * 2)
    with pytest.raises(RequestError):
        sampler.validate(sequence(logit_bias={300: 1.0}).request.params)
    assert sample_each(sampler, logits[:0], []) == []


class Recording:
    """`Transfer` that keeps what was asked of it and runs the work, or not."""

    def __init__(self, device: str, runs: bool = True) -> None:
        self.device, self._runs = torch.device(device), runs
        self.calls: list[tuple[int, int]] = []

    def run(
        self, parameters: np.ndarray, num_results: int, work: Callable[[Tensor, Tensor], None]
    ) -> np.ndarray:
        self.calls.append((len(parameters), 8 * num_results))
        results = torch.zeros(num_results, dtype=torch.int64, device=self.device)
        uploaded = torch.empty(len(parameters), dtype=torch.uint8, device=self.device)
        if self._runs:
            uploaded.copy_(torch.from_numpy(parameters))
        work(uploaded, results)
        return results.numpy() if self._runs else np.ones(num_results, np.int64)


class OneDevice(TorchDispatchMode):
    """Refuses operations from, to and on tensors of two devices. Numbers are welcome: they need no copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor) and leaf.ndim
        ]
        assert len({tensor.device for tensor in tensors}) < 2, f"{func} copies between devices"
        return result


def test_no_work_needs_the_host_or_another_device() -> None:
    """On tensors that hold nothing: a number or a size that the host needs fails, and so does one left on the CPU."""
    everything = {
        "logit_bias": {1: 2.0},
        "min_tokens": 9,
        "repetition_penalty": 1.2,
        "logprobs": 3,
        "min_p": 0.1,
    }
    kinds = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5})
    batch = [sequence((3,), **everything, **kind) for kind in kinds]
    logits = torch.empty(3, 700, device="meta")
    sampler = DeviceSampler(700, [EOS], transfer=Recording("meta", runs=False))
    with OneDevice():
        assert len(sample_each(sampler, logits, batch)) == 3
        assert len(sample_each(sampler, logits, [sequence()] * 3)) == 3
        assert len(sampler.prompt_logprobs(logits, [0, 1, 2], 3)) == 3


def test_greedy_requests_upload_nothing_and_a_batch_is_one_pass() -> None:
    transfer = Recording("cpu")
    sampler = DeviceSampler(300, [EOS], transfer=transfer)
    logits = torch.randn(40, 300)
    events = sample_each(sampler, logits, [sequence() for _ in range(40)])
    assert events == [TokenEvent(int(row.argmax())) for row in logits]
    assert transfer.calls == [(0, 40 * 8)]
    # A few of many rows are picked instead of looking at all.
    assert sample_each(sampler, logits, [sequence()], [9]) == events[9:10]
    assert transfer.calls.pop()[1] == 8
    sample_each(
        sampler, logits, [sequence(temperature=1.0, presence_penalty=1.0, logprobs=2) for _ in range(40)]
    )
    assert len(transfer.calls) == 2


def test_passes_stay_within_the_sizes() -> None:
    """Full lists and the most log-probabilities, in passes whose buffers are as large as the plan says."""
    vocab_size, sizes = 400, sampler_sizes(400, 5)
    everything = dict.fromkeys(range(vocab_size), 1.0)
    batch = [
        sequence(
            tuple(range(vocab_size)) * 2, tuple(range(vocab_size)), temperature=1.0, logit_bias=everything, logprobs=64,
            stop_token_ids=tuple(range(1, vocab_size)), min_tokens=5 * vocab_size, presence_penalty=1.0 + i / 99,
        )
        for i in range(4)
    ]  # fmt: skip
    transfer = Recording("cpu")
    sampler = DeviceSampler(vocab_size, [EOS], transfer=transfer, sizes=sizes)
    sample_each(sampler, torch.randn(12, vocab_size), [*batch, *[sequence(logprobs=64) for _ in range(8)]])
    sampler.prompt_logprobs(torch.randn(12, vocab_size), list(range(12)), 64)
    assert len(transfer.calls) > 3
    assert max(num_bytes for num_bytes, _ in transfer.calls) <= sizes.parameter_bytes
    assert max(num_bytes for _, num_bytes in transfer.calls) <= sizes.result_bytes


class Peak(TorchDispatchMode):
    """The most bytes that tensors held at once, those that stood before excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._seen: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                storage = leaf.untyped_storage()
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._drop, storage.nbytes())
        return result

    def _drop(self, num_bytes: int) -> None:
        self.held -= num_bytes


@pytest.mark.parametrize(
    ("params", "logit_bytes", "unseen"),
    [
        ({}, GREEDY_LOGIT, 0),
        ({"temperature": 1.0, "min_p": 0.1}, DRAWN_LOGIT, 0),
        # On a GPU torch's sort has keys, indices and the rows that they belong to once or twice more.
        ({"temperature": 1.0, "top_p": 0.9, "top_k": 9, "min_p": 0.1}, SORTED_LOGIT, 36),
        ({"logprobs": 64}, SCORED_LOGIT, 0),
    ],
    ids=["greedy", "drawn", "sorted", "scored"],
)
def test_scratch_memory_is_what_the_sizes_say(params: dict[str, Any], logit_bytes: int, unseen: int) -> None:
    """Eight rows are worked on at a time; all are penalised but those of which the log-probability counts."""
    vocab_size = 50_000
    sizes = replace(sampler_sizes(vocab_size, 16), scratch_bytes=8 * logit_bytes * vocab_size)
    sampler = DeviceSampler(vocab_size, [EOS], sizes=sizes)
    penalties = {} if "logprobs" in params else {"presence_penalty": 1.0, "logit_bias": {1: 1.0}}
    batch = [sequence(**params, **penalties) for _ in range(16)]
    logits = torch.randn(16, vocab_size)
    sample_each(sampler, logits, batch)  # makes the table of counts
    with Peak() as memory:
        sample_each(sampler, logits, batch)
    used = memory.peak / (8 * vocab_size) + unseen
    assert 0.7 * logit_bytes < used <= logit_bytes
