"""Random texts under a grammar's masks."""

from __future__ import annotations

import random

import numpy as np

from pelton.runtime.structured import Grammar, Matcher
from pelton.runtime.tokenizer import Tokenizer


def allowed(matcher: Matcher, num_words: int) -> np.ndarray:
    """The ids that may follow."""
    mask = np.zeros(num_words, np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


class JsonPlace:
    """Whether a JSON text, read piece by piece, is within a string."""

    def __init__(self) -> None:
        self.is_in_string = False
        self._is_escaped = False

    def read(self, piece: bytes) -> None:
        for byte in piece:
            if self._is_escaped:
                self._is_escaped = False
            elif byte == ord("\\"):
                self._is_escaped = self.is_in_string
            elif byte == ord('"'):
                self.is_in_string = not self.is_in_string

    def closing_rank(self, piece: bytes) -> int:
        """How well a token serves to bring the text to its end; 0 is best."""
        if self.is_in_string:
            return 0 if piece == b'"' else 2 if piece[:1] in (b"\\", b"") else 1
        stripped = piece.strip()
        for rank, starts in enumerate((b"}]", b":", b",", b'0123456789ntf"', b"[{-", b".eE")):
            if stripped and stripped[0] in starts:
                return 2 * rank + (len(stripped) > 1 and stripped[-1] in b'",{[')
        return 20


def walk(
    grammar: Grammar,
    tokenizer: Tokenizer,
    vocab_size: int,
    rng: random.Random,
    *,
    num_free: int,
    limit: int = 4000,
    liked: bytes = b"",
) -> list[int]:
    """A random output without its end: any allowed token `num_free` times, mostly one with `liked` in it if there is
    any, then such as bring it to an end soon.
    """
    matcher = grammar.start()
    num_words = -(-vocab_size // 32)
    output: list[int] = []
    place = JsonPlace()
    while not matcher.is_finished:
        ids = allowed(matcher, num_words).tolist()
        assert ids, f"nothing may follow {tokenizer.decode(output)!r}"
        texts = [token_id for token_id in ids if token_id not in tokenizer.eos_token_ids]
        if len(texts) < len(ids) and (not texts or len(output) >= num_free or rng.random() < 0.1):
            break
        if len(output) < num_free:
            preferred = [one for one in texts if liked and liked in tokenizer.token_bytes(one)]
            token_id = rng.choice(preferred if preferred and rng.random() < 0.7 else texts)
        else:
            some = texts if len(texts) < 500 else texts[:300] + rng.sample(texts, 100)
            ranks = [place.closing_rank(tokenizer.token_bytes(one)) for one in some]
            token_id = rng.choice([one for one, rank in zip(some, ranks, strict=True) if rank == min(ranks)])
        assert matcher.accept(token_id), f"{tokenizer.token_bytes(token_id)!r} is in the mask and refused"
        place.read(tokenizer.token_bytes(token_id))
        output.append(token_id)
        assert len(output) < limit, f"no end of {tokenizer.decode(output)[:200]!r}"
    return output
