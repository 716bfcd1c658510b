"""Guesses of what a sequence continues with, verified by the target in one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..sequence import Sequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens that may follow a sequence's last one.

    `probs` `[k, vocab_size]` float32 are the distributions that the tokens were drawn from, each given the tokens
    before it; None: each token was chosen, not drawn. What is proposed must not depend on draws that verification
    makes.
    """

    token_ids: tuple[int, ...] = ()
    probs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, num_tokens: int) -> Draft:
        """The first `num_tokens` of it."""
        if num_tokens >= len(self):
            return self
        return Draft(self.token_ids[:num_tokens], None if self.probs is None else self.probs[:num_tokens])


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """At most `num_tokens` (1 or more) are wanted behind the last token of `sequence`.

    Where `may_draw` is False the tokens must be chosen, not drawn.
    """

    sequence: Sequence
    num_tokens: int
    may_draw: bool = False


class Drafter(Protocol):
    """Proposes drafts. Whatever it proposes, the tokens that come out are those without it: it only decides how soon.

    What it remembers of a sequence is made again when it is missing; `end` is the one place where that is dropped.
    """

    @property
    def is_lookup(self) -> bool:
        """Whether to propose costs next to nothing, so that it may be asked for what will not be verified."""
        ...

    def propose(self, asks: Seq[DraftAsk]) -> list[Draft]:
        """A draft, empty or up to the asked length, for each of `asks`, which are different sequences."""
        ...

    def observe(self, hidden: np.ndarray | torch.Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
        """`hidden[rows[i]]` of `[N, hidden_size]` is the state from which the newest token of `sequences[i]` was
        chosen. Called after a step of an engine that gives hidden states, unless the next is sure to ask for no draft.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """`sequence` has ended, with its tokens still in it. Idempotent."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
