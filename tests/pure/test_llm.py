"""The Python API on scripted engines: streams and calls share one engine, and each ends with all its text."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.errors import ConfigError, EngineError, RequestError
from pelton.runtime import llm as llm_module
from pelton.runtime.engine import EngineConfig
from pelton.runtime.inputs import StepInputs
from pelton.runtime.llm import LLM
from pelton.runtime.outputs import Delta
from pelton.runtime.request import SamplingParams
from pelton.runtime.speculate.config import SpeculationConfig
from support.tiny_model import byte_tokenizer, scripted_engine


def make_llm(**options: Any) -> LLM:
    return LLM.from_engine(scripted_engine(**options))


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)


def text(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def assert_idle(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_results_come_in_the_order_of_the_prompts() -> None:
    llm = make_llm(max_batch_size=2)
    prompts = ["a", byte_tokenizer().encode("k"), "t", "c"]
    results = llm.generate(prompts, [greedy(n) for n in (9, 1, 4, 2)])
    assert [result.prompt for result in results] == ["a", None, "t", "c"]
    assert [result.outputs[0].text for result in results] == ["bcdefghij", "l", "uvwx", "de"]
    assert [result.outputs[0].finish_reason for result in results] == ["length"] * 4
    assert all(result.finished for result in results)
    assert_idle(llm)


def test_one_prompt_one_params_and_several_choices() -> None:
    llm = make_llm()
    (result,) = llm.generate("a", greedy(3, n=2, logprobs=0))
    assert [choice.text for choice in result.outputs] == ["bcd", "bcd"]
    assert [len(choice.logprobs or ()) for choice in result.outputs] == [3, 3]
    (of_ids,) = llm.generate(byte_tokenizer().encode("x"), greedy(2))
    assert of_ids.outputs[0].text == "yz"
    assert llm.generate([]) == []


def test_two_interleaved_streams_lose_nothing() -> None:
    llm = make_llm()
    first, second = llm.stream("a", greedy(12)), llm.stream("m", greedy(4, n=2))
    got: dict[str, list[Delta]] = {"first": [], "second": []}
    # Three of the first for one of the second, then whatever is left.
    for _ in range(3):
        got["first"] += [next(first), next(first), next(first)]
        got["second"].append(next(second))
    got["second"] += second
    got["first"] += first
    assert text(got["first"]) == "bcdefghijklm"
    for index in range(2):
        assert text(delta for delta in got["second"] if delta.index == index) == "nopq"
    assert next(first, None) is None
    assert_idle(llm)


def test_a_stream_goes_on_after_a_generate_in_its_middle() -> None:
    llm = make_llm()
    stream = llm.stream("a", greedy(6))
    start = next(stream).text
    (result,) = llm.generate("p", greedy(10))
    assert result.outputs[0].text == "qrstuvwxyz"
    assert start + text(stream) == "bcdefg"
    assert_idle(llm)


def test_a_generate_that_fails_takes_nothing_from_a_stream() -> None:
    llm = make_llm(max_model_len=64)
    stream = llm.stream("a", greedy(6))
    start = next(stream).text
    with pytest.raises(RequestError):
        llm.generate(["b", "x" * 64], greedy(4))
    assert start + text(stream) == "bcdefg"
    assert_idle(llm)


@pytest.mark.parametrize("way", ["close", "with", "drop", "cycle"])
@pytest.mark.parametrize("num_read", [0, 2])
def test_leaving_a_stream_early_frees_its_blocks(way: str, num_read: int) -> None:
    llm = make_llm()
    stream = llm.stream("a" * 40, greedy(100, n=2))
    for _ in range(num_read):
        next(stream)
    assert llm.engine.num_requests == 1
    if way == "close":
        stream.close()
        assert next(stream, None) is None
    elif way == "with":
        with stream:
            pass
    elif way == "cycle":
        stream.myself = stream  # type: ignore[attr-defined]
        del stream
        gc.collect()
    else:
        del stream
    assert llm.engine.num_requests == 0
    assert_idle(llm)
    # What the engine still had to say about it reaches nobody.
    assert text(llm.stream("a", greedy(3))) == "bcd"


def test_a_stream_dropped_within_a_step_ends_before_the_next() -> None:
    """As the garbage collector may do at any allocation."""
    streams: list[object] = []

    def drop(number: int, inputs: StepInputs) -> None:
        if number == 3:
            streams.clear()

    llm = make_llm(before_step=drop)
    streams.append(llm.stream("a", greedy(100)))
    (result,) = llm.generate("h", greedy(6))
    assert result.outputs[0].text == "ijklmn"
    # Both in steps 1 to 3, then one alone.
    assert llm.engine.stats().num_output_tokens == 3 + 6
    assert_idle(llm)


def test_a_stream_refuses_at_the_call() -> None:
    llm = make_llm(max_model_len=64)
    with pytest.raises(RequestError) as refused:
        llm.stream("x" * 64, greedy(4))
    assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
    assert_idle(llm)


def test_a_refused_prompt_leaves_nothing_running() -> None:
    steps: list[int] = []
    llm = make_llm(max_model_len=64, before_step=lambda number, inputs: steps.append(number))
    with pytest.raises(RequestError) as refused:
        llm.generate(["a", "x" * 64, "b"], greedy(4))
    assert refused.value.field == "prompt"
    assert (llm.engine.num_requests, steps) == (0, [])
    assert_idle(llm)
    assert llm.generate("a", greedy(4))[0].outputs[0].text == "bcde"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_params_as_prompts(count: int) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=f"{count} given for 2 prompts") as refused:
        llm.generate(["a", "b"], [greedy(2)] * count)
    assert refused.value.field == "params"
    assert llm.engine.num_requests == 0


def test_an_interrupt_ends_the_call_and_no_stream() -> None:
    def interrupt(number: int, inputs: StepInputs) -> None:
        if number == 4:
            raise KeyboardInterrupt

    llm = make_llm(before_step=interrupt)
    stream = llm.stream("a", greedy(8))
    start = next(stream).text
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["b", "c"], greedy(10))
    assert llm.engine.num_requests == 1
    assert start + text(stream) == "bcdefghi"
    assert_idle(llm)


def test_a_choice_that_fails_says_why_and_the_others_go_on() -> None:
    def poison(number: int, logits: np.ndarray) -> None:
        if number == 2:
            logits[0, :] = np.nan

    results = make_llm(after_step=poison).generate(["a", "b"], greedy(4))
    failed, fine = sorted((result.outputs[0] for result in results), key=lambda choice: len(choice.text))
    assert (failed.finish_reason, len(failed.token_ids)) == ("error", 1)
    assert "NaN" in str(failed.error)
    assert (fine.finish_reason, len(fine.token_ids), fine.error) == ("length", 4, None)


def test_close_ends_a_stream() -> None:
    with make_llm() as llm:
        stream = llm.stream("a", greedy(50))
        next(stream)
    assert [delta.finish_reason for delta in stream] == ["abort"]


def test_chat_with_one_conversation_and_with_several() -> None:
    llm = make_llm()
    asked = [{"role": "user", "content": "hello"}]
    ended = [*asked, {"role": "assistant", "content": "abc"}]
    (one,) = llm.chat(asked, greedy(5))
    assert one.outputs[0].text == "abcde"
    assert one.prompt is None
    assert list(one.prompt_token_ids) == llm.tokenizer.encode_chat(asked)
    several = llm.chat([asked, ended], [greedy(2), greedy(3)])
    assert [result.outputs[0].text for result in several] == ["ab", "abc"]
    (going_on,) = llm.chat(ended, greedy(3), add_generation_prompt=False, continue_final_message=True)
    assert going_on.outputs[0].text == "def"
    assert text(llm.stream_chat(asked, greedy(4))) == "abcd"
    with pytest.raises(RequestError):
        llm.chat([asked, [{"content": "no role"}]], greedy(2))
    assert_idle(llm)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("a"),
        lambda llm: llm.generate([]),
        lambda llm: llm.chat([{"role": "user", "content": "a"}]),
        lambda llm: llm.stream("a"),
        lambda llm: llm.stream_chat([{"role": "user", "content": "a"}]),
    ],
)
def test_a_closed_llm_refuses_every_call(call: Callable[[LLM], object]) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="the LLM is closed"):
        call(llm)
    assert llm.engine.num_requests == 0


def test_max_tokens_is_never_cut() -> None:
    llm = make_llm(max_model_len=64)
    for wanted in (5, 2**31, 10**5000):
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError, match="max_tokens can be 4 at most") as refused:
                call([5] * 60, greedy(wanted))
            assert (refused.value.field, refused.value.code) == ("max_tokens", "context_length_exceeded")
    assert llm.engine.num_requests == 0
    for params in (greedy(4), SamplingParams(temperature=0, max_tokens=None)):
        (result,) = llm.generate([[5] * 60], params)
        assert len(result.outputs[0].token_ids) == 4


def test_the_options_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "enable_prefix_caching": False,
        "max_batch_size": 2,
        "max_step_tokens": 3,
        "max_chunk_tokens": 4,
        "kv_cache_bytes": 5,
        "num_threads": 6,
        "check_invariants": True,
        "speculation": SpeculationConfig("ngram"),
    }
    assert list(given) == [option.name for option in fields(EngineConfig)]
    assert given.keys() <= inspect.signature(LLM).parameters.keys()
    loaded: list[tuple[EngineConfig, str | None]] = []

    def load(bundle: str | Path, config: EngineConfig, *, chat_template: str | None) -> object:
        loaded.append((config, chat_template))
        return scripted_engine()

    monkeypatch.setattr(llm_module, "load_engine", load)
    LLM("bundle", **given, chat_template="{{ messages }}")
    LLM("bundle")
    assert loaded == [(EngineConfig(**given), "{{ messages }}"), (EngineConfig(), None)]


def test_an_option_that_is_unknown_or_of_a_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match=r"no option kv_cache_memory; it has .*kv_cache_bytes, num_threads"):
        LLM("bundle", kv_cache_memory="64MiB")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kv_cache_bytes must be an integer of at least 1 \(bytes\)"):
        LLM("bundle", kv_cache_bytes="64MiB")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="enable_prefix_caching must be True or False, got 'no'"):
        LLM("bundle", enable_prefix_caching="no")  # type: ignore[arg-type]


def test_prompts_in_the_form_of_vllm() -> None:
    llm = make_llm()
    ids = byte_tokenizer().encode("k")
    results = llm.generate([{"prompt": "a"}, {"prompt_token_ids": ids}, np.array(ids).tolist()], greedy(2))
    assert [result.prompt for result in results] == ["a", None, None]
    assert [result.outputs[0].text for result in results] == ["bc", "lm", "lm"]
    (one,) = llm.generate({"prompt": "x"}, greedy(2))
    assert one.outputs[0].text == "yz"
    (of_numpy_ids,) = llm.generate(list(np.array(ids)), greedy(1))
    assert of_numpy_ids.outputs[0].text == "l"
    assert text(llm.stream({"prompt": "a"}, greedy(2))) == "bc"


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (None, "prompts"),
        (5, "prompts"),
        (b"abc", "prompts"),
        ({"text": "x"}, "prompts"),
        ({"prompt": 5}, "prompts"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompts"),
        ({"prompt_token_ids": "x"}, "prompts"),
        ([1, "x"], "prompts"),
        ([True], "prompts"),
        (["a", None], "prompts[1]"),
        (["a", b"b"], "prompts[1]"),
        (["a", [1.5]], "prompts[1]"),
        (["a", {"prompt_token_ids": [None]}], "prompts[1]"),
        ([[1], [10**6]], "prompt"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_named(prompts: Any, field: str) -> None:
    llm = make_llm()
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, greedy(2))
    assert refused.value.field == field
    assert llm.engine.num_requests == 0


@pytest.mark.parametrize(
    ("params", "field"),
    [({"max_tokens": 3}, "params"), (5, "params"), ("ab", "params"), ([{"max_tokens": 3}], "params[0]")],
)
def test_params_of_a_wrong_type_are_named(params: Any, field: str) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="must be SamplingParams") as refused:
        llm.generate("a", params)
    assert refused.value.field == field
    if field == "params":
        with pytest.raises(RequestError, match="must be SamplingParams"):
            llm.stream("a", params)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "bad", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": b"x"}], "messages[0].content"),
    ],
)
def test_bad_messages_are_named(messages: Any, field: str) -> None:
    llm = make_llm()
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError) as refused:
            call(messages, greedy(2))
        assert refused.value.field == field


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_threads_share_an_llm() -> None:
    llm = make_llm()
    got: dict[str, list[str]] = {"a": [], "d": [], "g": []}

    def work(start: str) -> None:
        for _ in range(40):
            got[start].append(llm.generate(start, greedy(6))[0].outputs[0].text)
            got[start].append(text(llm.stream(start, greedy(6))))
            with llm.stream(start, greedy(100)) as left_early:
                next(left_early)

    threads = [threading.Thread(target=work, args=(start,), daemon=True) for start in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == {"a": ["bcdefg"] * 80, "d": ["efghij"] * 80, "g": ["hijklm"] * 80}
    assert_idle(llm)
    assert llm.engine.num_requests == 0


def test_a_stream_dropped_in_the_last_step_holds_nothing() -> None:
    streams: list[object] = []
    llm = make_llm(before_step=lambda number, inputs: streams.clear())
    streams.append(llm.stream("a", greedy(100)))
    with llm.stream("h", greedy(100)) as stream:
        next(stream)
        assert llm.engine.num_requests == 1


class HandedOver:
    """A lock. As soon as the main thread lets go of it another thread calls `step`, to its end."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._step = step

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()
        if threading.current_thread() is threading.main_thread():
            stepper = threading.Thread(target=self._step)
            stepper.start()
            stepper.join()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def test_another_thread_that_steps_at_any_moment_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(llm, "_engine_lock", HandedOver(llm._pump))
    assert text(llm.stream("a", greedy(20))) == "bcdefghijklmnopqrstu"
    assert llm.generate("a", greedy(6))[0].outputs[0].text == "bcdefg"
