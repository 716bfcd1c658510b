"""Suffix decoding: a sequence goes on as it, and what the server wrote before, mostly did behind the same tokens.

Oliaro et al., "SuffixDecoding" (2024). Agents and pipelines ask nearly the same again and again, and get nearly the
same answers. Where the paper walks suffix trees, this looks up n-grams and compares backwards from a bounded number of
their places: less memory, and every cost is bounded per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from ..sequence import Sequence
from .draft import NO_DRAFT, Draft, DraftAsk
from .learned import END_OF_TEXT, LearnedTexts
from .ngram import INDEXED_PER_CALL, index_piecewise
from .occurrences import OccurrenceIndex

if TYPE_CHECKING:
    import numpy as np
    import torch

DEFAULT_MAX_TOKENS = 200_000  # of finished outputs; about 50 MB

_SHORT, _LONG = 2, 6  # sizes of the n-grams that lead to places
_MAX_MATCH = 32  # tokens that are compared
_MAX_PLACES = 12  # newest places of an n-gram that vote, of the sequence and of each generation of outputs
_DRAFT_PER_MATCH = 2  # draft tokens per token that agrees
_LEAST_CHANCE = 0.1  # a draft ends where it is less likely than this to be right so far


class SuffixDrafter:
    """Drafts by vote of the places that look like a sequence's end, in itself and in finished outputs.

    The places that agree in most tokens vote on each next token; those that lose leave. A token's chance is the share
    that won, times the chance of the token before it, and the draft ends where that becomes small. It is up to twice
    as long as what agrees.

    A sequence teaches others when it ends: its output, with the end of its prompt for the context. Only sequences of
    the same `cache_salt` learn from it, and only a sequence that was asked for teaches. At most `max_tokens` tokens of
    outputs are kept, the newest over all salts.
    """

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        self._indexes: dict[Sequence, OccurrenceIndex] = {}
        self._learned = LearnedTexts(max_tokens, _SHORT, _LONG)

    @property
    def is_lookup(self) -> bool:
        return True

    def propose(self, asks: Seq[DraftAsk]) -> list[Draft]:
        indexes = [self._index(ask.sequence) for ask in asks]
        room = index_piecewise(asks, indexes, INDEXED_PER_CALL)
        self._learned.index(room)
        return [self._look_up(ask, index) for ask, index in zip(asks, indexes, strict=True)]

    def observe(self, hidden: np.ndarray | torch.Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
        """Needs no states."""

    def end(self, sequence: Sequence) -> None:
        if self._indexes.pop(sequence, None) is None or not sequence.num_output_tokens:
            return
        start = max(sequence.num_prompt_tokens - _LONG, 0)
        self._learned.add(sequence.request.cache_salt, sequence.token_ids[start:])

    def close(self) -> None:
        self._indexes.clear()

    def _index(self, sequence: Sequence) -> OccurrenceIndex:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = OccurrenceIndex(_SHORT, _LONG)
        return index

    def _look_up(self, ask: DraftAsk, index: OccurrenceIndex) -> Draft:
        last = array("i", ask.sequence.token_ids[-_MAX_MATCH:])
        own = index.tokens
        places = [(length, own, end) for length, end in index.find(last, _MAX_PLACES)]
        places += self._learned.find(ask.sequence.request.cache_salt, last, _MAX_PLACES)
        if not places:
            return NO_DRAFT
        longest = max(length for length, _, _ in places)
        voters = [(tokens, end) for length, tokens, end in places if length == longest]
        return Draft(vote(voters, own, min(ask.num_tokens, _DRAFT_PER_MATCH * longest)))


def vote(places: Seq[tuple[array[int], int]], own: array[int], num_tokens: int) -> tuple[int, ...]:
    """Up to `num_tokens` tokens that most of `places` (tokens, end) go on with.

    Of equal votes the token of the first place wins. `own` are the tokens of the sequence itself, whose places go on
    with the draft where they reach its end; others have no vote behind their end.
    """
    draft: list[int] = []
    voters, chance = list(places), 1.0
    while len(draft) < num_tokens:
        votes: dict[int, list[tuple[array[int], int]]] = {}
        for tokens, end in voters:
            at = end + len(draft)
            if at < len(tokens):
                token = tokens[at]
            elif tokens is own:
                token = draft[at - len(tokens)]
            else:
                continue
            if token != END_OF_TEXT:
                votes.setdefault(token, []).append((tokens, end))
        if not votes:
            break
        token = max(votes, key=lambda t: len(votes[t]))
        chance *= len(votes[token]) / len(voters)
        if chance < _LEAST_CHANCE:
            break
        draft.append(token)
        voters = votes[token]
    return tuple(draft)
