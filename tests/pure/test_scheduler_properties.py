"""Random traces through scheduler, block pool, prefix cache and scripted executor.

The driver checks every step: the invariants, the documented bounds, that no block is written by one sequence
and touched by another, and that each token is the one that the right KV pages give.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pelton.runtime.sequence import Sequence
from support.scheduling import StepDriver, make_config, make_sequence

STEPS_PER_TRACE = 1500

TRACES = {
    "roomy": {"num_blocks": 64},
    "tight": {"num_blocks": 12},
    "tiny": {"num_blocks": 9, "block_size": 2, "max_batch_size": 6},
    "single_token_blocks": {"num_blocks": 24, "block_size": 1},
    "no_cache": {"num_blocks": 12, "enable_prefix_caching": False},
    "chunked": {"num_blocks": 20, "max_chunk_tokens": 3, "max_batch_size": 8},
    "step_as_small_as_the_batch": {"num_blocks": 40, "max_batch_size": 5, "max_step_tokens": 5},
    "one_place": {"num_blocks": 12, "max_batch_size": 1},
    "wide": {"num_blocks": 48, "max_batch_size": 16, "max_step_tokens": 64},
    "few_logits_rows": {"num_blocks": 48, "max_step_tokens": 32, "max_logits_rows": 6},
    "short_context": {"num_blocks": 16, "max_model_len": 21},
}


def weak_hash(data: bytes) -> bytes:
    return bytes([blake2b(data).digest()[0] & 15])


class Trace:
    """Random users: prompts that share stems, salts, choices, scoring, aborts at any time, lost steps."""

    def __init__(self, driver: StepDriver, rng: random.Random) -> None:
        self.driver = driver
        self.rng = rng
        self.stems = [[rng.randrange(900) for _ in range(16)] for _ in range(3)]

    def submit(self) -> None:
        rng, config = self.rng, self.driver.config
        tail = [rng.randrange(3) for _ in range(rng.randint(1, 7))]
        prompt = rng.choice(self.stems)[: rng.randrange(17)] + tail
        if self.driver.outputs and rng.random() < 0.2:  # go on from an earlier answer
            prompt = (rng.choice(self.driver.outputs[-5:]).token_ids + prompt[-2:])[-40:]
        room = min(config.max_model_len, config.pool_tokens + 1)
        prompt = prompt[: room - 1]
        self.driver.add(
            make_sequence(
                prompt,
                None if rng.random() < 0.02 else rng.randint(0, min(20, room - len(prompt))),
                n=rng.choice((1, 1, 1, 2, 3, 5)),
                salt=rng.choice(("", "", "x")),
                prompt_logprobs=rng.choice((None, None, None, None, 1)),
            )
        )

    def abort_some(self) -> None:
        for sequence in self.rng.sample(self.driver.live, min(len(self.driver.live), self.rng.randint(1, 3))):
            self.driver.abort(sequence)

    def tick(self) -> None:
        rng = self.rng
        while len(self.driver.live) < 20 and rng.random() < 0.3:
            self.submit()
        if rng.random() < 0.02:
            self.abort_some()
            self.driver.scheduler.check_invariants()
        mishap = rng.random()
        self.driver.step(fails=mishap < 0.03, on_commit=self.abort_some if mishap > 0.98 else None)


@pytest.mark.parametrize("hash_function", [None, weak_hash], ids=["strong", "weak"])
@pytest.mark.parametrize("name", TRACES)
def test_pc_07_random_traces(name: str, hash_function: Callable[[bytes], bytes] | None) -> None:
    driver = StepDriver(make_config(**TRACES[name]), hash_function=hash_function)
    trace = Trace(driver, random.Random(f"{name} {hash_function is None}"))
    for _ in range(STEPS_PER_TRACE):
        trace.tick()
    driver.run()
    assert driver.num_steps >= STEPS_PER_TRACE
    assert len(driver.outputs) > 50
    if name in ("tight", "tiny", "no_cache"):
        assert driver.scheduler.num_preemptions > 50, "the pool is not small enough to prove anything"
        assert driver.num_copies > 20
    if driver.config.enable_prefix_caching:
        assert driver.scheduler.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("name", TRACES)
def test_random_traces_with_drafts(name: str) -> None:
    rng = random.Random(f"drafts {name}")
    driver = StepDriver(make_config(**TRACES[name]), drafting=rng)
    trace = Trace(driver, rng)
    for _ in range(STEPS_PER_TRACE):
        trace.tick()
    driver.run()
    assert len(driver.outputs) > 50
    if name != "step_as_small_as_the_batch":
        assert driver.num_accepted > 150
        assert driver.num_rejected > 40
    if name in ("tight", "tiny", "no_cache"):
        assert driver.scheduler.num_preemptions > 50, "the pool is not small enough to prove anything"


class SchedulerMachine(RuleBasedStateMachine):
    """The same, but with steps that Hypothesis chooses and shrinks."""

    def __init__(self) -> None:
        super().__init__()
        config = make_config(num_blocks=7, block_size=2, max_batch_size=3, max_step_tokens=5)
        self.driver = StepDriver(config, drafting=random.Random(0))

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        max_tokens=st.integers(0, 6),
        n=st.integers(1, 3),
        salt=st.sampled_from(("", "x")),
        prompt_logprobs=st.sampled_from((None, None, 0)),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, n: int, salt: str, prompt_logprobs: int | None
    ) -> None:
        self.driver.add(make_sequence(prompt, max_tokens, n=n, salt=salt, prompt_logprobs=prompt_logprobs))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def lose_step(self) -> None:
        self.driver.step(fails=True)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data(), in_step=st.booleans())
    def abort(self, data: st.DataObject, in_step: bool) -> None:
        victim: Sequence = data.draw(st.sampled_from(self.driver.live), label="victim")
        if in_step:
            self.driver.step(on_commit=lambda: self.driver.abort(victim))
        self.driver.abort(victim)

    @invariant()
    def is_sound(self) -> None:
        self.driver.scheduler.check_invariants()

    def teardown(self) -> None:
        self.driver.run()


SchedulerMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase
