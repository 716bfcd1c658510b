"""The TensorRT executor at its limits: shapes, memory, failures, the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pelton.errors import ConfigError, EngineError
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.inputs import StepInputs
from support.fake_cuda import FakeDevice
from support.trt_bundle import VOCAB_SIZE, Fakes, limits, open_fake
from support.trt_steps import BLOCK, decodes, expected, prefill, prompt, step


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    fakes = open_fake(tmp_path)
    yield fakes
    fakes.executor.close()


@pytest.mark.parametrize(
    ("tokens", "fault"),
    [
        (0, "input_ids: shape (1, 0) is outside (1, 1) to (1, 16)"),
        (1, None),
        (16, None),
        (17, "input_ids: shape (1, 17) is outside (1, 1) to (1, 16)"),
    ],
)
def test_tr_02_tokens_outside_the_profile_are_never_enqueued(
    fakes: Fakes, tokens: int, fault: str | None
) -> None:
    check_edge(fakes, step((list(range(tokens)), 0, list(range(5))), rows=[]), fault)


@pytest.mark.parametrize(
    ("sequences", "fault"),
    [
        (0, "input_ids: shape (1, 0) is outside (1, 1) to (1, 16)"),
        (1, None),
        (4, None),
        (5, "block_table: shape (5, 1) is outside (1, 1) to (4, 16)"),
    ],
)
def test_tr_02_sequences_outside_the_profile_are_never_enqueued(
    fakes: Fakes, sequences: int, fault: str | None
) -> None:
    inputs = StepInputs(
        input_ids=np.arange(sequences),
        positions=np.zeros(sequences, np.int64),
        block_table=np.arange(sequences, dtype=np.int32).reshape(sequences, 1),
        seq_lens=np.ones(sequences, np.int32),
        query_start_loc=np.arange(sequences + 1, dtype=np.int32),
        logits_rows=np.zeros(0, np.int64),
        block_copies=np.zeros((0, 2), np.int64),
    )
    check_edge(fakes, inputs, fault)


@pytest.mark.parametrize(
    ("pages", "fault"),
    [
        (0, "block_table: its pages hold 0 tokens, seq_lens has 2"),
        (1, None),
        (16, None),
        (17, "block_table: shape (1, 17) is outside (1, 1) to (4, 16)"),
    ],
)
def test_tr_02_pages_outside_the_profile_are_never_enqueued(
    fakes: Fakes, pages: int, fault: str | None
) -> None:
    check_edge(fakes, step(([1, 2], 0, list(range(pages))), rows=[]), fault)


@pytest.mark.parametrize("rows", [16, 17])
def test_tr_02_logits_rows_outside_the_profile_are_never_enqueued(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The buffer for logits splits the rows before the profile can be left; without that, the profile is."""
    monkeypatch.setattr(fakes.executor, "_split", lambda rows: [rows])
    fault = "logits_rows: shape (17,) is outside (1,) to (16,)" if rows == 17 else None
    check_edge(fakes, step(prompt(2), rows=[0] * rows), fault)


def check_edge(fakes: Fakes, inputs: StepInputs, fault: str | None) -> None:
    """A step at a limit runs; one beyond it is refused by name before anything reaches the device or TensorRT."""
    if fault is None:
        fakes.executor.execute(inputs)
        return
    with pytest.raises(EngineError) as caught:
        fakes.executor.execute(inputs)
    assert str(caught.value).startswith(fault)
    assert not fakes.device.log
    assert not fakes.trt.calls["set_input_shape"]


def test_tr_02_limits_are_the_smaller_of_profiles_and_manifest(tmp_path: Path) -> None:
    built = limits(max_batch_size=4, max_step_tokens=16, max_model_len=64)
    less = limits(max_batch_size=3, max_step_tokens=99, max_model_len=50)
    assert open_fake(tmp_path, built, manifest_limits=less).executor.limits == ExecutorLimits(
        max_model_len=50, max_batch_size=3, max_step_tokens=16, block_size=4, num_blocks=32, vocab_size=VOCAB_SIZE,
        max_logits_rows=16,
    )  # fmt: skip


def test_inputs_that_disagree_are_refused_by_name(fakes: Fakes) -> None:
    good = step(prompt(3))
    bad = StepInputs(
        good.input_ids, good.positions[:2], good.block_table, good.seq_lens, good.query_start_loc,
        good.logits_rows, good.block_copies,
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"positions: shape \(2,\), expected \(3,\)"):
        fakes.executor.execute(bad)


def test_a_block_table_too_narrow_for_its_sequence_is_refused(fakes: Fakes) -> None:
    with pytest.raises(EngineError, match="block_table: its pages hold 4 tokens, seq_lens has 5"):
        fakes.executor.execute(step(([9], 4, [0])))
    assert not fakes.device.log


def test_memory_is_what_the_limits_say(fakes: Fakes) -> None:
    """Pages for 32 blocks; inputs, activations and logits for the largest step; the same again pinned."""
    plan = fakes.executor.memory
    block_bytes = 2 * 2 * BLOCK * (2 * 4 + 1 * 8)
    assert plan.num_blocks == fakes.executor.limits.num_blocks == 32
    assert plan.kv_bytes == 32 * block_bytes
    assert plan.activation_bytes == 2000, "of the profile that needs most"
    assert plan.logits_bytes == 16 * VOCAB_SIZE * 4
    # Six inputs of at most 16 * 8, 4 * 16 * 4, 4 * 4, 5 * 4 and 16 * 8 bytes, each at a multiple of 256.
    assert plan.input_bytes == 5 * 256 + 16 * 8
    assert fakes.device.allocated_bytes == plan.device_bytes
    assert fakes.device.pinned_bytes == plan.pinned_bytes
    parts = (
        plan.kv_bytes,
        plan.activation_bytes,
        plan.input_bytes,
        plan.logits_bytes,
        plan.sampling.device_bytes,
    )
    assert plan.device_bytes == sum(parts)
    assert plan.pinned_bytes == plan.input_bytes + plan.sampling.parameter_bytes + plan.sampling.result_bytes


def test_no_step_allocates(fakes: Fakes) -> None:
    held = fakes.device.allocated_bytes, fakes.device.pinned_bytes
    prefill(fakes, 4, 4)
    fakes.executor.execute(step(prompt(16), rows=list(range(16))))
    assert (fakes.device.allocated_bytes, fakes.device.pinned_bytes) == held


def test_kv_cache_bytes_choose_the_number_of_blocks(tmp_path: Path) -> None:
    block_bytes = 2 * 2 * BLOCK * (2 * 4 + 1 * 8)
    fakes = open_fake(tmp_path, kv_cache_bytes=10 * block_bytes - 1)
    assert fakes.executor.limits.num_blocks == 9
    with pytest.raises(ConfigError, match=r"kv_cache_memory: 255 bytes hold no block of 256 bytes; raise it"):
        open_fake(tmp_path, kv_cache_bytes=block_bytes - 1)


def test_more_pages_than_the_gpu_has_free_are_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    device = FakeDevice(capacity=3 << 20)
    with pytest.raises(ConfigError, match="only 3 MiB of the GPU are free; lower it to at most 2 MiB"):
        open_fake(tmp_path, kv_cache_bytes=3 << 20, device=device)
    assert device.allocated_bytes == 0


def test_pages_that_the_engine_cannot_address_are_refused(tmp_path: Path) -> None:
    device = FakeDevice(capacity=1 << 50)
    with pytest.raises(ConfigError, match=r"blocks, but 1 to \d+ can be used; lower it \(k_caches_0: "):
        open_fake(tmp_path, kv_cache_bytes=1 << 40, device=device)


def test_a_failed_allocation_gives_back_what_was_allocated(tmp_path: Path) -> None:
    class Fragmented(FakeDevice):
        def allocate_pinned(self, num_bytes: int) -> None:  # type: ignore[override]
            raise MemoryError("pinned memory")

    device = Fragmented()
    with pytest.raises(ConfigError, match=r"kv_cache_memory: .* cannot be allocated"):
        open_fake(tmp_path, device=device)
    assert device.allocated_bytes == 0


def test_after_close_nothing_is_left_and_execute_is_refused(fakes: Fakes) -> None:
    prefill(fakes, 2)
    fakes.executor.execute(decodes(2))
    fakes.executor.close()
    fakes.executor.close()
    assert fakes.device.allocated_bytes == fakes.device.pinned_bytes == fakes.device.num_graphs == 0
    assert not fakes.trt.contexts
    with pytest.raises(EngineError, match="the executor is closed"):
        fakes.executor.execute(decodes(2))


def test_close_waits_for_what_a_failed_step_left(fakes: Fakes) -> None:
    fakes.trt.refused["execute_async_v3"] = 0
    with pytest.raises(EngineError, match="TensorRT refused execute_async_v3"):
        fakes.executor.execute(step(prompt(3)))
    assert fakes.device.num_waits == 0
    fakes.executor.close()
    assert fakes.device.num_waits == 1


def test_what_tensorrt_refuses_halfway_is_set_before_the_next_step(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path, limits(max_step_tokens=64))
    fakes.executor.execute(step(prompt(40)))
    for method in ("set_input_shape", "set_tensor_address"):
        fakes.trt.refused[method] = 1
        with pytest.raises(EngineError, match=f"TensorRT refused {method}"):
            fakes.executor.execute(step(prompt(3)))
        fakes.trt.refused.clear()
        logits = fakes.logits(step(prompt(40)))
        np.testing.assert_array_equal(logits[0], expected(list(range(1, 41))))


@pytest.mark.parametrize(
    "method",
    [
        "create_execution_context",
        "set_optimization_profile_async",
        "set_input_shape",
        "set_tensor_address",
        "execute_async_v3",
    ],
)
def test_what_tensorrt_refuses_fails_the_step_and_not_the_next_one(fakes: Fakes, method: str) -> None:
    fakes.trt.refused[method] = 0
    with pytest.raises(EngineError, match=r"TensorRT (refused|makes no)"):
        fakes.executor.execute(step(prompt(3)))
    fakes.trt.refused.clear()
    logits = fakes.logits(step(prompt(3)))
    np.testing.assert_array_equal(logits[0], expected([1, 2, 3]))
