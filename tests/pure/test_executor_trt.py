"""The TensorRT executor on a fake that refuses what a GPU would punish, step by step equal to the scripted executor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton.runtime.executor import ExecutorLimits, StepOutput
from pelton.runtime.inputs import StepInputs
from support.scheduling import StepDriver, make_config, make_sequence
from support.scripted import ScriptedExecutor, digest
from support.trt_bundle import VOCAB_SIZE, Fakes, limits, open_fake
from support.trt_steps import decodes, expected, prefill, prompt, step


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    fakes = open_fake(tmp_path)
    yield fakes
    fakes.executor.close()


class Compared:
    """Runs each step on both executors and compares all logits."""

    def __init__(self, fakes: Fakes, limits: ExecutorLimits) -> None:
        self.fakes = fakes
        self.limits = limits
        self.scripted = ScriptedExecutor(digest(VOCAB_SIZE), limits)
        self.num_steps = 0

    def execute(self, inputs: StepInputs) -> StepOutput:
        wanted = self.scripted.execute(inputs)
        np.testing.assert_array_equal(self.fakes.logits(inputs), wanted.logits)
        self.num_steps += 1
        return wanted


@pytest.mark.parametrize("is_rtx", [True, False], ids=["rtx", "standard"])
@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
            st.integers(1, 9),
            st.integers(1, 3),
            st.sampled_from((None, 1)),
        ),
        min_size=1,
        max_size=6,
    ),
    batch=st.integers(1, 5),
    extra=st.integers(0, 80),
    num_blocks=st.integers(12, 40),
    use_graphs=st.booleans(),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_scheduler_plans_gives_the_scripted_logits(
    tmp_path: Path,
    is_rtx: bool,
    prompts: list[tuple[list[int], int, int, int | None]],
    batch: int,
    extra: int,
    num_blocks: int,
    use_graphs: bool,
) -> None:
    """Forks with block copies, preemption, prefix hits, chunks, scored prompts and decodes, as they come."""
    sizes = {"max_model_len": 44, "max_batch_size": batch, "max_step_tokens": batch + extra}
    fakes = open_fake(tmp_path, limits(num_blocks, **sizes), is_rtx=is_rtx, use_graphs=use_graphs)
    driver = StepDriver(make_config(**sizes, num_blocks=num_blocks))
    assert fakes.executor.limits == replace(driver.executor.limits, max_logits_rows=batch + extra)
    compared = Compared(fakes, driver.executor.limits)
    driver.executor = compared  # type: ignore[assignment]
    driver.run(
        *(make_sequence(ids, length, n=n, prompt_logprobs=scored) for ids, length, n, scored in prompts)
    )
    fakes.executor.close()
    assert compared.num_steps
    assert fakes.device.allocated_bytes == fakes.device.pinned_bytes == 0
    assert not fakes.trt.contexts
    assert not fakes.device.num_graphs


def test_a_graph_is_captured_once_for_each_size_and_then_replayed(fakes: Fakes) -> None:
    prefill(fakes, 4)
    for past in (2, 3):
        for count in (1, 2, 3, 4):
            logits = fakes.logits(decodes(count, past))
            for i in range(count):
                context = [10 * i + 1, 10 * i + 2, *[100 + i] * (past - 1)]
                np.testing.assert_array_equal(logits[i], expected(context))
            assert logits.shape == (count, VOCAB_SIZE)
    # 3 and 4 sequences share the size 4.
    assert fakes.device.log.count("capture") == fakes.device.num_graphs == 3
    assert fakes.device.log.count("launch") == 5
    # The mixed profile's context, and one for each graph.
    assert len(fakes.trt.contexts) == 4


def test_the_width_of_the_block_table_is_part_of_what_a_graph_is_captured_for(fakes: Fakes) -> None:
    for num_tokens in (3, 7, 11, 15):
        tokens, _, blocks = prompt(num_tokens)
        fakes.executor.execute(step((tokens, 0, blocks)))
        logits = fakes.logits(step(([55], num_tokens, blocks)))
        np.testing.assert_array_equal(logits[0], expected([*tokens, 55]))
    assert fakes.device.num_graphs == 3, "1, 2 and 4 pages; 3 pages run as 4"


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
def test_pages_of_one_byte_are_twice_as_many_in_the_same_memory(tmp_path: Path, cache_dtype: str) -> None:
    memory = {}
    for dtype in ("float16", cache_dtype):
        fakes = open_fake(tmp_path / dtype, limits(8), cache_dtype=dtype)
        last = fakes.executor.limits.num_blocks - 1
        memory[dtype] = (last + 1, fakes.device.allocated_bytes)
        fakes.executor.execute(step(prompt(3)))
        fakes.executor.execute(step(([55], 3, [last]), copies=(0, last)))
        logits = fakes.logits(step(([56], 4, [last, 1])))
        np.testing.assert_array_equal(logits[0], expected([1, 2, 3, 55, 56]))
    assert memory == {"float16": (8, memory[cache_dtype][1]), cache_dtype: (16, memory["float16"][1])}


def test_decodes_without_graphs_are_not_padded(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path, use_graphs=False)
    prefill(fakes, 3)
    fakes.executor.execute(decodes(3))
    assert fakes.device.num_graphs == 0
    shapes = {context.profile: context.shapes for context in fakes.trt.contexts}
    assert shapes[0]["input_ids"] == (1, 3)


def test_what_cannot_be_captured_runs_on_without_graphs(
    fakes: Fakes, caplog: pytest.LogCaptureFixture
) -> None:
    prefill(fakes, 2)
    fakes.trt.refused["is_stream_capturable"] = 0
    with caplog.at_level(logging.WARNING):
        for past in (2, 3):
            logits = fakes.logits(decodes(2, past))
            np.testing.assert_array_equal(logits[1], expected([11, 12, *[101] * (past - 1)]))
    assert fakes.device.num_graphs == 0
    assert len(fakes.trt.contexts) == 1, "the one for decode steps; those for graphs are gone"
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps run without CUDA graphs from now on: TensorRT-RTX says that the context cannot be captured"
    ]


def test_shapes_are_set_only_when_they_change(fakes: Fakes) -> None:
    """The fake complains when a shape is set that is there already; equal steps set none at all."""
    fakes.executor.execute(step(prompt(5)))
    before = fakes.trt.calls["set_input_shape"], fakes.trt.calls["set_tensor_address"]
    fakes.executor.execute(step(prompt(5, 8)))
    assert (fakes.trt.calls["set_input_shape"], fakes.trt.calls["set_tensor_address"]) == before
    fakes.executor.execute(step(prompt(6, 8)))
    assert fakes.trt.calls["set_input_shape"] == before[0] + 2, "input_ids and positions"


def test_inputs_are_found_where_a_step_of_another_size_puts_them(tmp_path: Path) -> None:
    """All inputs stand in one buffer, each behind the one before, so that a longer step moves them."""
    fakes = open_fake(tmp_path, limits(max_step_tokens=64))
    for num_tokens in (40, 3, 50, 33, 2):
        logits = fakes.logits(step(prompt(num_tokens)))
        np.testing.assert_array_equal(logits[0], expected(list(range(1, num_tokens + 1))))


def test_a_step_is_one_copy_and_one_engine_run_and_waits_for_nothing(fakes: Fakes) -> None:
    fakes.executor.execute(step(prompt(5)))
    assert fakes.device.log == ["copy_to_device", "engine"]
    assert fakes.device.num_waits == 0


def test_a_step_waits_for_the_one_before_if_nobody_has(fakes: Fakes) -> None:
    fakes.executor.execute(step(prompt(5), rows=[]))
    fakes.executor.execute(step(prompt(5)))
    assert fakes.device.num_waits == 1


def test_a_replayed_step_is_one_copy_and_one_launch(fakes: Fakes) -> None:
    prefill(fakes, 1)
    fakes.executor.execute(decodes(1))
    fakes.device.log.clear()
    enqueued = fakes.trt.calls["execute_async_v3"]
    fakes.executor.execute(decodes(1, past=3))
    assert fakes.device.log == ["copy_to_device", "launch", "engine"]
    assert fakes.trt.calls["execute_async_v3"] == enqueued, "the engine is not enqueued for a replay"


def test_blocks_are_copied_in_all_layers_before_the_step(fakes: Fakes) -> None:
    fakes.executor.execute(step(prompt(3)))
    logits = fakes.logits(step(([55], 3, [9]), copies=(0, 9)))
    np.testing.assert_array_equal(logits[0], expected([1, 2, 3, 55]))
    assert fakes.device.log.count("copy_within") == 4, "keys and values of two layers"


def test_a_step_that_wants_no_logits_still_writes_its_pages(fakes: Fakes) -> None:
    logits = fakes.logits(step(prompt(3), rows=[]))
    assert logits.shape == (0, VOCAB_SIZE)
    logits = fakes.logits(step(([55], 3, [0])))
    np.testing.assert_array_equal(logits[0], expected([1, 2, 3, 55]))


def test_a_decode_step_may_want_fewer_rows_than_it_has(fakes: Fakes) -> None:
    prefill(fakes, 3)
    inputs = step(*(([100 + i], 2, [i]) for i in range(3)), rows=[1])
    np.testing.assert_array_equal(fakes.logits(inputs), [expected([11, 12, 101])])


def test_rows_beyond_the_logits_buffer_take_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pelton.plugins_trt.sampling_memory.LOGITS_BYTES", 1)
    fakes = open_fake(tmp_path)
    assert fakes.executor.memory.num_logits_rows == 4, "never fewer than sequences"
    assert fakes.executor.limits.max_logits_rows == 4, "drafts keep within one run"
    logits = fakes.logits(step(prompt(10), rows=list(range(10))))
    np.testing.assert_array_equal(logits, [expected(list(range(1, n + 2))) for n in range(10)])
    assert fakes.device.log == 3 * ["copy_to_device", "engine", "read"]
    fakes.executor.execute(step(prompt(3)))
    assert fakes.device.num_waits == 0, "reading has waited"
