"""Pieces joined are what the `tokenizers` library decodes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pelton.errors import BundleError
from pelton.runtime.token_pieces import TokenPieces, byte_level_alphabet
from support.vocabularies import byte_level_backend, sentencepiece_backend

WORDS = ["▁▁", "▁the", "end", "▁", " x", "日", "<0xE6>", "<0x97>", "<0xA5>", "<0x41>", "<0x4>"]

DECODERS = {
    "none": None,
    "metaspace": decoders.Metaspace(),
    "metaspace-first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gguf": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    ),
}


def word_backend(name: str) -> Tokenizer:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="end"))
    if DECODERS[name] is not None:
        backend.decoder = DECODERS[name]
    return backend


def pieces_of(backend: Tokenizer) -> TokenPieces:
    return TokenPieces(json.loads(backend.to_str())["decoder"], backend.id_to_token)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(DECODERS)), st.lists(st.integers(0, 13), max_size=8))
def test_pieces_join_to_what_the_library_decodes(name: str, ids: list[int]) -> None:
    backend = word_backend(name)
    library = backend.decode(ids, skip_special_tokens=False)
    ours = pieces_of(backend).join(ids, is_continuation=False).decode(errors="replace")
    # The library writes one U+FFFD per byte of a run of byte tokens that is not all valid.
    if "\ufffd" not in library:
        assert ours == library


def test_all_pieces_of_a_byte_level_vocabulary() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["not byte level: 日 ", "café"])
    pieces = pieces_of(backend)
    for token_id in range(backend.get_vocab_size()):
        expected = backend.decode([token_id], skip_special_tokens=False)
        assert pieces.piece(token_id).decode(errors="replace") == expected
    assert pieces.piece(backend.get_vocab_size()) == pieces.piece(-1) == b""
    assert byte_level_alphabet() == sorted(byte_level_alphabet(), key=byte_level_alphabet().index)
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_a_broken_byte_run_keeps_its_valid_characters() -> None:
    backend = sentencepiece_backend()
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "日".encode() + b"\xe6"]
    assert backend.decode(ids) == "\ufffd" * 4
    assert pieces_of(backend).join(ids, is_continuation=True).decode(errors="replace") == "日\ufffd"


def test_a_text_that_has_begun_keeps_its_space() -> None:
    pieces = pieces_of(word_backend("llama"))
    assert pieces.join([1, 2], is_continuation=False) == b"theend"
    assert pieces.join([1, 2], is_continuation=True) == b" theend"
    assert pieces.join([99, 1], is_continuation=False) == b"the"
    assert pieces_of(word_backend("none")).join([2, 2], is_continuation=True) == b" end end"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ],
)
def test_decoders_that_need_more_than_one_token_are_refused(decoder: decoders.Decoder) -> None:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoder
    with pytest.raises(BundleError, match="decoder"):
        pieces_of(backend)
