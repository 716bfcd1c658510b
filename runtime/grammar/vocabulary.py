"""A model's tokens as llguidance knows them: the bytes of each, and which are no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import llguidance

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """The int32 words of one row of a mask."""
    return -(-vocab_size // WORD_BITS)


class Vocabulary:
    """The tokens of one model, padded to `vocab_size` and on to whole words of a mask.

    An id that stands for nothing, be it padding, has no bytes and so is in no mask. Control tokens and those that
    end a turn are no text: a grammar has to name them. Raises `ValueError` without `eos_token_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ValueError("a grammar needs a token that ends the output")
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.num_words = num_words(vocab_size)
        self.vocab_size = vocab_size
        self.control_token_ids = dict(tokenizer.control_token_ids)
        self.special_token_ids = (
            tokenizer.special_token_ids | set(self.eos_token_ids) | set(self.control_token_ids.values())
        )
        table = _Table(tokenizer, self.num_words * WORD_BITS, self.eos_token_ids[0], self.special_token_ids)
        self.table = llguidance.LLTokenizer(table, eos_token=list(self.eos_token_ids))


class _Table(llguidance.TokenizerWrapper):
    """What llguidance reads of a tokenizer, under the names that it asks for."""

    def __init__(
        self, tokenizer: Tokenizer, size: int, eos_token_id: int, special_token_ids: frozenset[int] | set[int]
    ) -> None:
        known = min(size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)] + [b""] * (size - known)
        self.special_token_ids = sorted(token_id for token_id in special_token_ids if token_id < size)
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self.is_tokenizer_wrapper = True
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of plain text; only which of several spellings llguidance takes depends on it."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)
