"""Where the last tokens of a context were seen before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

_WIDTH = array("i").itemsize  # bytes of a token
# Places of a table. A dict that grows copies itself; of this size that takes a fraction of a millisecond.
_TABLE_PLACES = 8192


class _Places:
    """For each n-gram of `size` tokens the places where it ends, newest first.

    Places of one n-gram form a chain, as the matches of LZ77 coders do: one integer per token. They are kept in
    tables of consecutive places, so that no single token costs more than its share.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Oldest first; in each the newest place of an n-gram.
        self._tables: list[dict[bytes, int]] = []
        # Entry e: the place before e in the same table with the same n-gram; 0: none.
        self._older = array("i", [0])

    def extend(self, tokens: array[int]) -> None:
        """Take in the n-grams of `tokens` that end behind the known ones and before the last token."""
        size, older, stop = self.size, self._older, len(tokens)
        if len(older) < size:  # no n-gram ends here
            older.extend([0] * (min(size, stop) - len(older)))
        while (first := len(older)) < stop:
            room = _TABLE_PLACES - first % _TABLE_PLACES
            if room == _TABLE_PLACES or not self._tables:
                self._tables.append({})
            newest = self._tables[-1]
            text = tokens[first - size : first + room].tobytes()
            at, length = 0, size * _WIDTH
            for end in range(first, min(first + room, stop)):
                key = text[at : at + length]
                older.append(newest.get(key, 0))
                newest[key] = end
                at += _WIDTH

    def find(self, key: bytes, limit: int) -> list[int]:
        """Up to `limit` places of an n-gram, given as bytes, newest first."""
        places: list[int] = []
        for table in reversed(self._tables):
            end = table.get(key, 0)
            while end and len(places) < limit:
                places.append(end)
                end = self._older[end]
            if len(places) == limit:
                break
        return places


class OccurrenceIndex:
    """Tokens, appended to and never changed, and the places of all n-grams of two sizes in them.

    The longer size leads to the long matches where there are too many short ones to look at them all; how far two
    places agree is then found by comparing tokens. Keys are the tokens themselves, so nothing is ever taken for
    something else. About 0.25 KiB per token of varied text.
    """

    def __init__(self, short: int, long: int) -> None:
        self.tokens = array("i")
        self._places = [_Places(size) for size in sorted({short, long}, reverse=True)]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Seq[int]) -> None:
        """Append `token_ids`; the n-grams that end before the last of them are places from then on.

        What ends at the last token has nothing behind it yet. It becomes a place with the next token.
        """
        self.tokens.extend(token_ids)
        for places in self._places:
            places.extend(self.tokens)

    def find(self, last: array[int], limit: int) -> list[tuple[int, int]]:
        """(length, end) of places where tokens before `end` equal the last `length` of `last`.

        Up to `limit` newest places of each size, those of the longer size first; lengths are as long as they can be
        within `last`, and no place is told twice.
        """
        found: dict[int, int] = {}
        for places in self._places:
            if len(last) >= places.size:
                for end in places.find(last[-places.size :].tobytes(), limit):
                    if end not in found:
                        found[end] = self._match(last, end, places.size)
        return [(length, end) for end, length in found.items()]

    def _match(self, last: array[int], end: int, known: int) -> int:
        """How many of the tokens before `end` equal the last of `last`, of which the last `known` do."""
        tokens = self.tokens
        length, top = known, min(len(last), end)
        while length < top and tokens[end - length - 1] == last[-length - 1]:
            length += 1
        return length
