"""Finished outputs of a server, looked up by n-grams: bounded, and apart for each cache salt."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Seq

from .occurrences import OccurrenceIndex

# Stands behind each text; no token, so nothing matches across it.
END_OF_TEXT = -1
# Of an index in itself, in tokens: what counts where thousands of salts have a few tokens each.
_INDEX_TOKENS = 8


class _Generation:
    """Texts of one age: an index for each salt, and how many tokens they count."""

    def __init__(self) -> None:
        self.indexes: dict[str, OccurrenceIndex] = {}
        self.num_tokens = 0

    def extend(self, salt: str, token_ids: Seq[int], sizes: tuple[int, int]) -> None:
        index = self.indexes.get(salt)
        if index is None:
            index = self.indexes[salt] = OccurrenceIndex(*sizes)
            self.num_tokens += _INDEX_TOKENS
        index.extend(token_ids)
        self.num_tokens += len(token_ids)


class LearnedTexts:
    """The newest texts, up to `max_tokens` tokens over all salts; none at all where that is very few.

    A third waits in a queue until `index` takes it in, so that nothing takes long. A third each is for two
    generations: when the younger is full, the older is dropped as a whole.
    """

    def __init__(self, max_tokens: int, short: int, long: int) -> None:
        self._share = max_tokens // 3
        self._sizes = (short, long)
        self._generations = [_Generation(), _Generation()]  # younger, older
        self._queue: deque[tuple[str, list[int]]] = deque()
        self._num_queued = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are held, waiting ones included."""
        return self._num_queued + sum(generation.num_tokens for generation in self._generations)

    def add(self, salt: str, token_ids: Seq[int]) -> None:
        """Learn a text; of a very long one its end. The texts that waited longest give way."""
        if self._share < 2 * _INDEX_TOKENS:
            return
        text = [*token_ids[-self._share + 1 :], END_OF_TEXT]
        self._queue.append((salt, text))
        self._num_queued += len(text)
        while self._num_queued > self._share:
            self._num_queued -= len(self._queue.popleft()[1])

    def index(self, room: int) -> None:
        """Take in up to `room` tokens of the texts that wait."""
        while room > 0 and self._queue:
            salt, text = self._queue[0]
            younger = self._generations[0]
            if younger.num_tokens >= self._share - _INDEX_TOKENS:
                younger = _Generation()
                self._generations = [younger, self._generations[0]]
            piece = text[: min(room, max(self._share - _INDEX_TOKENS - younger.num_tokens, 1))]
            younger.extend(salt, piece, self._sizes)
            del text[: len(piece)]
            room -= len(piece)
            self._num_queued -= len(piece)
            if not text:
                self._queue.popleft()

    def find(self, salt: str, last: array[int], limit: int) -> list[tuple[int, array[int], int]]:
        """(length, tokens, end): `OccurrenceIndex.find` in the texts of `salt`, `limit` for each generation.

        Ends of texts are left out: what was cut off by a limit says nothing of what follows.
        """
        return [
            (length, index.tokens, end)
            for generation in self._generations
            if (index := generation.indexes.get(salt)) is not None
            for length, end in index.find(last, limit)
            if index.tokens[end] != END_OF_TEXT
        ]
