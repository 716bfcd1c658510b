"""Deltas to answers: chunks and bodies, from a scripted engine that is driven by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pelton.errors import EngineError
from pelton.runtime.engine import Engine
from pelton.runtime.outputs import Delta, TokenLogprob
from pelton.runtime.protocol import CHAT_COMPLETIONS, COMPLETIONS, ApiContext, Reply, dump_json, parse_call
from pelton.runtime.protocol_logprobs import CompletionLogprobs, chat_logprobs
from support.tiny_model import IM_END, byte_tokenizer, scripted_engine

USER = [{"role": "user", "content": "hi"}]


def run(endpoint: str, engine: Engine | None = None, **body: Any) -> tuple[Reply, list[dict[str, Any]]]:
    """The finished reply and the chunks it sent; everything must be JSON."""
    engine = engine or scripted_engine()
    context = ApiContext(engine.tokenizer, engine.limits, ("tiny",))
    call = parse_call(endpoint, {"temperature": 0, **body}, context, "c1")
    reply = Reply(call, context, created=7)
    for request in call.requests:
        engine.admit(request)
    chunks = []
    while engine.has_work:
        for delta in engine.step():
            chunks.extend(reply.feed(delta))
    assert reply.is_done
    for value in chunks or ([] if reply.error else [reply.body()]):
        dump_json(value)
    return reply, chunks


def body_of(endpoint: str, **body: Any) -> dict[str, Any]:
    reply, chunks = run(endpoint, **body)
    assert chunks == []
    assert reply.body() == reply.body(), "asking again gives the same"
    return reply.body()


def test_completion_body() -> None:
    assert body_of(COMPLETIONS, prompt="abc", max_tokens=3) == {
        "id": "cmpl-c1",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "def", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_chat_body() -> None:
    body = body_of(CHAT_COMPLETIONS, messages=USER, max_completion_tokens=2)
    assert (body["id"], body["object"]) == ("chatcmpl-c1", "chat.completion")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


def test_choices_of_a_prompt_list_are_numbered_prompt_by_prompt() -> None:
    body = body_of(COMPLETIONS, prompt=["a", "x"], n=2, max_tokens=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "bc"),
        (1, "bc"),
        (2, "yz"),
        (3, "yz"),
    ]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 8


def test_finish_and_stop_reasons() -> None:
    def ending(**body: Any) -> tuple[str, str, object]:
        choice = body_of(COMPLETIONS, max_tokens=10, **body)["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    tokenizer = byte_tokenizer()
    assert ending(prompt="a", stop=["ef", "z"]) == ("bcd", "stop", "ef")
    assert ending(prompt="a", stop="ef", include_stop_str_in_output=True) == ("bcdef", "stop", "ef")
    assert ending(prompt="!") == ("", "stop", None)
    (d,) = tokenizer.encode("d")
    assert ending(prompt="a", stop_token_ids=[d]) == ("bc", "stop", d)


@pytest.mark.parametrize("n", [1, 3])
def test_st_08_chat_chunks_have_one_role_and_one_finish_reason_each(n: int) -> None:
    _, chunks = run(CHAT_COMPLETIONS, messages=USER, n=n, max_tokens=4, stream=True)
    for index in range(n):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in choices] == [
            "assistant",
            *[None] * (len(choices) - 1),
        ]
        assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "abcd"
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("n", [1, 3])
def test_st_08_completion_chunks_have_one_finish_reason_each(n: int) -> None:
    _, chunks = run(COMPLETIONS, prompt=["a", "x"], n=n, max_tokens=3, stream=True)
    for index in range(2 * n):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == ("bcd" if index < n else "yza")
        assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]


def test_st_08_held_text_and_an_ending_without_text() -> None:
    """A stop string holds `d` back; the turn's end has no text: still one role, one finish reason."""
    _, chunks = run(COMPLETIONS, prompt="a", stop=["dx"], max_tokens=4, stream=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["b", "c", "de"]
    _, chunks = run(CHAT_COMPLETIONS, messages=USER, stop=["a"], stream=True)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_chunk() -> None:
    options = {"include_usage": True}
    _, chunks = run(CHAT_COMPLETIONS, messages=USER, max_tokens=2, stream=True, stream_options=options)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    whole = body_of(CHAT_COMPLETIONS, messages=USER, max_tokens=2)
    assert chunks[-1]["usage"] == whole["usage"]


def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = run(COMPLETIONS, prompt="abc", max_tokens=3, stream=True, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    _, chunks = run(
        COMPLETIONS, prompt="a", max_tokens=2, stream=True, stream_options={"continuous_usage_stats": True}
    )
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [2, 3]


def test_cached_tokens_are_reported_once_per_prompt() -> None:
    engine = scripted_engine()
    prompt = "a" * 40
    run(COMPLETIONS, engine, prompt=prompt, max_tokens=1)
    for scoring in ({"max_tokens": 1}, {"max_tokens": 0, "echo": True}):
        reply, _ = run(COMPLETIONS, engine, prompt=prompt, n=2, **scoring)
        assert reply.body()["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_completion_logprobs() -> None:
    logprobs = body_of(COMPLETIONS, prompt="abc", max_tokens=2, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["d", "e"]
    assert logprobs["text_offset"] == [0, 1]
    assert len(logprobs["top_logprobs"][0]) == 2
    assert logprobs["top_logprobs"][0]["d"] == logprobs["token_logprobs"][0] < 0


def test_logprobs_zero_shows_the_chosen_token_only() -> None:
    logprobs = body_of(COMPLETIONS, prompt="abc", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [["d"], ["e"]]


def test_the_chosen_token_is_listed_beside_the_likeliest() -> None:
    """logit_bias makes another token win than the model's own logits, which logprobs show."""
    (z,) = byte_tokenizer().encode("z")
    body = body_of(COMPLETIONS, prompt="a", max_tokens=1, logprobs=1, logit_bias={str(z): 100})
    assert list(body["choices"][0]["logprobs"]["top_logprobs"][0]) == ["b", "z"]


@pytest.mark.parametrize("n", [1, 3])
def test_echo_with_logprobs_is_the_same_streamed_and_whole(n: int) -> None:
    given = {"prompt": ["abc", "xz"], "n": n, "max_tokens": 3, "echo": True, "logprobs": 1}
    whole = body_of(COMPLETIONS, **given)
    _, chunks = run(COMPLETIONS, stream=True, **given)
    for choice in whole["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][key]] == values
    first = whole["choices"][0]
    assert first["text"] == "abcdef"
    assert first["logprobs"]["tokens"] == list("abcdef")
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["top_logprobs"][0] is None
    assert first["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]


def test_echo_logprobs_wait_for_choice_0() -> None:
    """Whatever order deltas come in, every choice starts with its prompt's log-probabilities."""
    engine = scripted_engine()
    context = ApiContext(engine.tokenizer, engine.limits, ("tiny",))
    body = {"prompt": [64, 65], "n": 2, "max_tokens": 1, "echo": True, "logprobs": 0, "stream": True}
    call = parse_call(COMPLETIONS, body, context, "c1")
    reply = Reply(call, context, 0)
    scores = (None, TokenLogprob(65, -0.5))
    ending = {
        "text": "c",
        "logprobs": (TokenLogprob(66, -1.0),),
        "finish_reason": "length",
        "num_output_tokens": 1,
    }
    assert reply.feed(Delta("c1-0", 1, **ending)) == []
    chunks = reply.feed(Delta("c1-0", 0, prompt_logprobs=scores, **ending))
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 0]
    for chunk in chunks:
        assert chunk["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -1.0]
    assert reply.is_done


def test_sa_12_scoring() -> None:
    body = body_of(COMPLETIONS, prompt="abz", max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abz", "length")
    assert body["usage"]["completion_tokens"] == 0
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert scores[1] > -0.1 > -5 > scores[2]
    assert list(choice["logprobs"]["top_logprobs"][2]) == ["c", "z"]
    streamed = run(COMPLETIONS, prompt="abz", max_tokens=0, echo=True, logprobs=1, stream=True)[1]
    assert streamed[0]["choices"][0]["logprobs"] == choice["logprobs"]


def test_prompt_logprobs_are_vllms() -> None:
    choice = body_of(COMPLETIONS, prompt="abz", max_tokens=1, prompt_logprobs=1)["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    b, c, z = byte_tokenizer().encode("bcz")
    assert first is None
    assert list(second) == [str(b)]
    assert (second[str(b)]["rank"], second[str(b)]["decoded_token"]) == (1, "b")
    assert set(third) == {str(c), str(z)}
    assert third[str(c)]["rank"] == 1 < third[str(z)]["rank"]
    body = body_of(CHAT_COMPLETIONS, messages=USER, max_tokens=1, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


def test_different_numbers_of_logprobs_and_prompt_logprobs() -> None:
    given = {"prompt": "ab", "max_tokens": 1, "echo": True}
    choice = body_of(COMPLETIONS, logprobs=1, prompt_logprobs=3, **given)["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1, 1]
    assert len(choice["prompt_logprobs"][1]) == 3


def test_chat_logprobs() -> None:
    choice = body_of(CHAT_COMPLETIONS, messages=USER, max_tokens=1, logprobs=True, top_logprobs=2)["choices"][
        0
    ]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("a", [97])
    assert entry["top_logprobs"][0]["token"] == "a"
    assert len(entry["top_logprobs"]) == 2
    plain = body_of(CHAT_COMPLETIONS, messages=USER, max_tokens=1, logprobs=True)["choices"][0]
    assert plain["logprobs"]["content"][0]["top_logprobs"] == []


def test_parts_of_characters_keep_names_and_offsets_of_their_own() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a\N{EURO SIGN}b")
    entries = [TokenLogprob(token_id, -1.0, tuple((part, -1.0) for part in ids[1:4])) for token_id in ids]
    shown = CompletionLogprobs(tokenizer, 3, skip_special_tokens=True).format(ids, entries)
    assert shown["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert shown["text_offset"] == [0, 1, 1, 1, 2]
    assert len(shown["top_logprobs"][1]) == 3
    content = chat_logprobs(tokenizer, entries[1:2])["content"]
    assert content[0]["bytes"] == [0xE2]


def test_hidden_tokens_do_not_move_offsets() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(f"a{IM_END}b")
    entries = [TokenLogprob(token_id, -1.0) for token_id in ids]
    hidden = CompletionLogprobs(tokenizer, 0, skip_special_tokens=True).format(ids, entries)
    assert hidden["text_offset"] == [0, 1, 1]
    shown = CompletionLogprobs(tokenizer, 0, skip_special_tokens=False).format(ids, entries)
    assert shown["text_offset"] == [0, 1, 1 + len(IM_END)]


def test_sa_10_truncation_is_reported() -> None:
    given = {"prompt": ["a" * 10 + "bc", "x"], "truncate_prompt_tokens": 2, "max_tokens": 2}
    choices = body_of(COMPLETIONS, **given)["choices"]
    assert (choices[0]["text"], choices[0]["truncated_prompt_tokens"]) == ("de", 10)
    assert "truncated_prompt_tokens" not in choices[1]
    _, chunks = run(COMPLETIONS, stream=True, **given)
    first = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert [choice.get("truncated_prompt_tokens") for choice in first] == [10, None]
    long = [{"role": "user", "content": "x" * 50}]
    choice = body_of(CHAT_COMPLETIONS, messages=long, truncate_prompt_tokens=5, max_tokens=1)["choices"][0]
    assert choice["truncated_prompt_tokens"] > 50


def test_an_error_ends_the_call() -> None:
    def poison(step: int, logits: np.ndarray) -> None:
        if step == 3:
            logits[0] = np.nan

    reply, chunks = run(COMPLETIONS, scripted_engine(after_step=poison), prompt=["a", "x"], stream=True)
    assert isinstance(reply.error, EngineError)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert chunks, "what came before the error was sent"


def test_an_abort_is_an_error_to_whoever_still_listens() -> None:
    engine = scripted_engine()
    context = ApiContext(engine.tokenizer, engine.limits, ("tiny",))
    call = parse_call(COMPLETIONS, {"prompt": "a"}, context, "c1")
    reply = Reply(call, context, 0)
    engine.admit(call.requests[0])
    engine.abort("c1-0")
    for delta in engine.step():
        reply.feed(delta)
    assert reply.is_done
    assert isinstance(reply.error, EngineError)


def test_best_of_keeps_the_likeliest_choices_per_token() -> None:
    """The scripted model is made to find every token as likely as its id is high."""

    def blur(step: int, logits: np.ndarray) -> None:
        logits += np.linspace(0, 9, logits.shape[1], dtype=np.float32)

    def sampled(**body: Any) -> dict[str, Any]:
        engine = scripted_engine(after_step=blur)
        reply, _ = run(COMPLETIONS, engine, prompt=["a", "b"], temperature=1.0, seed=5, max_tokens=4, **body)
        return reply.body()

    every = sampled(n=5, logprobs=0)
    best = sampled(n=2, best_of=5)
    means = [
        sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])
        for choice in every["choices"]
    ]
    assert len(set(means)) > 5
    expected = [
        every["choices"][prompt * 5 + number]["text"]
        for prompt in range(2)
        for number in sorted(range(5), key=lambda number: -means[prompt * 5 + number])[:2]
    ]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"] == every["usage"], "all that was sampled counts"
    assert sampled(n=5, best_of=5, logprobs=0) == every
