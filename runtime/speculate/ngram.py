"""Prompt lookup: a sequence goes on as it did behind the last earlier place that looks like its end.

Saxena, "Prompt Lookup Decoding" (2023). It costs no model, and much of what models write is copied from what they read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from ..sequence import Sequence
from .draft import NO_DRAFT, Draft, DraftAsk
from .occurrences import OccurrenceIndex

if TYPE_CHECKING:
    import numpy as np
    import torch

# Tokens indexed per call of `propose`, over all sequences: about a millisecond.
INDEXED_PER_CALL = 2048
# Earlier places of an n-gram that are compared; where common tokens have more, the others are seldom better.
_MAX_PLACES = 16
# The longer n-grams that are indexed; what agrees in so many tokens is nearly always a copy.
_LONG = 6
# Draft tokens per token that agrees: a short agreement is often chance, and then nothing of the draft is right.
# Measured on edited source files: 2 drafts a tenth less than no limit, for a hundredth of the accepted tokens.
_DRAFT_PER_MATCH = 2


def index_piecewise(asks: Seq[DraftAsk], indexes: Seq[OccurrenceIndex], room: int) -> int:
    """Append what `indexes` lack of the tokens of their sequences, at most `room` tokens; the room that is left.

    Those that lack least come first: a long prompt waits for no decoded token of the others, nor they for it.
    """
    lacking = [ask.sequence.num_tokens - len(index) for ask, index in zip(asks, indexes, strict=True)]
    for i in sorted(range(len(asks)), key=lacking.__getitem__):
        start = len(indexes[i])
        piece = asks[i].sequence.token_ids[start : start + room]
        indexes[i].extend(piece)
        room -= len(piece)
        if not room:
            break
    return room


class NgramDrafter:
    """Proposes what followed the longest earlier occurrence of a sequence's last tokens, the newest of equally long.

    At least `min_ngram` tokens must agree, and up to `max_ngram` are compared; the draft is up to twice as long as
    what agrees. A continuation that reaches the end of the sequence goes on with the draft itself: text that repeats
    is taken to repeat again.

    What is proposed is a function of `token_ids` once all of them are indexed. A long prompt is indexed in pieces of
    `INDEXED_PER_CALL` tokens over all sequences of a call; until then it is looked up in what there is of it.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._indexes: dict[Sequence, OccurrenceIndex] = {}

    @property
    def is_lookup(self) -> bool:
        return True

    def propose(self, asks: Seq[DraftAsk]) -> list[Draft]:
        indexes = [self._index(ask.sequence) for ask in asks]
        index_piecewise(asks, indexes, INDEXED_PER_CALL)
        return [self._look_up(ask, index) for ask, index in zip(asks, indexes, strict=True)]

    def observe(self, hidden: np.ndarray | torch.Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
        """Needs no states."""

    def end(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)

    def close(self) -> None:
        self._indexes.clear()

    def _index(self, sequence: Sequence) -> OccurrenceIndex:
        index = self._indexes.get(sequence)
        if index is None:
            long = min(self._max_ngram, max(_LONG, self._min_ngram))
            index = self._indexes[sequence] = OccurrenceIndex(self._min_ngram, long)
        return index

    def _look_up(self, ask: DraftAsk, index: OccurrenceIndex) -> Draft:
        last = array("i", ask.sequence.token_ids[-self._max_ngram :])
        places = index.find(last, _MAX_PLACES)
        if not places:
            return NO_DRAFT
        length, end = max(places)
        num_tokens = min(ask.num_tokens, _DRAFT_PER_MATCH * length)
        return Draft(continuation(index.tokens, end, num_tokens))


def continuation(tokens: array[int], end: int, num_tokens: int) -> tuple[int, ...]:
    """`num_tokens` tokens from `end` (before the end of `tokens`) on, repeated from there where `tokens` end."""
    draft = list(tokens[end : end + num_tokens])
    period = len(draft)
    while len(draft) < num_tokens:
        draft.append(draft[-period])
    return tuple(draft)
