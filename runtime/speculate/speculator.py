"""What is drafted in a step, and what becomes known of drafts when it has run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..plan import StepPlan
from ..request import SamplingParams
from ..scheduler import Scheduler
from ..sequence import Sequence
from ..structured import Matcher
from .draft import Draft, DraftAsk, Drafter
from .lengths import DraftLengths

if TYPE_CHECKING:
    import numpy as np
    import torch

# Tokens that a form forces are computed now or a step later each: so many at once is for the others in the batch.
MAX_FORCED_TOKENS = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """What drafts of a sequence must keep to: its form, and whether its tokens may depend on what is drafted."""

    matcher: Matcher | None = None
    may_draw: bool = False


Terms = Callable[[Sequence], DraftTerms]


class Speculator:
    """Adds drafts to plans: first tokens that a form forces, else what `drafter` proposes (None: nothing).

    At most `draft_limit` tokens of the drafter's for a sequence, and of those as many as `lengths` expects to pay. Only
    how soon tokens come is decided here. A drafter that raises is not asked again: the log says why.
    """

    def __init__(
        self,
        *,
        eos_token_ids: frozenset[int],
        drafter: Drafter | None = None,
        draft_limit: int = 0,
        lengths: DraftLengths | None = None,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._drafter = drafter
        self._draft_limit = draft_limit
        self._lengths = lengths or DraftLengths()
        self._num_drafted: dict[Sequence, int] = {}  # by the drafter, in the step under way
        self._is_timed = False  # whether lengths were asked for in it
        self._shadows: dict[
            Sequence, tuple[int, tuple[int, ...]]
        ] = {}  # (where it begins, what was not verified)

    @property
    def has_drafter(self) -> bool:
        return self._drafter is not None

    def draft(self, plan: StepPlan, scheduler: Scheduler, terms: Terms) -> StepPlan:
        """The plan to run in place of `plan`, the scheduler's last."""
        self._num_drafted = {}
        self._is_timed = False
        items = [item for item in plan.items if item.is_sampling]
        # Before its first token a sequence may still fork.
        begun = [item.sequence for item in items if item.sequence.num_output_tokens]
        drafts = self._forced(begun, terms)
        start = time.perf_counter()
        if self._is_lookup:
            self._score_shadows()
        asks = self._asks([sequence for sequence in begun if sequence not in drafts], terms)
        num_forced = sum(map(len, drafts.values()))
        sizes = {sequence: len(draft) for sequence, draft in drafts.items()}
        proposals: dict[Sequence, Draft] = {}
        wanted = {ask.sequence: ask.num_tokens for ask in asks}
        if self._is_lookup:
            proposals = self._propose(asks, terms)
            wanted = {sequence: len(proposal) for sequence, proposal in proposals.items()}
        if self._drafter is not None and items:
            # Also where nothing is wanted: these steps are the clock of what is tried again.
            self._is_timed = True
            pairs = [(item.sequence, wanted.get(item.sequence, 0)) for item in items]
            allotted = self._lengths.allocate(pairs, plan.num_tokens + num_forced)
            sizes |= {s: size for (s, _), size in zip(pairs, allotted, strict=True) if s not in sizes}
            if any(wanted.values()):
                self._lengths.record_decision(time.perf_counter() - start)
        if not any(sizes.values()) and not proposals:
            return plan
        granted = scheduler.reserve(plan, sizes)
        if not self._is_lookup:
            asks = [replace(ask, num_tokens=granted[ask.sequence]) for ask in asks if ask.sequence in granted]
            for ask in asks:
                self._lengths.promise(ask.sequence, ask.num_tokens)
            proposals = self._propose(asks, terms)
        for sequence, proposal in proposals.items():
            used = proposal.cut(granted.get(sequence, 0))
            if used:
                drafts[sequence] = used
                self._num_drafted[sequence] = len(used)
                if self._is_lookup:
                    self._lengths.promise(sequence, len(used))
                self._shadows.pop(sequence, None)
            elif proposal and sequence not in self._shadows:
                self._shadows[sequence] = sequence.num_tokens, proposal.token_ids
        return scheduler.attach(plan, {s: draft.cut(granted.get(s, 0)) for s, draft in drafts.items()})

    def record(self, sequence: Sequence, num_accepted_tokens: int) -> None:
        """So many drafted tokens of `sequence` have been accepted in the step under way."""
        num_drafted = self._num_drafted.get(sequence, 0)
        if num_drafted:
            self._lengths.record(sequence, num_drafted, min(num_drafted, num_accepted_tokens))

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens has taken so long, sampling included."""
        if self._drafter is not None and self._is_timed:
            self._lengths.record_step(num_tokens, seconds)

    def observe(self, hidden: np.ndarray | torch.Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
        """See `Drafter.observe`."""
        if self._drafter is not None and not self._lengths.rests:
            try:
                self._drafter.observe(hidden, sequences, rows)
            except Exception as error:
                self._give_up(error)

    def end(self, sequence: Sequence) -> None:
        """`sequence` has ended, with its tokens still in it. Idempotent."""
        self._shadows.pop(sequence, None)
        self._num_drafted.pop(sequence, None)  # nothing is recorded of it any more
        self._lengths.end(sequence)
        if self._drafter is not None:
            try:
                self._drafter.end(sequence)
            except Exception as error:
                self._give_up(error)

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()

    @property
    def _is_lookup(self) -> bool:
        return self._drafter is not None and self._drafter.is_lookup

    def _forced(self, sequences: Seq[Sequence], terms: Terms) -> dict[Sequence, Draft]:
        drafts = {}
        for sequence in sequences:
            if sequence.request.grammar is None or sequence.request.params.num_draft_tokens == 0:
                continue
            matcher = terms(sequence).matcher
            if matcher is not None:
                tokens = _forced_tokens(matcher)
                if tokens:
                    drafts[sequence] = Draft(tokens)
        return drafts

    def _asks(self, sequences: Seq[Sequence], terms: Terms) -> list[DraftAsk]:
        if self._drafter is None or self._lengths.rests:
            return []
        limits = {s: _limit(s.request.params, self._draft_limit) for s in sequences}
        drafting = [sequence for sequence, limit in limits.items() if limit]
        if self._is_lookup:
            drafting = self._lengths.due(drafting)
        return [DraftAsk(s, limits[s], terms(s).may_draw) for s in drafting]

    def _propose(self, asks: Seq[DraftAsk], terms: Terms) -> dict[Sequence, Draft]:
        if not asks or self._drafter is None:
            return {}
        start = time.perf_counter()
        try:
            proposals = dict(zip((ask.sequence for ask in asks), self._drafter.propose(asks), strict=True))
        except Exception as error:
            self._give_up(error)
            return {}
        if not self._is_lookup:
            self._lengths.record_propose(sum(ask.num_tokens for ask in asks), time.perf_counter() - start)
        return {s: self._cut(s, proposal, terms(s).matcher) for s, proposal in proposals.items()}

    def _cut(self, sequence: Sequence, draft: Draft, matcher: Matcher | None) -> Draft:
        """Without what cannot be accepted: what is behind an end of the sequence, or behind what its form refuses.

        Of a drawn draft the refused token itself stays: that it was drawn and refused decides what the leftover is.
        """
        params = sequence.request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        for place, token_id in enumerate(draft.token_ids, 1):
            if token_id in ends:
                draft = draft.cut(place)
                break
        if matcher is None or not draft:
            return draft
        num_valid = _num_valid(matcher, draft.token_ids)
        return draft.cut(num_valid + (draft.probs is not None))

    def _score_shadows(self) -> None:
        """Compare what was proposed and not verified with the tokens that came."""
        for sequence, (start, tokens) in list(self._shadows.items()):
            came = sequence.token_ids[start : start + len(tokens)]
            agreed = 0
            while agreed < len(came) and came[agreed] == tokens[agreed]:
                agreed += 1
            if agreed < len(came) or agreed == len(tokens):
                self._lengths.shadow(sequence, len(tokens), agreed)
                del self._shadows[sequence]

    def _give_up(self, error: Exception) -> None:
        log.error("drafting is switched off: the drafter failed", exc_info=error)
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            try:
                drafter.close()
            except Exception:
                log.error("the drafter cannot be closed", exc_info=True)


def _limit(params: SamplingParams, draft_limit: int) -> int:
    return draft_limit if params.num_draft_tokens is None else min(params.num_draft_tokens, draft_limit)


# A form that has outgrown its limits gets no drafts; that its mask cannot be filled ends the sequence.


def _forced_tokens(matcher: Matcher) -> tuple[int, ...]:
    try:
        return tuple(matcher.forced(MAX_FORCED_TOKENS))
    except Exception:
        return ()


def _num_valid(matcher: Matcher, token_ids: Seq[int]) -> int:
    """How many of `token_ids` the matcher, which stays where it is, would take."""
    num_valid = 0
    try:
        ahead = matcher.copy()
        while num_valid < len(token_ids) and ahead.accept(token_ids[num_valid]):
            num_valid += 1
    except Exception:  # of whatever kind: what fails for a draft is no fault of the sequence
        pass
    return num_valid
