from __future__ import annotations

import random
import time

import pytest

from pelton.runtime.inputs import pack
from pelton.runtime.plan import StepPlan
from pelton.runtime.scheduler import Scheduler
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import Draft
from support.scheduling import StepDriver, generate, make_config, make_sequence

# --- steps


def test_a_sequence_is_not_added_twice_nor_grown_past_its_limit() -> None:
    scheduler = Scheduler(make_config())
    sequence = make_sequence(range(4), 1)
    with pytest.raises(RuntimeError, match="not scheduled"):
        scheduler.append(sequence, 1)
    scheduler.add(sequence)
    with pytest.raises(RuntimeError, match="twice"):
        scheduler.add(sequence)
    scheduler.append(sequence, 1)
    with pytest.raises(RuntimeError, match="limit of 5 tokens"):
        scheduler.append(sequence, 2)
    scheduler.finish(sequence)
    with pytest.raises(RuntimeError, match="twice"):
        scheduler.add(sequence)


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(make_config())
    plan = scheduler.plan()
    assert plan.items == ()
    scheduler.commit(plan)


def test_commit_takes_the_last_plan_once() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_sequence(range(4)))
    first = scheduler.plan()
    second = scheduler.plan()
    for wrong in (first, StepPlan()):
        with pytest.raises(RuntimeError, match="last plan"):
            scheduler.commit(wrong)
    scheduler.commit(second)
    with pytest.raises(RuntimeError, match="last plan"):
        scheduler.commit(second)


def test_sequences_start_in_arrival_order_and_are_not_overtaken() -> None:
    driver = StepDriver(make_config(num_blocks=8, max_step_tokens=32))
    running = driver.add(make_sequence(range(16), 8))
    large = driver.add(make_sequence(range(100, 124), 4))
    small = driver.add(make_sequence(range(200, 204), 4))
    plan = driver.step()
    assert [item.sequence for item in plan.items] == [running]
    while not running.is_finished:
        assert not small.block_ids
        driver.step()
    assert [item.sequence for item in driver.step().items] == [large, small]


def test_max_tokens_zero_computes_the_whole_prompt() -> None:
    driver = StepDriver(make_config())
    scoring = make_sequence(range(37), 0, prompt_logprobs=0)
    assert driver.run(scoring) == [[]]
    assert scoring.num_computed_tokens == 37
    assert driver.executor.num_computed_tokens == 37


@pytest.mark.parametrize("num_decodes", [1, 3, 7])
def test_a_long_prompt_does_not_keep_decodes_from_a_step(num_decodes: int) -> None:
    driver = StepDriver(make_config(max_batch_size=8, num_blocks=128, max_model_len=512))
    decodes = [driver.add(make_sequence([i], 60)) for i in range(num_decodes)]
    driver.step()
    driver.add(make_sequence(range(300), 1))
    for _ in range(20):
        planned = {item.sequence: item.num_tokens for item in driver.step().items}
        assert [planned[s] for s in decodes] == [1] * num_decodes


@pytest.mark.parametrize("max_step_tokens", [8, 9, 16])
def test_decodes_do_not_keep_a_prompt_from_its_reserve(max_step_tokens: int) -> None:
    """With a step as small as the batch a prompt still gets a token of each step."""
    config = make_config(max_batch_size=8, max_step_tokens=max_step_tokens, num_blocks=512, max_model_len=512)
    driver = StepDriver(config)
    assert config.prefill_reserve == max_step_tokens - 7
    for i in range(7):
        driver.add(make_sequence([i], 200))
    driver.step()
    prompt = driver.add(make_sequence(range(100, 180), 1))
    num_steps = 0
    while not prompt.is_finished:
        driver.step()
        num_steps += 1
    assert num_steps == -(-80 // config.prefill_reserve)


def test_a_chunk_limit_lets_short_prompts_pass_a_long_one() -> None:
    driver = StepDriver(make_config(max_chunk_tokens=8, num_blocks=64))
    long = driver.add(make_sequence(range(100), 1))
    short = driver.add(make_sequence(range(200, 208), 1))
    assert [(item.sequence, item.num_tokens) for item in driver.step().items] == [(long, 8), (short, 8)]
    assert short.is_finished


@pytest.mark.parametrize("chunk", [16, 64, None])
@pytest.mark.parametrize("length", [whole + extra for whole in (16, 48, 64, 128) for extra in (-1, 0, 1)])
def test_sc_03_prompts_around_whole_chunks_and_blocks(length: int, chunk: int | None) -> None:
    """Block 16; steps of 16 and 64 tokens, and one that takes any prompt whole."""
    config = make_config(block_size=16, max_step_tokens=chunk or 512, num_blocks=64, max_batch_size=1)
    driver = StepDriver(config)
    prompt = [(13 * i) % 900 for i in range(length)]
    sequence = driver.add(make_sequence(prompt, 5))
    num_steps = -(-length // config.max_step_tokens)
    for step in range(1, num_steps + 1):
        (item,) = driver.step().items
        assert item.end == min(step * config.max_step_tokens, length)
        assert sequence.num_output_tokens == (step == num_steps), "a token was sampled before the last chunk"
    while driver.live:
        driver.step()
    assert sequence.output_token_ids == generate(prompt, 5)


@pytest.mark.parametrize("chunk", [3, 4, 5, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_sc_03_chunked_prompts_mixed_with_decodes(chunk: int, caching: bool) -> None:
    config = make_config(max_chunk_tokens=chunk, enable_prefix_caching=caching, num_blocks=64)
    prompts = [range(i, i + length) for i, length in enumerate((11, 12, 13, 3, 4, 5, 31, 32, 33, 1))]
    outputs = StepDriver(config).run(*(make_sequence(p, 6) for p in prompts))
    assert outputs == [generate(p, 6) for p in prompts]


# --- preemption


def test_sc_05_the_latest_is_preempted_and_returns_in_front() -> None:
    driver = StepDriver(make_config(num_blocks=8, max_step_tokens=32, max_batch_size=3))
    first, second, third = (driver.add(make_sequence(range(s, s + 4), 24)) for s in (0, 100, 200))
    fourth = driver.add(make_sequence(range(300, 304), 4))
    while not second.num_preemptions:
        driver.step()
    assert (first.num_preemptions, third.num_preemptions) == (0, 1)
    assert driver.scheduler.num_waiting == 3
    started: list[Sequence] = []
    while driver.live:
        for item in driver.step().items:
            if item.sequence not in (first, *started):
                started.append(item.sequence)
    assert started == [second, third, fourth]
    driver.check_idle()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("preempt_at", [(5,), (50,), (5, 50), (1, 2)])
def test_sc_05_preemption_keeps_tokens_and_counts(preempt_at: tuple[int, ...], caching: bool) -> None:
    """Preempted by force at exact output lengths; another sequence runs alongside."""
    driver = StepDriver(make_config(num_blocks=64, enable_prefix_caching=caching))
    scheduler = driver.scheduler
    mate, victim = (driver.add(make_sequence(range(s, s + 21), 60)) for s in (100, 0))
    for count, position in enumerate(preempt_at, 1):
        while victim.num_output_tokens < position:
            driver.step()
        scheduler._preempt(scheduler._records[victim])
        scheduler.check_invariants()
        assert (victim.num_preemptions, victim.num_computed_tokens, victim.block_ids) == (count, 0, [])
        assert victim.num_output_tokens == position
    while driver.live:
        driver.step()
    assert victim.output_token_ids == generate(range(21), 60)
    assert mate.output_token_ids == generate(range(100, 121), 60)
    assert (victim.num_prompt_tokens, victim.num_output_tokens, victim.num_cached_tokens) == (21, 60, 0)


def test_sc_05_twenty_sequences_in_a_pool_for_one() -> None:
    """Each needs the whole pool at its end: constant preemption, yet all finish, oldest first."""
    driver = StepDriver(make_config(num_blocks=6, max_batch_size=4))
    sequences = [make_sequence(range(s, s + 3), 22) for s in range(0, 400, 20)]
    assert driver.run(*sequences) == [generate(s.request.prompt_token_ids, 22) for s in sequences]
    assert driver.scheduler.num_preemptions == sum(s.num_preemptions for s in sequences) > 10
    assert driver.outputs == sequences
    assert sequences[0].num_preemptions == 0


def test_a_newcomer_does_not_start_into_blocks_that_running_sequences_need_next() -> None:
    driver = StepDriver(make_config(num_blocks=5, max_step_tokens=32))
    old = driver.add(make_sequence(range(9), 8))
    driver.step()
    driver.add(make_sequence(range(100, 105), 1))
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_free_blocks) == (1, 2)
    while driver.live:
        driver.step()
    assert (old.num_preemptions, driver.scheduler.num_preemptions) == (0, 0)


# --- choices of one request


def fork_ready(driver: StepDriver, num_prompt: int, n: int) -> list[Sequence]:
    driver.add(make_sequence(range(num_prompt), 12, n=n))
    while len(driver.live) == 1:
        driver.step()
    return list(driver.live)


@pytest.mark.parametrize("num_prompt", [9, 10, 11, 12])
def test_a_fork_shares_every_block_until_it_writes(num_prompt: int) -> None:
    driver = StepDriver(make_config())
    parent, *children = fork_ready(driver, num_prompt, 3)
    assert all(child.block_ids == parent.block_ids for child in children)
    assert driver.scheduler.num_used_blocks == 3
    plan = driver.plan()
    is_partial = num_prompt % 4 != 0
    # The last owner of the partial block may write in place; without one each grows into a new block.
    assert len(plan.block_copies) == (2 if is_partial else 0)
    assert all(source == children[-1].block_ids[2] for source, _ in plan.block_copies)
    assert driver.scheduler.num_used_blocks == (5 if is_partial else 6)
    driver.scheduler.commit(plan)


def test_a_fork_of_an_unfinished_prompt_has_its_own_blocks_for_the_rest() -> None:
    driver = StepDriver(make_config(max_step_tokens=6))
    parent = driver.add(make_sequence(range(20), 5))
    driver.step()
    child = Sequence(parent.request, 1)
    driver.scheduler.fork(parent, child)
    driver.live.append(child)
    assert (len(parent.block_ids), child.block_ids) == (5, parent.block_ids[:2])
    driver.run()
    assert [s.output_token_ids for s in driver.outputs] == [generate(range(20), 5, i) for i in (0, 1)]


@pytest.mark.parametrize("max_batch_size", [1, 2, 4])
@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9])
@pytest.mark.parametrize("caching", [False, True])
def test_choices_of_one_prompt(num_prompt: int, max_batch_size: int, caching: bool) -> None:
    """With more choices than places in the batch the others wait."""
    config = make_config(max_batch_size=max_batch_size, enable_prefix_caching=caching)
    driver = StepDriver(config)
    behind = make_sequence(range(50, 57), 3)
    driver.run(make_sequence(range(num_prompt), 12, n=4), behind)
    outputs = {s.index: s.output_token_ids for s in driver.outputs if s is not behind}
    assert outputs == {i: generate(range(num_prompt), 12, i) for i in range(4)}
    assert driver.outputs[-1] is behind or max_batch_size > 1, "choices queue before later requests"
    assert {s.num_cached_tokens for s in driver.outputs} == {0}, "recomputing counts as cached"
    driver.run(make_sequence(range(num_prompt), 12, n=4))
    num_hits = (num_prompt - 1) // 4 * 4 if caching else 0
    assert [s.num_cached_tokens for s in driver.outputs[5:]] == [num_hits] * 4


def test_copies_survive_preemption_of_the_other_owner() -> None:
    """The pool has room for neither copy: the later choices go, and no copy's source is given away."""
    driver = StepDriver(make_config(num_blocks=6, max_step_tokens=32))
    driver.run(make_sequence(range(10), 15, n=4))
    assert driver.scheduler.num_preemptions > 0
    assert driver.num_copies > 0
    assert {s.index: s.output_token_ids for s in driver.outputs} == {
        i: generate(range(10), 15, i) for i in range(4)
    }


def test_fork_refuses_what_would_corrupt_blocks() -> None:
    driver = StepDriver(make_config())
    parent, child = fork_ready(driver, 9, 2)
    with pytest.raises(RuntimeError, match="tokens of its parent"):
        driver.scheduler.fork(parent, child)
    with pytest.raises(RuntimeError, match="tokens of its parent"):
        driver.scheduler.fork(parent, Sequence(parent.request, 2))
    equal = Sequence(parent.request, 2, token_ids=list(parent.token_ids))
    plan = driver.plan()
    with pytest.raises(RuntimeError, match="between plan and commit"):
        driver.scheduler.fork(parent, equal)
    driver.scheduler.commit(plan)
    driver.abort(parent)
    with pytest.raises(RuntimeError, match="not scheduled"):
        driver.scheduler.fork(parent, equal)


# --- endings


@pytest.mark.parametrize("caching", [False, True])
def test_finish_releases_in_any_state_and_any_number_of_times(caching: bool) -> None:
    driver = StepDriver(make_config(max_batch_size=2, enable_prefix_caching=caching))
    scheduler = driver.scheduler
    never_added = make_sequence(range(4))
    scheduler.finish(never_added)
    chunked, running, waiting = (driver.add(make_sequence(range(s, s + 20), 20)) for s in (0, 100, 200))
    driver.step()
    driver.step()
    for sequence in (waiting, chunked, running):
        for _ in range(3):
            driver.abort(sequence)
            scheduler.check_invariants()
        assert sequence.is_finished
        assert sequence.block_ids == []
    driver.check_idle()


@pytest.mark.parametrize("victim", range(3))
def test_finish_between_plan_and_commit(victim: int) -> None:
    driver = StepDriver(make_config())
    driver.add(make_sequence(range(10), 20, n=3))
    driver.step()
    choices = list(driver.live)
    driver.step(on_commit=lambda: driver.abort(choices[victim]))
    driver.run(make_sequence(range(10, 30), 10))
    assert choices[victim].num_output_tokens == 1


def test_a_failed_step_is_computed_again() -> None:
    """The copies of a step that never ran are lost; the tokens must be right all the same."""
    driver = StepDriver(make_config())
    choices = fork_ready(driver, 10, 3)
    assert driver.step(fails=True).block_copies
    assert driver.step(fails=True).block_copies == ()
    driver.abort(choices[0])
    driver.step(fails=True)
    driver.run(make_sequence(range(500, 510), 3))
    assert [s.output_token_ids for s in driver.outputs if s in choices] == [
        generate(range(10), 12, i) for i in (1, 2)
    ]


def test_every_sequence_of_a_failed_step_can_be_finished() -> None:
    driver = StepDriver(make_config())
    choices = fork_ready(driver, 10, 3)
    driver.step(fails=True)
    for choice in choices:
        driver.abort(choice)
    driver.check_idle()
    assert driver.run(make_sequence(range(10), 5)) == [generate(range(10), 5)]


def test_sc_08_a_thousand_aborts_leave_nothing() -> None:
    rng = random.Random(8)
    driver = StepDriver(make_config(num_blocks=16))
    for round_number in range(1000):
        prompt = range(rng.randrange(5), rng.randint(6, 30))
        driver.add(make_sequence(prompt, 8, n=rng.choice((1, 3)), salt=str(round_number % 3)))
        for _ in range(rng.randrange(12)):
            driver.step()
        doomed = list(driver.live)
        if doomed and rng.random() < 0.5:
            driver.step(on_commit=lambda doomed=doomed: [driver.abort(s) for s in doomed])
        for sequence in list(driver.live):
            driver.abort(sequence)
        driver.check_idle()
        assert driver.scheduler._records == {}


# --- counters and cost


def test_prefix_counters_count_each_sequence_once() -> None:
    driver = StepDriver(make_config())
    scheduler = driver.scheduler
    driver.run(make_sequence(range(12), 2))
    assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == (12, 0)
    driver.run(make_sequence(range(14), 2, n=2))
    assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == (26, 12)
    driver.run(make_sequence(range(14), 2, prompt_logprobs=0))
    assert (scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens) == (26, 12)


def test_block_counts_add_up() -> None:
    driver = StepDriver(make_config())
    scheduler = driver.scheduler
    driver.add(make_sequence(range(9), 30))
    while driver.live:
        driver.step()
        counts = (scheduler.num_free_blocks, scheduler.num_used_blocks, scheduler.num_cached_blocks)
        assert sum(counts) == 32
    assert scheduler.num_used_blocks == 0
    assert scheduler.num_cached_blocks == 38 // 4


def test_planning_does_not_depend_on_the_size_of_the_pool_or_the_queue() -> None:
    """Bounds the growth, not the time: 100 times the blocks and waiting requests, no 10 times the cost."""

    def time_of_a_step(num_blocks: int, num_waiting: int) -> float:
        config = make_config(max_batch_size=32, max_step_tokens=64, num_blocks=num_blocks, block_size=16)
        scheduler = Scheduler(config)
        for i in range(32 + num_waiting):
            scheduler.add(make_sequence([i], 200))
        times = []
        for _ in range(60):
            start = time.perf_counter()
            plan = scheduler.plan()
            scheduler.commit(plan)
            times.append(time.perf_counter() - start)
            for item in plan.items:
                scheduler.append(item.sequence, 1)
        return sorted(times)[len(times) // 4]

    assert time_of_a_step(50_000, 5_000) < 10 * time_of_a_step(500, 50)


def test_wrong_drafts_change_nothing_for_the_others() -> None:
    """The same preemptions, and every sequence starts and ends in the same step."""

    def run(is_drafting: bool) -> list[list[tuple[int, int]]]:
        rng = random.Random(7)
        config = make_config(num_blocks=90, block_size=1, max_step_tokens=64, enable_prefix_caching=False)
        driver = StepDriver(config)
        for _ in range(14):
            driver.add(
                make_sequence([rng.randrange(90) for _ in range(rng.randint(2, 20))], rng.randint(4, 30))
            )
        trace = []
        while driver.live:
            plan = driver.scheduler.plan()
            if is_drafting:
                begun = [item.sequence for item in plan.items if item.sequence.num_output_tokens]
                granted = driver.scheduler.reserve(plan, dict.fromkeys(begun, 9))
                wrong = {sequence: Draft((998,) * num_tokens) for sequence, num_tokens in granted.items()}
                plan = driver.scheduler.attach(plan, wrong)
            driver.executor.execute(pack(plan))
            driver.scheduler.commit(plan)
            driver.scheduler.check_invariants()
            trace.append([(item.start, item.known_end) for item in plan.items])
            for item in plan.items:
                if item.is_sampling:
                    driver.scheduler.append(item.sequence, 5)
                    if item.sequence.num_tokens >= driver.scheduler.token_limit(item.sequence.request):
                        driver.abort(item.sequence)
        return [*trace, [(driver.scheduler.num_preemptions, 0)]]

    plain = run(is_drafting=False)
    assert plain[-1][0][0] >= 3
    assert run(is_drafting=True) == plain
