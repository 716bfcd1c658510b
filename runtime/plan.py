"""A step plan: how many tokens each sequence advances by. Nothing else tells prefill from decode."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Sequence
from .speculate.draft import NO_DRAFT, Draft


@dataclass(frozen=True, slots=True)
class PlanItem:
    """`sequence` computes its next `num_tokens` tokens, positions `[start, start + num_tokens)`.

    The last `len(draft)` of them are drafted, behind the sequence's last known token:

        known tokens       | draft      |
        [start ... known_end) [ ... end)
    """

    sequence: Sequence
    start: int
    num_tokens: int
    draft: Draft = NO_DRAFT

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def known_end(self) -> int:
        return self.start + self.num_tokens - len(self.draft)

    @property
    def is_sampling(self) -> bool:
        """Whether the step reaches the sequence's last known token, so that a new one can be sampled."""
        return self.known_end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `block_copies` (source, destination) run before it: copy on write of shared blocks."""

    items: tuple[PlanItem, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)
