"""Log-probabilities of a prompt, gathered over the steps that compute it."""

from __future__ import annotations

from collections.abc import Sequence

from .outputs import TokenLogprob
from .request import Request


class PromptScores:
    """Those that `request` asks for with `prompt_logprobs`: nothing is wanted where it does not.

    They are taken once. From then on they are final, though a preempted sequence computes its prompt again.
    """

    def __init__(self, request: Request) -> None:
        self._token_ids = request.prompt_token_ids
        self._num_top = request.params.prompt_logprobs
        self._scores: dict[int, TokenLogprob] = {}
        self._is_taken = False

    @property
    def num_top(self) -> int:
        return self._num_top or 0

    def wanted(self, start: int, num_rows: int) -> tuple[int, ...]:
        """The prompt tokens that rows at positions `[start, start + num_rows)` predict and that are to be scored."""
        if self._num_top is None or self._is_taken:
            return ()
        return self._token_ids[start + 1 : start + 1 + num_rows]

    def add(self, start: int, scores: Sequence[TokenLogprob]) -> None:
        """`scores[i]` is that of the token at position `start + i + 1`."""
        self._scores.update(enumerate(scores, start + 1))

    def take(self) -> tuple[TokenLogprob | None, ...] | None:
        """All of them, in order (nothing precedes the first token), once they are complete; None before and after."""
        num_tokens = len(self._token_ids)
        if self._num_top is None or self._is_taken or len(self._scores) < num_tokens - 1:
            return None
        self._is_taken = True
        return (None, *(self._scores[position] for position in range(1, num_tokens)))
