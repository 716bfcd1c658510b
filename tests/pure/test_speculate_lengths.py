"""Draft lengths in a simulated server: near the best fixed length, harmless where none fits, back after changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.costs import StepCosts
from pelton.runtime.speculate.lengths import DraftLengths

LIMIT = 10

Cost = Callable[[int], float]
Accept = Callable[[random.Random, int], int]  # of so many drafted tokens, how many are right


def new_sequence() -> Sequence:
    return Sequence(Request("r", (1,), SamplingParams()))


def memory_bound(num_tokens: int) -> float:
    """Weights are read once: a small GPU batch."""
    return 0.01 + 0.00001 * num_tokens


def linear(num_tokens: int) -> float:
    """Each row costs: a CPU, a full batch."""
    return 0.004 + 0.002 * num_tokens


def kneed(num_tokens: int) -> float:
    return 0.01 + 0.0002 * max(0, num_tokens - 48)


def stairs(num_tokens: int) -> float:
    """Captured sizes: padded to multiples of 16."""
    return 0.008 + 0.0015 * -(-num_tokens // 16)


def geometric(rate: float) -> Accept:
    def accept(rng: random.Random, drafted: int) -> int:
        right = 0
        while right < drafted and rng.random() < rate:
            right += 1
        return right

    return accept


def bursty(rng: random.Random, drafted: int) -> int:
    """Copies: nothing or nearly everything is right."""
    return geometric(0.97)(rng, drafted) if rng.random() < 0.45 else 0


@dataclass
class Server:
    """Steps of `accepts`, one sequence each, in seconds of `cost` with noise and stalls."""

    cost: Cost
    accepts: list[Accept]
    is_adaptive: bool = True
    fixed: int = 0
    propose_cost: float = 0.0  # seconds per drafted token
    has_shadow: bool = False
    num_prompt_tokens: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(5))  # the same text whatever is drafted
    noise: random.Random = field(default_factory=lambda: random.Random(6))
    drafted: list[int] = field(default_factory=list)
    lengths: DraftLengths | None = None

    def __post_init__(self) -> None:
        self.sequences = [new_sequence() for _ in self.accepts]
        if self.is_adaptive:
            self.lengths = DraftLengths(has_shadows=self.has_shadow)

    def run(self, steps: int) -> float:
        """Tokens per second, by the true times."""
        tokens, seconds = 0, 0.0
        for _ in range(steps):
            base = len(self.sequences) + self.num_prompt_tokens
            limit = 0 if self.lengths and self.lengths.rests else LIMIT
            wanted = [(sequence, limit) for sequence in self.sequences]
            given = self.lengths.allocate(wanted, base) if self.lengths else [self.fixed] * len(wanted)
            size, drafting = base + sum(given), self.propose_cost * sum(given)
            seconds += self.cost(size) + drafting
            self.drafted.append(sum(given))
            for sequence, accept, length in zip(self.sequences, self.accepts, given, strict=True):
                right = accept(self.rng, LIMIT)
                if self.lengths:
                    self.lengths.promise(sequence, length)
                tokens += 1 + min(right, length)
                if self.lengths and length:
                    self.lengths.record(sequence, length, min(right, length))
                elif self.lengths and self.has_shadow:
                    self.lengths.shadow(sequence, limit, right)
            if self.lengths:
                noise = self.noise.gauss(1, 0.03) * (8 if self.noise.random() < 0.01 else 1)
                self.lengths.record_step(size, max(self.cost(size) * noise, 1e-6))
                self.lengths.record_propose(sum(given), drafting)
        return tokens / seconds


def best_fixed(cost: Cost, accepts: list[Accept], propose_cost: float = 0.0) -> float:
    servers = [
        Server(cost, accepts, is_adaptive=False, fixed=k, propose_cost=propose_cost) for k in range(LIMIT + 1)
    ]
    return max(server.run(1000) for server in servers)


CASES = {
    "one_sequence_of_a_gpu": (memory_bound, [geometric(0.8)], 0.0),
    "one_sequence_of_a_cpu": (linear, [geometric(0.6)], 0.0),
    "one_sequence_of_a_cpu_that_copies": (linear, [bursty], 0.0),
    "a_batch_that_copies": (kneed, [bursty] * 16, 0.0),
    "a_batch_on_stairs": (stairs, [geometric(0.7)] * 12, 0.0),
    "a_draft_model": (memory_bound, [geometric(0.7)] * 4, 0.0005),
    "a_draft_model_that_is_too_slow": (memory_bound, [geometric(0.5)] * 4, 0.004),
    "a_full_batch": (linear, [geometric(0.3)] * 32, 0.0),
    "a_mixed_batch": (linear, [geometric(0.9)] * 4 + [geometric(0.05)] * 12, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_it_comes_near_the_best_fixed_length(case: str) -> None:
    cost, accepts, propose_cost = CASES[case]
    has_shadow = not propose_cost  # the drafts of look-ups are there anyhow
    server = Server(cost, accepts, propose_cost=propose_cost, has_shadow=has_shadow)
    server.run(300)
    server.rng.seed(5)
    assert server.run(1000) > 0.93 * best_fixed(cost, accepts, propose_cost)


def test_sequences_that_differ_are_better_off_than_with_one_length_for_all() -> None:
    accepts = [geometric(0.9)] * 8 + [geometric(0.1)] * 24
    server = Server(kneed, accepts)
    server.run(300)
    assert server.run(1000) > 1.2 * best_fixed(kneed, accepts)


@pytest.mark.parametrize("has_shadow", [False, True])
@pytest.mark.parametrize("cost", [memory_bound, linear, stairs])
@pytest.mark.parametrize(("num_sequences", "propose_cost"), [(1, 0.0), (4, 0.0005), (48, 0.0), (48, 0.0005)])
def test_drafts_that_never_fit_cost_under_3_percent(
    cost: Cost, num_sequences: int, propose_cost: float, has_shadow: bool
) -> None:
    accepts = [geometric(0.0)] * num_sequences
    server = Server(cost, accepts, propose_cost=propose_cost, has_shadow=has_shadow)
    server.run(100)
    assert server.run(500) > 0.97 * Server(cost, accepts, is_adaptive=False).run(10)


def test_a_full_batch_in_which_some_copy_is_not_slowed_by_drafts_that_just_break_even() -> None:
    accepts = [geometric(0.9)] * 14 + [geometric(0.05)] * 30
    server = Server(kneed, accepts, has_shadow=True)
    server.run(100)
    assert server.run(500) > 0.97 * Server(kneed, accepts, is_adaptive=False).run(10)


def test_a_full_batch_of_prompts_in_progress_is_not_slowed() -> None:
    accepts = [geometric(0.2)] * 8
    server = Server(linear, accepts, has_shadow=True)
    server.run(100)
    server.num_prompt_tokens = 500
    server.drafted.clear()
    server.run(200)
    assert sum(server.drafted) < 0.003 * 200 * 508


@pytest.mark.parametrize("has_shadow", [False, True])
def test_drafting_comes_back_when_text_becomes_predictable(has_shadow: bool) -> None:
    server = Server(kneed, [geometric(0.0)] * 8, has_shadow=has_shadow)
    server.run(1000)
    server.accepts = [geometric(0.9)] * 8
    server.run(10 if has_shadow else 200)
    server.drafted.clear()
    assert server.run(200) > 0.9 * best_fixed(kneed, server.accepts)


def test_drafting_comes_back_when_rows_become_cheap() -> None:
    accepts = [geometric(0.6)] * 8
    server = Server(lambda n: 0.003 * n, accepts, has_shadow=True)
    server.run(1000)
    server.cost = memory_bound
    server.run(1000)
    assert server.run(500) > 0.9 * best_fixed(memory_bound, accepts)


def test_steps_without_drafts_are_measured_at_once_and_again_where_drafts_always_pay() -> None:
    server = Server(memory_bound, [geometric(0.9)] * 2)
    server.run(10)
    assert 0 in server.drafted
    server.run(100)
    server.drafted.clear()
    server.run(200)
    assert 1 <= server.drafted.count(0) <= 5


def test_a_new_sequence_starts_from_what_the_others_showed() -> None:
    server = Server(linear, [geometric(0.0)] * 4)
    server.run(100)
    assert server.lengths is not None
    newcomers = [(new_sequence(), LIMIT) for _ in range(4)]
    assert sum(server.lengths.allocate(newcomers, 4)) <= 4  # a probe at most


def test_refused_sequences_are_looked_up_rarely_until_drafts_pay_again() -> None:
    lengths, sequence = DraftLengths(), new_sequence()
    others = [new_sequence() for _ in range(3)]

    def steps(count: int, num_right: int) -> tuple[int, int]:
        """How often it was due, and how many draft tokens were given."""
        num_due, num_given = 0, 0
        for _ in range(count):
            is_due = not lengths.rests and bool(lengths.due([sequence]))
            wanted = [(sequence, LIMIT if is_due else 0), *((other, 0) for other in others)]
            given, *_ = lengths.allocate(wanted, 4)
            if is_due:
                lengths.record(sequence, given or LIMIT, min(num_right, given or LIMIT))
            lengths.record_step(4 + given, 0.01 + 0.001 * (4 + given))
            num_due, num_given = num_due + is_due, num_given + given
        return num_due, num_given

    assert lengths.due([sequence]) == [sequence]
    steps(100, 0)
    num_due, num_given = steps(400, 0)
    assert 40 <= num_due <= 60
    assert num_given < 40
    steps(50, LIMIT)
    assert steps(100, LIMIT) == (100, pytest.approx(100 * LIMIT, rel=0.1))
    lengths.end(sequence)
    assert lengths.due([sequence]) == [sequence]


def test_of_many_sequences_in_which_nothing_is_found_some_are_looked_up_in_turn() -> None:
    lengths, sequences = DraftLengths(), [new_sequence() for _ in range(32)]
    counts = dict.fromkeys(sequences, 0)
    for _ in range(40):
        for sequence in lengths.due(sequences):
            counts[sequence] += 1
        lengths.allocate([(sequence, 0) for sequence in sequences], 32)
    assert set(counts.values()) <= set(range(8, 14))
    found = sequences[5]
    for _ in range(4):
        lengths.due(sequences)
        lengths.allocate([(s, 3 if s is found else 0) for s in sequences], 32)
    assert all(found in lengths.due(sequences) for _ in range(4))
    assert len(DraftLengths().due(sequences[:6])) == 6
    few = sequences[:6]
    for _ in range(3):
        assert lengths.due(few) == few
        lengths.allocate([(sequence, 0) for sequence in few], 6)


def num_drafting_steps(lengths: DraftLengths, num_sequences: int) -> int:
    """Of 200 steps behind 200 others, those before which a batch that guesses nothing right does not rest."""
    sequences = [new_sequence() for _ in range(num_sequences)]
    counts = [0, 0]
    for step in range(400):
        limit = 0 if lengths.rests else LIMIT
        given = lengths.allocate([(sequence, limit) for sequence in sequences], num_sequences)
        for sequence, length in zip(sequences, given, strict=True):
            lengths.record(sequence, length, 0)
        lengths.record_step(num_sequences + sum(given), linear(num_sequences + sum(given)))
        counts[step // 200] += limit > 0
    return counts[1]


def test_a_batch_that_gains_nothing_rests_and_longer_where_nothing_is_learned_meanwhile() -> None:
    assert num_drafting_steps(DraftLengths(), 2) == 200
    assert 55 <= num_drafting_steps(DraftLengths(), 8) <= 75
    assert 20 <= num_drafting_steps(DraftLengths(has_shadows=False), 8) <= 26
    assert 20 <= num_drafting_steps(DraftLengths(), 32) <= 28
    assert 4 <= num_drafting_steps(DraftLengths(has_shadows=False), 32) <= 8
    assert num_drafting_steps(DraftLengths(is_adaptive=False), 8) == 200


def test_a_single_sequence_is_looked_up_at_once_behind_a_large_batch_that_gained_nothing() -> None:
    lengths, many = DraftLengths(), [new_sequence() for _ in range(64)]
    for _ in range(200):
        found = set() if lengths.rests else set(lengths.due(many))
        given = lengths.allocate([(s, 4 if s in found else 0) for s in many], 64)
        for sequence, length in zip(many, given, strict=True):
            if sequence in found:
                lengths.record(sequence, length or 4, 0)
        lengths.record_step(64 + sum(given), linear(64 + sum(given)))
    for sequence in many:
        lengths.end(sequence)
    alone = new_sequence()
    num_due = 0
    for _ in range(50):
        num_due += not lengths.rests and len(lengths.due([alone]))
        lengths.allocate([(alone, 0)], 1)
    assert num_due >= 48


def test_drafts_that_ended_their_sequence_or_were_not_granted_are_no_broken_promises() -> None:
    lengths = DraftLengths()
    for number in range(400):
        sequences = [new_sequence() for _ in range(4)]
        given = lengths.allocate([(sequence, 4) for sequence in sequences], 4)
        for sequence, length in zip(sequences[:2], given, strict=False):  # the others are granted nothing
            lengths.promise(sequence, length)
            if number % 20 == 0 and length:
                lengths.record(sequence, length, length)
            lengths.end(sequence)
        lengths.record_step(4 + sum(given), memory_bound(4 + sum(given)))
    assert sum(lengths.allocate([(new_sequence(), 4) for _ in range(4)], 4)) == 16


def test_without_adaptation_everything_is_given() -> None:
    lengths, sequence = DraftLengths(is_adaptive=False), new_sequence()
    for _ in range(50):
        lengths.record(sequence, 5, 0)
        lengths.record_step(6, 1.0)
        assert lengths.allocate([(sequence, 5), (new_sequence(), 0)], 2) == [5, 0]


def test_drafts_are_tried_before_anything_is_known() -> None:
    assert DraftLengths().allocate([(new_sequence(), 5), (new_sequence(), 0)], 2) == [5, 0]


@settings(max_examples=40)
@given(st.data())
def test_nobody_gets_more_than_is_wanted(data: st.DataObject) -> None:
    lengths, pool = DraftLengths(), [new_sequence() for _ in range(5)]
    for _ in range(data.draw(st.integers(1, 30))):
        batch = data.draw(st.lists(st.sampled_from(pool), unique=True, max_size=5))
        wanted = [(sequence, data.draw(st.integers(0, 80))) for sequence in batch]
        prompts = data.draw(st.integers(0, 600))
        given_ = lengths.allocate(wanted, len(wanted) + prompts)
        assert len(given_) == len(wanted)
        assert all(0 <= n <= limit for n, (_, limit) in zip(given_, wanted, strict=True))
        for sequence, n in zip(batch, given_, strict=True):
            lengths.record(sequence, n, data.draw(st.integers(0, n)))
        lengths.record_step(len(wanted) + prompts + sum(given_), data.draw(st.floats(0, 10)))
        lengths.record_propose(sum(given_), data.draw(st.floats(0, 10)))
        lengths.end(data.draw(st.sampled_from(pool)))
    for sequence in pool:
        lengths.end(sequence)
    assert not lengths._own


def test_costs_bear_outliers_and_never_fall() -> None:
    costs = StepCosts()
    for i in range(7):
        costs.record(4, 5.0 if i % 3 == 0 else 1.0)
        costs.record(8, 0.9)
        costs.record(16, 3.0)
    seconds = costs.seconds(np.array([1, 4, 8, 12, 16, 20, 1000]))
    assert seconds[:3] == pytest.approx([0.95] * 3)  # 1 and 0.9 are one level
    assert seconds[4:] == pytest.approx([3.0, 3.0 + 4 * 3 / 16, 3.0 + 984 * 3 / 16])
    assert seconds[2] < seconds[3] < seconds[4]


def test_costs_of_nothing_are_nothing_where_told() -> None:
    costs = StepCosts(is_free_at_zero=True)
    assert not costs.is_known
    assert costs.seconds(np.array([0, 9])).tolist() == [0.0, 0.0]
    for _ in range(3):
        costs.record(10, 2.0)
    assert costs.is_known
    assert costs.knows(10)
    assert not costs.knows(5)
    assert costs.seconds(np.array([0, 5, 10, 20])) == pytest.approx([0.0, 1.0, 2.0, 4.0])


def test_old_costs_are_forgotten() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.record(10, 9.0)
    for _ in range(600):
        costs.record(5, 1.0)
    assert costs.seconds(np.array([10])).tolist() == [1.0]
    costs.record(10, 2.0)
    assert not costs.knows(10)
