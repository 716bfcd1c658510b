"""Sampling on the TensorRT executor's stream: the tokens of the host, one wait a step, and no way to read too early."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pelton.errors import EngineError
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor_trt import TensorRTExecutor
from pelton.runtime.outputs import Delta, TokenEvent
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sampler_device import DeviceSampler
from pelton.runtime.sequence import Sequence
from pelton.runtime.trt_sampling import StreamTransfer
from support.fake_cuda import Violation
from support.fake_torch import TorchFakeDevice
from support.sampling import sample_each
from support.scripted import ScriptedExecutor, digest
from support.tiny_model import byte_tokenizer
from support.trt_bundle import VOCAB_SIZE, Fakes, limits, open_fake
from support.trt_steps import decodes, prefill, prompt, step

EOS = 996


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    fakes = open_fake(tmp_path, device=TorchFakeDevice())
    yield fakes
    fakes.executor.close()


def sequence(**params: Any) -> Sequence:
    params = {"temperature": 0.0, "seed": 1, "max_tokens": None, **params}
    return Sequence(Request("r", (1, 2, 3), SamplingParams(**params)))


def wanted(context: list[int]) -> int:
    return digest(VOCAB_SIZE)(context)


def some_requests(count: int) -> list[Request]:
    """Of all kinds: greedy, drawn, sorted, penalised, biased, scored, in several choices."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"temperature": 1.5, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.5, "top_k": 30, "min_p": 0.001, "n": 3},
        {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "logprobs": 0},
        {"temperature": 3.0, "presence_penalty": 1.0, "logit_bias": {5: 9.0, 6: -100.0}},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "prompt_logprobs": 0, "min_tokens": 3, "stop_token_ids": (5, 6), "n": 2},
    ]
    rng = random.Random(count)
    return [
        Request(
            str(i),
            tuple(rng.randrange(250) for _ in range(rng.randrange(1, 30))),
            SamplingParams(seed=i, max_tokens=rng.randrange(1, 9), ignore_eos=True, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


def outcomes(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[Delta]]:
    """Deltas of each choice. Log-probabilities are rounded: the host adds in another order."""
    for request in requests:
        engine.admit(request)
    deltas: dict[tuple[str, int], list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)
    engine.close()
    return deltas


def scores(deltas: list[Delta]) -> list[float]:
    every = [
        score for delta in deltas for score in (*delta.logprobs, *(delta.prompt_logprobs or ())) if score
    ]
    return [
        value
        for score in every
        for value in (score.logprob, score.rank, *(x for pair in score.top for x in pair))
    ]


@pytest.mark.parametrize("logits_bytes", [64 << 20, 1], ids=["whole", "split"])
def test_an_engine_gives_the_tokens_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logits_bytes: int
) -> None:
    """Batches, chunks, preemption, scored prompts; with the smallest buffer their logits come in pieces."""
    monkeypatch.setattr("pelton.plugins_trt.sampling_memory.LOGITS_BYTES", logits_bytes)
    is_split = logits_bytes == 1
    device = TorchFakeDevice(may_upload=is_split)  # what came to the host in pieces goes back row by row
    fakes = open_fake(tmp_path, limits(24, max_step_tokens=24), device=device)
    requests = some_requests(32)
    config = EngineConfig(check_invariants=True)
    host = ScriptedExecutor(digest(VOCAB_SIZE), fakes.executor.limits)
    expected = outcomes(Engine(host, byte_tokenizer(), config), requests)
    got = outcomes(Engine(fakes.executor, byte_tokenizer(), config), requests)
    assert got.keys() == expected.keys()
    for key, deltas in expected.items():
        assert [delta.token_ids for delta in got[key]] == [delta.token_ids for delta in deltas]
        assert [delta.finish_reason for delta in got[key]] == [delta.finish_reason for delta in deltas]
        assert scores(got[key]) == pytest.approx(scores(deltas), abs=1e-5)
    assert ("read" in device.log) == is_split


@pytest.mark.parametrize(
    ("params", "uploads"), [({}, []), ({"temperature": 1.0}, ["copy_to_device"])], ids=["greedy", "drawn"]
)
def test_a_step_waits_once_for_its_tokens(fakes: Fakes, params: dict[str, Any], uploads: list[str]) -> None:
    sampler = fakes.executor.make_sampler([EOS])
    prefill(fakes, 2)
    sequences = [sequence(**params), sequence(**params)]
    sample_each(sampler, fakes.executor.execute(decodes(2)).logits, sequences)
    for _ in range(3):
        fakes.device.log.clear()
        num_waits = fakes.device.num_waits
        output = fakes.executor.execute(decodes(2, past=3))
        assert fakes.device.num_waits == num_waits
        events = sample_each(sampler, output.logits, sequences)
        assert fakes.device.num_waits == num_waits + 1
        assert fakes.device.log == ["copy_to_device", "launch", "engine", *uploads, "torch", "copy_to_host"]
        if not params:
            contexts = [[10 * i + 1, 10 * i + 2, 100 + i, 100 + i] for i in range(2)]
            assert events == [TokenEvent(wanted(context)) for context in contexts]


def test_sampling_allocates_no_buffers(fakes: Fakes) -> None:
    held = fakes.device.allocated_bytes, fakes.device.pinned_bytes
    sampler = fakes.executor.make_sampler([EOS])
    output = fakes.executor.execute(step(prompt(16), rows=list(range(16))))
    kind: dict[str, Any] = {"temperature": 1.0, "top_p": 0.5, "logprobs": 64, "presence_penalty": 1.0}
    sample_each(sampler, output.logits, [sequence(**kind) for _ in range(16)])
    sampler.prompt_logprobs(output.logits, list(range(16)), 64)
    assert (fakes.device.allocated_bytes, fakes.device.pinned_bytes) == held


def test_a_closed_executor_samples_no_more(fakes: Fakes) -> None:
    sampler = fakes.executor.make_sampler([EOS])
    logits = fakes.executor.execute(step(prompt(3))).logits
    fakes.executor.close()
    with pytest.raises(EngineError, match="the executor is closed"):
        sample_each(sampler, logits, [sequence()])


def test_what_fails_on_the_device_fails_the_step_and_not_the_next_one(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of a step that failed are made again."""
    sampler = fakes.executor.make_sampler([EOS])
    member = sequence(frequency_penalty=2.0)
    token = wanted([1, 2, 3])
    member.token_ids += [token] * 6
    with monkeypatch.context() as patch:
        patch.setattr("pelton.runtime.sampler_pass.add_counts", lambda *_: fail())
        with pytest.raises(EngineError, match="planted"):
            sample_each(sampler, fakes.executor.execute(step(prompt(3))).logits, [member])
    event = sample_each(sampler, fakes.executor.execute(step(prompt(3))).logits, [member])[0]
    assert isinstance(event, TokenEvent)
    assert event.token_id != token, "12 are subtracted from 10"


def fail() -> None:
    raise EngineError("planted")


def test_an_upload_that_nobody_waited_for_is_done_before_the_next_one(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = fakes.executor.make_sampler([EOS])
    logits = fakes.executor.execute(step(prompt(3))).logits
    sample_each(sampler, logits, [sequence()])
    with monkeypatch.context() as patch:
        patch.setattr(fakes.device, "run", lambda *_: fail())
        with pytest.raises(EngineError, match="planted"):
            sample_each(sampler, logits, [sequence(logprobs=1)])
    logits = fakes.executor.execute(step(prompt(3))).logits
    event = sample_each(sampler, logits, [sequence(logprobs=1)])[0]
    assert isinstance(event, TokenEvent)
    assert event.token_id == wanted([1, 2, 3])


def test_a_step_may_be_sampled_again_after_a_failure(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload of the first attempt must not read what the second one writes."""
    sampler = fakes.executor.make_sampler([EOS])
    logits = fakes.executor.execute(step(prompt(3))).logits
    with monkeypatch.context() as patch:
        patch.setattr(fakes.device, "run", lambda *_: fail())
        with pytest.raises(EngineError, match="planted"):
            sample_each(sampler, logits, [sequence(logprobs=1)])
    event = sample_each(sampler, logits, [sequence(logprobs=1)])[0]
    assert isinstance(event, TokenEvent)
    assert event.token_id == wanted([1, 2, 3])


def test_what_the_buffers_do_not_hold_is_not_copied(fakes: Fakes) -> None:
    transfer, sizes = fakes.executor.make_sampler([EOS])._transfer, fakes.executor.memory.sampling  # type: ignore[attr-defined]
    for num_bytes, num_results in ((sizes.parameter_bytes + 1, 1), (0, sizes.result_bytes // 8 + 1)):
        with pytest.raises(ValueError, match="do not fit"):
            transfer.run(np.zeros(num_bytes, np.uint8), num_results, lambda *_: None)
    assert not fakes.device.log


# --- mistakes: each must be noticed


class NeverWaits(TensorRTExecutor):
    def _wait(self) -> None:
        self._is_in_flight = False


def test_tokens_that_are_read_before_they_are_there_are_noticed(tmp_path: Path) -> None:
    fakes = open_fake(tmp_path, device=TorchFakeDevice(), executor_class=NeverWaits)
    sampler = fakes.executor.make_sampler([EOS])
    output = fakes.executor.execute(step(prompt(3)))
    with pytest.raises(Violation, match="touched by the host while stream"):
        sample_each(sampler, output.logits, [sequence()])


def sampler_on(fakes: Fakes, **changes: Any) -> DeviceSampler:
    executor = fakes.executor
    parts: dict[str, Any] = {
        "device": executor._device,
        "stream": executor._stream,
        "buffers": executor._buffers.sampling,
        "logits": executor._buffers.logits,
        "enter": executor._begin_sampling,
        "wait": executor._wait,
        **changes,
    }
    kind = parts.pop("kind", StreamTransfer)
    return DeviceSampler(VOCAB_SIZE, [EOS], transfer=kind(**parts), sizes=executor.memory.sampling)


def test_sampling_on_another_stream_is_noticed(fakes: Fakes) -> None:
    sampler = sampler_on(fakes, stream=fakes.device.create_stream())
    output = fakes.executor.execute(step(prompt(3)))
    with pytest.raises(Violation, match="torch races with the write of stream"):
        sample_each(sampler, output.logits, [sequence()])


class LooksAtOnce(StreamTransfer):
    """What the host would see of the logits when it does not wait for them."""

    def run(self, parameters: np.ndarray, num_results: int, work: Callable[[Any, Any], None]) -> np.ndarray:
        results = torch.zeros(num_results, dtype=torch.int64)
        work(torch.from_numpy(parameters), results)
        return results.numpy()


def test_logits_that_are_sampled_before_they_are_there_are_noticed(fakes: Fakes) -> None:
    sampler = sampler_on(fakes, kind=LooksAtOnce)
    logits = fakes.executor.execute(step(prompt(3))).logits
    assert isinstance(sample_each(sampler, logits, [sequence()])[0], EngineError)
    fakes.device.synchronize()
    assert sample_each(sampler, logits, [sequence()]) == [TokenEvent(wanted([1, 2, 3]))]


def test_work_on_memory_that_it_was_not_given_is_noticed(fakes: Fakes) -> None:
    sampler = sampler_on(fakes, logits=fakes.executor._buffers.inputs)
    output = fakes.executor.execute(step(prompt(3)))
    with pytest.raises(Violation, match="uses memory that it was not given"):
        sample_each(sampler, output.logits, [sequence()])


@pytest.mark.parametrize(
    "look",
    [lambda x: int(x.argmax()), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x[[0, 2]]],
    ids=["item", "nonzero", "mask", "list"],
)
def test_work_that_waits_for_the_device_is_noticed(fakes: Fakes, look: Callable[[Tensor], Any]) -> None:
    logits = fakes.executor._buffers.logits
    fakes.executor.execute(step(prompt(3)))
    fakes.device.run(lambda x: look(x), (logits,), fakes.executor._stream)
    with pytest.raises(Violation, match="waits for the device"):
        fakes.device.synchronize()
