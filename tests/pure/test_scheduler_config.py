from __future__ import annotations

import pytest

from pelton.errors import ConfigError, RequestError
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.scheduler import Scheduler
from pelton.runtime.sequence import Sequence
from support.scheduling import StepDriver, generate, make_config, make_sequence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_step_tokens": -1}, "max_step_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": True}, "num_blocks"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens"),
        ({"max_batch_size": 17, "max_step_tokens": 16}, "max_step_tokens .16. is below max_batch_size .17."),
    ],
)
def test_refuses_settings_that_cannot_work(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


def refusal(scheduler: Scheduler, sequence: Sequence) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        scheduler.add(sequence)
    assert (scheduler.num_waiting, scheduler.num_used_blocks) == (0, 0)
    scheduler.check_invariants()
    return caught.value.field, caught.value.code


def test_sc_01_a_prompt_larger_than_the_pool_blocks_nobody() -> None:
    driver = StepDriver(make_config(max_model_len=4096, num_blocks=64))
    too_big = make_sequence(range(65 * 4), None)
    assert refusal(driver.scheduler, too_big) == ("prompt", "kv_cache_exceeded")
    assert driver.run(make_sequence(range(10), 5)) == [generate(range(10), 5)]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        (256, 1, ("prompt", "context_length_exceeded")),
        (256, None, ("prompt", "context_length_exceeded")),
        (257, 0, ("prompt", "context_length_exceeded")),
        (129, 0, ("prompt", "kv_cache_exceeded")),
        (129, None, ("prompt", "kv_cache_exceeded")),
        (128, 2, ("max_tokens", "kv_cache_exceeded")),
        (10, 120, ("max_tokens", "kv_cache_exceeded")),
        (10, 246, ("max_tokens", "kv_cache_exceeded")),
        (10, 247, ("max_tokens", "context_length_exceeded")),
        (10, 10**30, ("max_tokens", "context_length_exceeded")),
        (0, 4, ("prompt", "invalid_value")),
    ],
)
def test_sc_01_what_can_never_fit_is_refused(
    num_prompt: int, max_tokens: int | None, expected: tuple[str, str]
) -> None:
    """Context 256, pool 128 tokens. The last token needs no K/V, so 129 tokens just fit."""
    sequence = make_sequence(range(num_prompt), max_tokens)
    assert refusal(Scheduler(make_config()), sequence) == expected


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(128, 1), (128, 0), (10, 119), (127, None), (10, None)]
)
def test_sc_01_what_just_fits_runs_to_its_limit(num_prompt: int, max_tokens: int | None) -> None:
    driver = StepDriver(make_config())
    sequence = make_sequence(range(num_prompt), max_tokens)
    other = make_sequence(range(500, 510), 5)
    num_output = 129 - num_prompt if max_tokens is None else max_tokens
    outputs = driver.run(sequence, other)
    assert outputs == [generate(range(num_prompt), num_output), generate(range(500, 510), 5)]


def test_sc_01_the_context_ends_a_sequence_without_a_limit() -> None:
    driver = StepDriver(make_config(max_model_len=32))
    (output,) = driver.run(make_sequence(range(10), None))
    assert output == generate(range(10), 22)


@pytest.mark.parametrize(
    ("min_tokens", "code"), [(120, "kv_cache_exceeded"), (247, "context_length_exceeded")]
)
def test_sc_01_a_least_output_that_can_never_fit_is_refused(min_tokens: int, code: str) -> None:
    params = SamplingParams(max_tokens=None, min_tokens=min_tokens)
    sequence = Sequence(Request("r", tuple(range(10)), params))
    assert refusal(Scheduler(make_config()), sequence) == ("min_tokens", code)


def test_a_cache_that_is_too_small_names_the_option() -> None:
    for sequence in (make_sequence(range(129), None), make_sequence(range(10), 120)):
        with pytest.raises(RequestError, match="--kv-cache-memory"):
            Scheduler(make_config()).add(sequence)
