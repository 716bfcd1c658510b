"""Finding stop strings in a stream of text, whatever pieces the text arrives in."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Feeds text to one Knuth-Morris-Pratt automaton per stop string.

    The match that is complete first wins; of those complete at the same character, the one that began first.
    That rule depends on the text alone, so it gives the same answer for every split into tokens.
    `num_pending` is the length of the longest suffix of the text that is a proper prefix of a stop string:
    the only characters that must be held back.

    Failure tables grow with the longest prefix that was ever reached, so a stop string that never begins to
    match costs nothing but the search for its first character.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]

    @property
    def num_pending(self) -> int:
        return max((automaton.depth for automaton in self._automata), default=0)

    def feed(self, text: str, *, is_armed: bool = True) -> tuple[int, str] | None:
        """Advance over `text`; returns (number of characters of `text` up to the end of the match, stop
        string).

        Without `is_armed` complete matches are passed over, but a stop string may begin in this text and end
        in a later one. After a match the matcher is spent.
        """
        best: tuple[int, str] | None = None
        for automaton in self._automata:
            end = automaton.feed(text, is_armed=is_armed)
            if end is None:
                continue
            if best is None or end < best[0] or (end == best[0] and len(automaton.stop) > len(best[1])):
                best = (end, automaton.stop)
        return best


class _Automaton:
    """`depth` is the number of characters of `stop` that the text seen so far ends with (less than all)."""

    __slots__ = ("_failure", "depth", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.depth = 0
        # _failure[n]: length of the longest proper prefix of stop[:n] that is also its suffix (n >= 1).
        self._failure = [0, 0]

    def feed(self, text: str, *, is_armed: bool) -> int | None:
        stop, depth = self.stop, self.depth
        position, size = 0, len(text)
        while position < size:
            if depth == 0:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            char = text[position]
            while depth and stop[depth] != char:
                depth = self._fall(depth)
            if stop[depth] == char:
                depth += 1
            position += 1
            if depth == len(stop):
                if is_armed:
                    return position
                depth = self._fall(depth)
        self.depth = depth
        return None

    def _fall(self, depth: int) -> int:
        stop, failure = self.stop, self._failure
        while len(failure) <= depth:
            char = stop[len(failure) - 1]
            length = failure[-1]
            while length and stop[length] != char:
                length = failure[length]
            failure.append(length + 1 if stop[length] == char else 0)
        return failure[depth]
