"""What bytes each token stands for, read off the `decoder` of a tokenizer.json.

The decoders of causal language models turn every token into bytes on its own, and the text is those bytes,
joined and read as UTF-8. Only the first token of a text may be special (SentencePiece families drop the space
that the encoder put before the text). Knowing this, text can be decoded token by token, exactly and in
constant time per token, where a black-box decoder has to be called again on a growing window.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import BundleError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

IdToToken = Callable[[int], str | None]


class TokenPieces:
    """The bytes of every token of one vocabulary.

    `decoder` is the `decoder` object of tokenizer.json (None: tokens are words, joined by spaces). Raises
    `BundleError` for a decoder that does not work token by token.
    """

    def __init__(self, decoder: Mapping[str, Any] | None, id_to_token: IdToToken) -> None:
        self._id_to_token = id_to_token
        self._byte_of_char: dict[str, int] | None = None
        self._replacements: list[tuple[str, str]] = []
        self._has_byte_tokens = False
        self._joins_with_space = decoder is None
        self._first_drops: str | None = None
        self._strip: tuple[bytes, int] = (b" ", 0)
        self._cache: dict[int, bytes] = {}
        if decoder is not None:
            steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
            self._read_steps(steps)

    def piece(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to a text that has begun; empty for an id outside the vocabulary."""
        cached = self._cache.get(token_id)
        if cached is None:
            token = self._token(token_id)
            cached = self._cache[token_id] = b"" if token is None else self._piece_of(token)
        return cached

    def join(self, token_ids: Iterable[int], *, is_continuation: bool) -> bytes:
        """The bytes of a text; with `is_continuation` the ids follow a text that has begun."""
        ids = list(token_ids)
        if is_continuation:
            return b"".join(map(self.piece, ids))
        while ids and self._token(ids[0]) is None:
            del ids[0]
        if not ids:
            return b""
        text = self._first_piece(ids[0]) + b"".join(map(self.piece, ids[1:]))
        space, limit = self._strip
        for _ in range(limit):
            text = text.removeprefix(space)
        return text

    def _token(self, token_id: int) -> str | None:
        return self._id_to_token(token_id) if token_id >= 0 else None

    def _first_piece(self, token_id: int) -> bytes:
        token = self._token(token_id) or ""
        if self._joins_with_space:
            return token.encode()
        if self._first_drops is not None:
            token = token.replace(self._first_drops, "")
        return self._piece_of(token)

    def _piece_of(self, token: str) -> bytes:
        if self._joins_with_space:
            return b" " + token.encode()
        if self._byte_of_char is not None:
            # An added token may hold characters outside the byte alphabet; it then stands for itself.
            values = [self._byte_of_char.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    def _read_steps(self, steps: list[Mapping[str, Any]]) -> None:
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self._byte_of_char = {char: byte for byte, char in enumerate(byte_level_alphabet())}
            return
        is_fused = False
        for step, kind in zip(steps, kinds, strict=True):
            if kind == "Replace" and "String" in step["pattern"]:
                pattern = step["pattern"]["String"]
                if is_fused and len(pattern) != 1:
                    raise _unsupported(f"Replace of {pattern!r} across tokens")
                self._replacements.append((pattern, step["content"]))
            elif kind == "ByteFallback":
                self._has_byte_tokens = True
            elif kind == "Fuse":
                is_fused = True
            elif kind == "Strip" and is_fused and step["stop"] == 0:
                self._strip = (step["content"].encode(), step["start"])
            elif kind == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                if step.get("prepend_scheme", "always") != "never":
                    self._first_drops = step["replacement"]
            else:
                raise _unsupported(" + ".join(kinds))


def byte_level_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE vocabularies (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 stands for itself; the other 68 bytes take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _unsupported(what: str) -> BundleError:
    return BundleError(
        f"tokenizer.json: the decoder ({what}) does not work token by token; "
        "supported are ByteLevel, Metaspace, and Replace/ByteFallback/Fuse/Strip sequences"
    )
