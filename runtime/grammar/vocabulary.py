"""A model's tokens as llguidance knows them: the bytes of each, and which are no text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import llguidance
import numpy as np

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

WORD_BITS = 32

# Texts that must follow come again with every output of a form: so many spellings are kept, of texts up to so many
# characters.
_NUM_SPELLINGS = 4096
_SPELLING_LENGTH = 128


def num_words(vocab_size: int) -> int:
    """The int32 words of one row of a mask."""
    return -(-vocab_size // WORD_BITS)


class Vocabulary:
    """The tokens of one model, padded to `vocab_size` and on to whole words of a mask.

    An id that stands for nothing, be it padding, has no bytes and so is in no mask. Control tokens and those that
    end a turn are no text: a grammar has to name them. `end_mask` allows only the latter. Raises `ValueError` without
    `eos_token_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ValueError("a grammar needs a token that ends the output")
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.num_words = num_words(vocab_size)
        self.vocab_size = vocab_size
        self.end_mask = np.zeros(self.num_words, np.int32)
        for token_id in self.eos_token_ids:
            self.end_mask.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        self.control_token_ids = dict(tokenizer.control_token_ids)
        special = tokenizer.special_token_ids | set(self.eos_token_ids) | set(self.control_token_ids.values())
        table = _Table(tokenizer, self.num_words * WORD_BITS, self.eos_token_ids[0], special)
        self.table = llguidance.LLTokenizer(table, eos_token=list(self.eos_token_ids))


class _Table(llguidance.TokenizerWrapper):
    """What llguidance reads of a tokenizer, under the names that it asks for."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        size: int,
        eos_token_id: int,
        special_token_ids: frozenset[int],
    ) -> None:
        known = min(size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)] + [b""] * (size - known)
        self.special_token_ids = sorted(token_id for token_id in special_token_ids if token_id < size)
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self._tokenizer = tokenizer
        self._special = special_token_ids
        controls = sorted(tokenizer.control_token_ids, key=len, reverse=True)
        # Without control tokens a pattern that is found nowhere.
        self._inside_control = re.compile(
            "|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in controls) or "(?!)"
        )
        self._byte_ids = {
            token[0]: token_id
            for token_id, token in enumerate(self.tokens)
            if len(token) == 1 and token_id not in special_token_ids
        }
        self._kept_spelling = lru_cache(_NUM_SPELLINGS)(self._spelling)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of plain text. Of several spellings of a text that must follow, masks allow this one."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return list((self._kept_spelling if len(text) <= _SPELLING_LENGTH else self._spelling)(text))

    def _spelling(self, text: str) -> tuple[int, ...]:
        # Never a control token, though its text may be asked for.
        cuts = [0, *(match.start() for match in self._inside_control.finditer(text)), len(text)]
        ids: list[int] = []
        for start, end in itertools.pairwise(cuts):
            ids += self._spell(text[start:end])
        return tuple(ids)

    def _spell(self, text: str) -> list[int]:
        data = text.encode()
        # SentencePiece puts a space before a text; behind another character it does not.
        for sentinel in ("", "\x02"):
            ids = self._tokenizer.encode(sentinel + text, add_special_tokens=False)
            pieces = [self.tokens[token_id] for token_id in ids]
            while sentinel and pieces and pieces[0] in (b" ", b"\x02", b" \x02"):
                is_sentinel = pieces[0] != b" "
                del ids[0], pieces[0]
                if is_sentinel:
                    break
            if b"".join(pieces) == data and not self._special.intersection(ids):
                return ids
        return [self._byte_ids[byte] for byte in data if byte in self._byte_ids]
