"""The thread that owns the engine: admission, abort, failures and the end, seen from other threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pelton.errors import EngineError, OverloadedError, RequestError
from pelton.runtime.engine import Engine
from pelton.runtime.engine_loop import IDLE_BEAT_S, MAX_FAILED_STEPS, EngineLoop
from pelton.runtime.outputs import Delta
from pelton.runtime.request import Request, SamplingParams
from support.live_server import StepGate, until
from support.tiny_model import scripted_engine

TIMEOUT = 10.0


class Inbox:
    """What one caller is told."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ended = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.ended.set()


def make_request(request_id: str, num_prompt_tokens: int = 3, **params: Any) -> Request:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params})
    return Request(request_id, tuple(range(40, 40 + num_prompt_tokens)), given)


@contextmanager
def running(engine: Engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)
    loop.start()
    yield loop
    loop.stop(TIMEOUT)


def is_idle(loop: EngineLoop) -> bool:
    stats = loop.stats()
    return stats.num_running == stats.num_waiting == stats.num_used_blocks == 0


def test_requests_are_answered_and_counted() -> None:
    with running(scripted_engine()) as loop:
        inbox = Inbox()
        loop.submit([make_request("r")], inbox).result(TIMEOUT)
        assert inbox.ended.wait(TIMEOUT)
        assert [len(delta.token_ids) for delta in inbox.deltas] == [1, 1, 1, 1]
        assert until(lambda: loop.stats().num_finished == {"length": 1})
    assert not loop.is_alive


def test_all_of_a_call_is_admitted_or_nothing() -> None:
    with running(scripted_engine(num_blocks=8)) as loop:
        inbox = Inbox()
        too_long = make_request("b", num_prompt_tokens=200)
        with pytest.raises(RequestError):
            loop.submit([make_request("a", max_tokens=100), too_long], inbox).result(TIMEOUT)
        assert until(lambda: is_idle(loop))
        loop.submit([make_request("a")], inbox).result(TIMEOUT)  # the id is free again
        assert inbox.ended.wait(TIMEOUT)
        assert [delta.finish_reason for delta in inbox.deltas] == [None, None, None, "length"]


def test_st_12_an_aborted_request_lets_go_and_says_nothing_more() -> None:
    gate = StepGate(num_steps=2)
    with running(scripted_engine(before_step=gate)) as loop:
        inbox = Inbox()
        loop.submit([make_request("r", max_tokens=400, n=2)], inbox).result(TIMEOUT)
        assert gate.is_held.wait(TIMEOUT)
        told = len(inbox.deltas)
        loop.abort(["r", "unknown"])
        gate.allow(1)
        assert until(lambda: is_idle(loop) and loop.stats().num_finished == {"abort": 2})
        # The step that was under way when the abort came may still be heard of.
        assert len(inbox.deltas) - told <= 2
        assert not inbox.ended.is_set()
        gate.open()


def test_a_submission_can_be_withdrawn_before_it_is_admitted() -> None:
    gate = StepGate()
    with running(scripted_engine(before_step=gate)) as loop:
        first, second = Inbox(), Inbox()
        loop.submit([make_request("first")], first).result(TIMEOUT)
        assert gate.is_held.wait(TIMEOUT)
        future = loop.submit([make_request("second")], second)
        assert future.cancel()
        gate.open()
        assert first.ended.wait(TIMEOUT)
        assert until(lambda: loop.stats().num_finished == {"length": 1} and is_idle(loop))
        assert second.deltas == []


def test_sc_08_aborts_at_any_moment_leave_nothing_behind() -> None:
    chance = random.Random(5)
    with running(scripted_engine()) as loop:
        for number in range(300):
            inbox = Inbox()
            params = {"max_tokens": chance.randint(1, 12), "n": chance.choice([1, 3])}
            future = loop.submit([make_request(f"r{number}", **params)], inbox)
            for _ in range(chance.randint(0, 3)):
                loop.stats()
            if chance.random() < 0.5:
                future.result(TIMEOUT)
            loop.abort([f"r{number}"])
        assert until(lambda: is_idle(loop) and loop.stats().num_prompt_tokens == 900)
        assert sum(loop.stats().num_finished.values()) >= 300
        assert not loop._listeners


class FaultyEngine:
    """An engine whose `step` raises as told, and which keeps the rest of the engine as it is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_faults = 0
        self.cause: Exception = ValueError("a bug")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Delta]:
        if self.num_faults:
            self.num_faults -= 1
            raise self.cause
        return self._engine.step()


@pytest.mark.parametrize("cause", [ValueError("a bug"), EngineError("a bug in /some/path")])
def test_a_step_that_raises_fails_its_requests_and_the_loop_goes_on(cause: Exception) -> None:
    engine = FaultyEngine(scripted_engine())
    engine.num_faults, engine.cause = 1, cause
    with running(engine) as loop:  # type: ignore[arg-type]
        inbox = Inbox()
        loop.submit([make_request("r", n=2, max_tokens=400)], inbox).result(TIMEOUT)
        assert inbox.ended.wait(TIMEOUT)
        assert isinstance(inbox.deltas[-1].error, EngineError)
        assert str(inbox.deltas[-1].error) == "the engine failed; the log has the cause"
        assert until(lambda: is_idle(loop) and loop.stats().num_finished == {"abort": 2})
        again = Inbox()
        loop.submit([make_request("r")], again).result(TIMEOUT)
        assert again.ended.wait(TIMEOUT)
        assert again.deltas[-1].finish_reason == "length"


def test_an_admission_that_raises_says_nothing_of_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine()

    def admit(request: Request) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(engine, "admit", admit)
    with running(engine) as loop:
        refused = loop.submit([make_request("r")], Inbox()).exception(TIMEOUT)
    assert isinstance(refused, EngineError)
    assert str(refused) == "the engine could not admit the request; the log has the cause"


def test_sv_04_an_engine_that_cannot_step_any_more_is_given_up() -> None:
    engine = FaultyEngine(scripted_engine())
    engine.num_faults = MAX_FAILED_STEPS
    with running(engine) as loop:  # type: ignore[arg-type]
        inbox = Inbox()
        loop.submit([make_request("r")], inbox).result(TIMEOUT)
        assert inbox.ended.wait(TIMEOUT)
        assert until(lambda: not loop.is_alive)
        with pytest.raises(OverloadedError):
            loop.submit([make_request("s")], inbox).result(TIMEOUT)


def test_a_listener_that_raises_is_dropped() -> None:
    def broken(delta: Delta) -> None:
        raise RuntimeError("gone")

    with running(scripted_engine()) as loop:
        inbox = Inbox()
        loop.submit([make_request("bad", max_tokens=400)], broken).result(TIMEOUT)
        loop.submit([make_request("good")], inbox).result(TIMEOUT)
        assert inbox.ended.wait(TIMEOUT)
        assert until(lambda: loop.stats().num_finished == {"abort": 1, "length": 1})


def test_stop_answers_everyone() -> None:
    gate = StepGate(num_steps=1)
    loop = EngineLoop(scripted_engine(before_step=gate))
    loop.start()
    inbox = Inbox()
    loop.submit([make_request("r", max_tokens=400)], inbox).result(TIMEOUT)
    assert gate.is_held.wait(TIMEOUT)
    late = loop.submit([make_request("late")], inbox)
    assert not loop.stop(timeout=0.05), "a step is under way"
    gate.open()
    assert loop.stop(TIMEOUT)
    assert isinstance(inbox.deltas[-1].error, EngineError)
    assert isinstance(late.exception(TIMEOUT), OverloadedError)
    with pytest.raises(OverloadedError):
        loop.submit([make_request("later")], inbox).result(TIMEOUT)


def test_sv_04_the_heartbeat_is_the_loops() -> None:
    gate = StepGate()
    with running(scripted_engine(before_step=gate)) as loop:
        loop.submit([make_request("r")], Inbox()).result(TIMEOUT)
        assert until(lambda: loop.seconds_since_heartbeat() > 2 * IDLE_BEAT_S)
        gate.open()
        assert until(lambda: loop.seconds_since_heartbeat() < IDLE_BEAT_S)
        assert until(lambda: is_idle(loop))
        missed = until(lambda: loop.seconds_since_heartbeat() > 2 * IDLE_BEAT_S, seconds=3 * IDLE_BEAT_S)
        assert not missed, "an idle loop beats too"
