"""Streaming text equals decoding everything at once, whatever the split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.detokenizer import Detokenizer
from pelton.runtime.request import SamplingParams
from pelton.runtime.tokenizer import Tokenizer
from support.vocabularies import SCRIPTS, byte_level, sentencepiece

TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": sentencepiece(bos=False)}
PLAIN = SamplingParams()

texts = st.one_of(
    st.sampled_from(sorted(SCRIPTS.values())),
    st.lists(st.sampled_from(sorted("".join(SCRIPTS.values()))), max_size=30).map("".join),
    st.text(max_size=20),
)
kinds = st.sampled_from(sorted(TOKENIZERS))


@st.composite
def splits(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=len(ids))))
    bounds = [0, *cuts, len(ids)]
    return [list(ids[a:b]) for a, b in pairwise(bounds)]


def deltas(tokenizer: Tokenizer, chunks: list[list[int]], params: SamplingParams = PLAIN) -> Iterator[str]:
    detokenizer = Detokenizer(tokenizer, params)
    for chunk in chunks:
        step = detokenizer.push(chunk)
        assert step.num_tokens == len(chunk)
        yield step.text
    yield detokenizer.finish()


@settings(max_examples=150, deadline=None)
@given(kinds, texts, st.data())
def test_st_01_any_split_of_any_script_streams_the_whole_text(
    kind: str, text: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, is_continuation=True)
    pieces = list(deltas(tokenizer, data.draw(splits(ids))))
    assert "".join(pieces) == whole
    # A byte-fallback tokenizer puts a space before the text.
    assert whole.removeprefix(" " if kind == "byte-fallback" else "") == text
    assert all(piece.count("\ufffd") == 0 for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_st_01_one_token_at_a_time(kind: str, script: str) -> None:
    tokenizer, text = TOKENIZERS[kind], SCRIPTS[script]
    ids = tokenizer.encode(text)
    pieces = list(deltas(tokenizer, [[token_id] for token_id in ids]))
    assert "".join(pieces).removeprefix(" " if kind == "byte-fallback" else "") == text
    assert "\ufffd" not in "".join(pieces)
    # The point of the row: there are characters that need several tokens.
    assert script == "english" or any("\ufffd" in tokenizer.token_text(token_id) for token_id in ids)


@settings(max_examples=150, deadline=None)
@given(kinds, st.lists(st.integers(0, 420), max_size=30), st.booleans(), st.data())
def test_any_ids_stream_what_decode_gives(
    kind: str, ids: list[int], skips: bool, data: st.DataObject
) -> None:
    """Broken characters, special tokens and ids outside the vocabulary included."""
    tokenizer = TOKENIZERS[kind]
    params = SamplingParams(skip_special_tokens=skips)
    whole = tokenizer.decode(ids, skip_special_tokens=skips, is_continuation=True)
    assert "".join(deltas(tokenizer, data.draw(splits(ids)), params)) == whole


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_st_02_output_that_ends_inside_a_character(kind: str, missing: int) -> None:
    """The text before is whole and the unfinished character is one U+FFFD, streamed or not."""
    tokenizer = TOKENIZERS[kind]
    before = tokenizer.encode("日本 the end ")
    character = [
        next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))
        for byte in "\U0001f46a".encode()
    ]
    ids = before + character[:-missing]
    text = tokenizer.decode(before, is_continuation=True) + "\ufffd"
    assert tokenizer.decode(ids, is_continuation=True) == text
    pieces = list(deltas(tokenizer, [[token_id] for token_id in ids]))
    assert "".join(pieces) == text
    assert "".join(pieces[:-1]) == text[:-1]
    assert pieces[-1] == "\ufffd"


def test_st_04_sentencepiece_keeps_the_spaces_and_the_first_one() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    sentence = "The quick brown fox"
    ids = tokenizer.encode(sentence)
    streamed = "".join(deltas(tokenizer, [[token_id] for token_id in ids]))
    assert streamed == "".join(deltas(tokenizer, [ids])) == " " + sentence
    # What follows a prompt joins it to the text that all tokens have together.
    prompt = tokenizer.encode("hello")
    assert tokenizer.decode(prompt) + streamed == tokenizer.decode(prompt + ids) == f"hello {sentence}"


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_special_tokens_are_text_only_when_asked_for(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    special = min(tokenizer.special_token_ids)
    ids = [special, *tokenizer.encode("fox"), special]
    hidden = "".join(deltas(tokenizer, [ids]))
    shown = "".join(deltas(tokenizer, [ids], SamplingParams(skip_special_tokens=False)))
    assert hidden.strip() == "fox"
    assert shown == tokenizer.token_text(special) + hidden + tokenizer.token_text(special)


def test_each_token_is_looked_up_once() -> None:
    """Constant work per token: no window of earlier tokens is decoded again."""
    looked_up: list[int] = []

    class Counting:
        special_token_ids = frozenset[int]()

        def token_bytes(self, token_id: int) -> bytes:
            looked_up.append(token_id)
            return "日".encode()[token_id % 3 : token_id % 3 + 1]

    detokenizer = Detokenizer(Counting(), PLAIN)
    for token_id in range(3000):
        detokenizer.push([token_id])
    assert looked_up == list(range(3000))
