"""Mistakes planted in the TensorRT executor: each must make the fake complain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pelton.errors import EngineError
from pelton.runtime.executor_trt import TensorRTExecutor, _Lane
from pelton.runtime.inputs import StepInputs
from pelton.runtime.trt_facts import EngineProfile
from pelton.runtime.trt_shapes import Placement
from support.fake_cuda import Violation
from support.trt_bundle import Fakes, open_fake
from support.trt_steps import decodes, expected, prefill, prompt, step


def test_a_shape_that_leaves_its_profile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor no longer checks shapes."""
    fakes = open_fake(tmp_path)
    real = EngineProfile.fault
    placer = fakes.executor._placer
    with monkeypatch.context() as patch:
        patch.setattr(EngineProfile, "fault", lambda self, shapes: None)
        placement = placer.place(step(prompt(17)), 1)
    assert real(fakes.trt.facts.profiles[placement.profile], placement.size.shapes) is not None
    monkeypatch.setattr(placer, "place", lambda inputs, num_rows: placement)
    with pytest.raises(Violation, match=r"a shape leaves its profile: input_ids: shape \(1, 17\)"):
        fakes.executor.execute(step(prompt(17)))


def swap_pages(fakes: Fakes) -> None:
    """Give a page tensor back and allocate another, without binding it."""
    caches = fakes.executor._buffers.caches
    name, buffer = next(iter(caches.items()))
    fakes.device.free(buffer)
    caches[name] = fakes.device.allocate(buffer.num_bytes)


@pytest.mark.parametrize("inputs", [decodes(1, past=3), step(prompt(3))], ids=["graph", "enqueue"])
def test_a_buffer_that_is_freed_while_bound_is_noticed(tmp_path: Path, inputs: StepInputs) -> None:
    fakes = open_fake(tmp_path)
    prefill(fakes, 1)
    fakes.executor.execute(decodes(1))
    check_at_free, fakes.device.on_free = fakes.device.on_free, []
    swap_pages(fakes)
    with pytest.raises(Violation, match="was freed"):
        fakes.executor.execute(inputs)
    fakes.device.on_free = check_at_free
    with pytest.raises(Violation, match="was freed while bound to a context"):
        fakes.device.free(fakes.executor._buffers.logits)


class RunsOnAnotherStream(TensorRTExecutor):
    """The engine has a stream of its own, which does not wait for the inputs."""

    def _enqueue(self, lane: _Lane) -> None:
        self._must("execute_async_v3", lane.context, self._device.create_stream().handle)


def test_two_streams_that_race_are_noticed(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path, executor_class=RunsOnAnotherStream)
    with pytest.raises(Violation, match="engine races with the write of stream"):
        fakes.executor.execute(step(prompt(3)))


class NeverWaits(TensorRTExecutor):
    def _wait(self) -> None:
        self._is_in_flight = False


def test_a_step_that_begins_before_the_last_one_is_done_is_noticed(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path, executor_class=NeverWaits)
    fakes.executor.execute(step(prompt(3)))
    with pytest.raises(Violation, match="touched by the host while stream"):
        fakes.executor.execute(step(prompt(3)))


def test_logits_that_are_read_before_they_are_there_are_noticed(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path)
    output = fakes.executor.execute(step(prompt(3)))
    assert np.isnan(output.logits).all(), "the fake ran ahead"
    fakes.device.synchronize()
    np.testing.assert_array_equal(output.logits[0], expected([1, 2, 3]))


class ForgetsAFailedStep(TensorRTExecutor):
    def _settle(self) -> None: ...


def test_staging_that_is_written_while_a_failed_step_copies_it_is_noticed(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path, executor_class=ForgetsAFailedStep)
    fakes.trt.refused["execute_async_v3"] = 0
    with pytest.raises(EngineError):
        fakes.executor.execute(step(prompt(3)))
    with pytest.raises(Violation, match="touched by the host while stream"):
        fakes.executor.execute(step(prompt(3)))


class SharesTheContextOfAGraph(TensorRTExecutor):
    """One context for everything, whatever was captured from it."""

    def _make_lane(self, placement: Placement) -> _Lane:
        first = next(iter(self._lanes.values()), None)
        return super()._make_lane(placement) if first is None else replace(first, graph=None)


def test_a_graph_whose_context_has_changed_is_noticed(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path, executor_class=SharesTheContextOfAGraph)
    fakes.executor.execute(decodes(1, past=0))
    fakes.executor.execute(decodes(2, past=0))
    fakes.executor.execute(decodes(1, past=1))
    with pytest.raises(Violation, match="its context was changed after the capture"):
        fakes.device.synchronize()
