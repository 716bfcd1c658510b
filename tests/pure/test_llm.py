"""The Python API on scripted engines: streams and calls share one engine, and each ends with all its text."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from pelton.errors import RequestError
from pelton.runtime.inputs import StepInputs
from pelton.runtime.llm import LLM
from pelton.runtime.outputs import Delta
from pelton.runtime.request import SamplingParams
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
