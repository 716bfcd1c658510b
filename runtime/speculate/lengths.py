"""How many draft tokens each sequence gets in a step: as many as are expected to pay for their time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from ..sequence import Sequence
from .costs import StepCosts

# Positions of a draft whose acceptance is learned together for one sequence: it sees too few to learn each alone.
# The first differs most from the others: text is copied in runs, and once a run goes on, it goes on.
_GROUP_STARTS = (0, 1, 3)
_NUM_GROUPS = len(_GROUP_STARTS)
_MAX_POSITIONS = 64  # further positions are as the last of these

_FIRST_RATE = 0.8  # acceptance that is expected before anything is known ...
_FIRST_TRIALS = 4.0  # ... with the weight of so many trials
_SHARED_DECAY = 0.99  # per trial: the last 100 or so of all sequences count
_OWN_DECAY = 0.85  # per draft: the last 7 or so of a sequence count
_SHARED_TRIALS = 3.0  # weight of what all sequences show in the estimate for one

_LEAST_GAIN = 0.01  # more drafts that promise less than this are not worth the risk of the estimate
_ROW_SHARE = 0.002  # a row costs at least this part of the step: its mask, logits and draw
_RAMP = 2  # steps grow at most to so many times the tokens of those that were measured ...
_FIRST_TOKENS = 16  # ... unless they are small
_PLAIN_AFTER = (
    64  # steps with drafts after which one goes without, to measure the time that drafts are compared with
)
_FIRST_PLAIN_AFTER = 2  # the same before that time was ever measured
_VARIED_EVERY = 8  # steps after which one may have fewer drafts than seem best, to learn the times between
_VARIED_PARTS = (0.5, 0.7, 0.85)
_PROBE_SHARE = 0.005  # part of the time that may go into probes of what does not seem to pay
_PROBE_TOKENS = 4
_PROBE_COST = 0.1  # of a step, which a probe is taken to cost at least, unless its part of the rows is less
_DECISION_SHARE = 0.1  # of the newest measurement in the estimate
_TRUST_DECAY = 0.95  # per step with drafts: what the last 20 or so promised and kept counts ...
_TRUST_RECOVERY = 0.995  # ... and less with every other step, so that distrust does not last without drafts
_TRUST_TOKENS = 8.0  # tokens that were promised and kept before anything is known
_IDLE_AFTER = 8  # refusals in a row after which a sequence is looked up only every _IDLE_EVERY steps
_IDLE_EVERY = 8
# Refusals of whole steps in a row, after which others are decided the more rarely the larger the batch is: looking up
# takes its time for each sequence, whose share in the step is small then.
_REST_AFTER = 8
_REST_SEQUENCES = 4  # a step more between two for each so many sequences, up to ...
_REST_STEPS = 8
_BLIND_REST = 4  # as many times as long where nothing is learned at rest
_MISSED_LOOKUPS = 8  # sequences whose last look-up found nothing and that are looked up in a step, in turn
_EVIDENCE_AGE = 32  # steps after which the acceptance of a sequence is worth a probe
_DRAFTED_AGE = 256  # steps without any draft after which the time of drafted rows is worth one


@dataclass(slots=True)
class _Own:
    """What one sequence showed, by group of positions: drafted tokens that were reached, and those accepted."""

    tried: list[float] = field(default_factory=lambda: [0.0] * _NUM_GROUPS)
    passed: list[float] = field(default_factory=lambda: [0.0] * _NUM_GROUPS)
    seen: int = 0  # the step of the newest evidence
    num_idle: int = 0  # steps in a row that gave it nothing of what was wanted
    asked: int = 0  # the step before which it was looked up last
    has_missed: bool = False  # the look-up found nothing


class DraftLengths:
    """Allots the draft tokens of a step by goodput (SmartSpec, Liu et al. 2024): accepted tokens per second.

    The token at position j of a draft counts if the j before it do, so its worth is the product of the acceptances
    up to it. These are learned by position, not as one rate per token, for all sequences and, on top, for each.
    The step's time is learned by its number of tokens, for steps with prompts apart. Of all drafted tokens the most
    promising are taken, as few as come near the most expected tokens per second. The most promising of many are those
    that chance flatters, so what is expected is scaled by what drafts promised before and kept. A full batch of
    unpredictable text thus gets none. What was found not to pay is tried again, rarely enough that trying takes less
    than a hundredth of the time.

    Before a step for which it `rests`, nothing is to be wanted. Otherwise a cheap drafter is best asked first, for the
    sequences that are `due`, and `allocate` then given the lengths of its drafts; its unverified drafts go to `shadow`.
    Of others (`has_shadows` False) nothing is learned while they rest. Without `is_adaptive` everything is given. Holds
    no clock: seconds come from the caller.
    """

    def __init__(self, *, is_adaptive: bool = True, has_shadows: bool = True) -> None:
        self._is_adaptive = is_adaptive
        self._rest_scale = 1 if has_shadows else _BLIND_REST
        self._tried = [_FIRST_TRIALS] * _MAX_POSITIONS
        self._passed = [_FIRST_TRIALS * _FIRST_RATE] * _MAX_POSITIONS
        self._own: dict[Sequence, _Own] = {}
        self._pure_steps = StepCosts()  # a token for each sequence, and drafts
        self._mixed_steps = StepCosts()  # with prompts: fewer rows of logits, more attention
        self._steps = self._pure_steps  # those of the step under way
        self._promised = self._kept = 0.0  # tokens of drafts, expected and accepted
        self._allotted: dict[
            Sequence, np.ndarray
        ] = {}  # of the step under way: expected tokens by the draft's length
        self._promises: dict[Sequence, float] = {}  # and those of the drafts that were made
        self._step_kept = 0.0
        self._proposals = StepCosts(is_free_at_zero=True)
        self._decision = (
            0.0  # seconds that looking up and deciding take in a step in which there is something to decide
        )
        self._num_steps = 0
        self._looked_up: list[Sequence] = []  # since the last step
        self._num_refused = 0  # steps in a row that gave nothing of what was wanted
        self._rest_steps = 1
        self._last_drafted = 0
        self._last_plain = 0
        self._credit = 0.0  # seconds that probes may take

    def allocate(self, wanted: Seq[tuple[Sequence, int]], num_tokens: int) -> list[int]:
        """Draft tokens for each sequence of `wanted`, 0 up to what is wanted for it.

        `wanted` has every sequence that gets a token of this step, with 0 where it can use no draft. `num_tokens` is
        the step without drafts: one for each of these and what there is of prompts.
        """
        self._begin_step(is_pure=num_tokens == len(wanted))
        self._rest_steps = min(
            1 + self._rest_scale * (len(wanted) // _REST_SEQUENCES), self._rest_scale * _REST_STEPS
        )
        asked = [(sequence, limit) for sequence, limit in wanted if limit]
        self._note_misses({sequence for sequence, _ in asked})
        if not self._is_adaptive or not asked:
            self._note_drafted(bool(asked))
            return [limit for _, limit in wanted]
        given = self._allot(asked, len(wanted), num_tokens)
        self._note_drafted(any(given))
        for (sequence, _), length in zip(asked, given, strict=True):
            if (own := self._own.get(sequence)) is not None:
                own.num_idle = 0 if length else own.num_idle + 1
        lengths = iter(given)
        return [next(lengths) if limit else 0 for _, limit in wanted]

    @property
    def rests(self) -> bool:
        """Whether nothing needs to be drafted for the next step: lately everything was refused."""
        is_refused = self._is_adaptive and self._num_refused >= _REST_AFTER
        return is_refused and (self._num_steps + 1) % self._rest_steps != 0

    def due(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Those of `sequences` that are worth a look-up before the next step; they are taken to be looked up.

        Where drafts were long refused that is now and then, and where nothing was found it is some of them in turn: in
        a full batch of unpredictable text looking up and comparing would itself take a part of the step.
        """
        if not self._is_adaptive:
            return list(sequences)
        self._looked_up = []
        owns = [(sequence, self._own.setdefault(sequence, _Own())) for sequence in sequences]
        missed = sorted((own.asked, i) for i, (_, own) in enumerate(owns) if own.has_missed)
        turn = {i for _, i in missed[:_MISSED_LOOKUPS]}
        for i, (sequence, own) in enumerate(owns):
            is_idle = own.num_idle >= _IDLE_AFTER and self._num_steps - own.seen < _IDLE_EVERY
            if i in turn or not (own.has_missed or is_idle):
                own.asked = self._num_steps
                self._looked_up.append(sequence)
        return list(self._looked_up)

    def promise(self, sequence: Sequence, num_draft_tokens: int) -> None:
        """Of what was allotted to `sequence` in this step, `num_draft_tokens` are looked up or asked of a model."""
        expected = self._allotted.get(sequence)
        if expected is not None and num_draft_tokens > 0:
            self._promises[sequence] = float(expected[min(num_draft_tokens, len(expected)) - 1])

    def record(self, sequence: Sequence, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Of a verified draft, `num_accepted_tokens` were right, and the next, where there is one, was not."""
        if num_draft_tokens < 1:
            return
        if sequence in self._promises:
            self._step_kept += num_accepted_tokens
        self._learn(sequence, num_draft_tokens, num_accepted_tokens)

    def shadow(self, sequence: Sequence, num_draft_tokens: int, num_agreed: int) -> None:
        """A draft that was not verified: its first `num_agreed` tokens are what came, the next is not.

        `num_draft_tokens` is the part of it that can be compared with what came.
        """
        if num_draft_tokens > 0:
            self._learn(sequence, num_draft_tokens, num_agreed)

    def _learn(self, sequence: Sequence, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        own = self._own.setdefault(sequence, _Own())
        own.seen = self._num_steps
        if 2 * num_accepted_tokens >= num_draft_tokens:
            own.num_idle = 0
        reached = min(num_accepted_tokens + 1, num_draft_tokens)
        for position in range(min(reached, _MAX_POSITIONS)):
            self._tried[position] = self._tried[position] * _SHARED_DECAY + 1.0
            self._passed[position] = self._passed[position] * _SHARED_DECAY + (position < num_accepted_tokens)
        ends = (*_GROUP_STARTS[1:], reached)
        for group, (start, end) in enumerate(zip(_GROUP_STARTS, ends, strict=True)):
            if reached <= start:
                break
            end = min(end, reached)
            own.tried[group] = own.tried[group] * _OWN_DECAY + end - start
            own.passed[group] = own.passed[group] * _OWN_DECAY + max(min(num_accepted_tokens, end) - start, 0)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """The step that `allocate` was last asked for took `seconds` without the drafting, for `num_tokens` in all."""
        if num_tokens > 0 and seconds > 0:
            self._steps.record(num_tokens, seconds)
            self._credit += _PROBE_SHARE * seconds

    def record_propose(self, num_tokens: int, seconds: float) -> None:
        """Drafting took `seconds`, for `num_tokens` that were allotted. Not of look-ups, which come before that."""
        if num_tokens > 0:
            self._proposals.record(num_tokens, seconds)

    def record_decision(self, seconds: float) -> None:
        """All that came before the step, look-ups and `allocate` included, took `seconds`; something was wanted."""
        self._decision += (seconds - self._decision) * _DECISION_SHARE

    def end(self, sequence: Sequence) -> None:
        """Forget `sequence`, of which nothing may be recorded from then on. Idempotent."""
        self._own.pop(sequence, None)
        self._promises.pop(sequence, None)

    def _begin_step(self, *, is_pure: bool) -> None:
        self._num_steps += 1
        self._steps = self._pure_steps if is_pure else self._mixed_steps
        decay = _TRUST_DECAY if self._promises else _TRUST_RECOVERY
        self._promised = self._promised * decay + sum(self._promises.values())
        self._kept = self._kept * decay + self._step_kept
        self._step_kept = 0.0
        self._promises.clear()
        self._allotted.clear()

    def _note_misses(self, found: set[Sequence]) -> None:
        for sequence in self._looked_up:
            if (own := self._own.get(sequence)) is not None:
                own.has_missed = sequence not in found
        self._looked_up = []

    def _note_drafted(self, has_drafts: bool) -> None:
        if has_drafts:
            self._last_drafted = self._num_steps
        elif self._steps is self._pure_steps:
            self._last_plain = self._num_steps

    def _allot(self, asked: Seq[tuple[Sequence, int]], num_sequences: int, num_tokens: int) -> list[int]:
        """The draft tokens of each that asked, of `num_sequences` that get a token."""
        gains = self._gains(asked)  # [A, K]
        given = self._best(gains, [limit for _, limit in asked], num_sequences, num_tokens)
        if not any(given):
            self._num_refused += 1
            return self._probe(asked, num_tokens)
        self._num_refused = 0
        if self._steps is self._pure_steps and self._is_plain_due(num_tokens):
            return [0] * len(asked)
        for (sequence, _), row, length in zip(asked, gains, given, strict=True):
            if length:
                self._allotted[sequence] = np.cumsum(row[:length])
        return given

    def _gains(self, wanted: Seq[tuple[Sequence, int]]) -> np.ndarray:
        """`[A, K]` float64: the chance that a draft of a sequence is right up to and with position k."""
        num_positions = max(limit for _, limit in wanted)
        none = _Own()
        owns = [self._own.get(sequence, none) for sequence, _ in wanted]
        positions = np.minimum(np.arange(num_positions), _MAX_POSITIONS - 1)
        groups = np.searchsorted(_GROUP_STARTS, positions, side="right") - 1
        tried = np.array([own.tried for own in owns])[:, groups]  # [A, K]
        passed = np.array([own.passed for own in owns])[:, groups]  # [A, K]
        shared = (np.array(self._passed) / np.array(self._tried))[positions]  # [K]
        rates = (passed + _SHARED_TRIALS * shared) / (tried + _SHARED_TRIALS)
        gains: np.ndarray = np.cumprod(rates, axis=1)
        return gains

    def _best(self, gains: np.ndarray, limits: list[int], num_sequences: int, num_tokens: int) -> list[int]:
        """The allotment of most expected tokens per second. `gains` `[A, K]` do not rise along K."""
        is_wanted = np.arange(gains.shape[1]) < np.array(limits)[:, None]  # [A, K]
        rows, _ = np.nonzero(is_wanted)
        worth = gains[is_wanted]  # [M], in the order of `rows`
        order = np.argsort(-worth, kind="stable")  # of one sequence the earlier positions stay first
        order = order[: self._room(num_tokens)]
        taken = np.arange(len(order) + 1)  # [M'+1]
        expected = np.concatenate(([0.0], np.cumsum(worth[order]))) * self._trust
        seconds = self._seconds(num_tokens, taken)
        plain = num_sequences * self._weight_of_prompts(num_sequences, seconds[0])
        rates = (plain + expected) / seconds
        best = int(np.argmax(rates * (1 + _LEAST_GAIN) >= rates.max()))  # the first that comes near the best
        best = self._varied(best, num_tokens)
        return [int(n) for n in np.bincount(rows[order[:best]], minlength=len(limits))]

    def _weight_of_prompts(self, num_sequences: int, seconds: float) -> float:
        """How many steps of `num_sequences` tokens could have run in `seconds`, a step with prompts, at least 1."""
        if self._steps is self._pure_steps or not (self._pure_steps.is_known and self._mixed_steps.is_known):
            return 1.0
        return max(seconds / float(self._pure_steps.seconds(np.array([num_sequences]))[0]), 1.0)

    @property
    def _trust(self) -> float:
        """What drafts kept of what they promised, at most 1."""
        return min((self._kept + _TRUST_TOKENS) / (self._promised + _TRUST_TOKENS), 1.0)

    def _seconds(self, num_tokens: int, drafted: np.ndarray) -> np.ndarray:
        """Time of a step of `num_tokens` and `drafted` more of them, drafting included; ascending from 0 drafted."""
        steps = np.ones(drafted.shape)
        if self._steps.is_known:
            steps = self._steps.seconds(num_tokens + drafted)
        seconds: np.ndarray = np.maximum(steps, steps[0] * (1 + _ROW_SHARE * drafted))
        # A batch that rests need not decide either.
        decision = self._decision if self._rest_steps > 1 else 0.0
        seconds += np.where(drafted > 0, self._proposals.seconds(drafted) + decision, 0.0)
        return seconds

    def _varied(self, best: int, num_tokens: int) -> int:
        """`best`, or now and then a part of it whose time is not known.

        Between two measurements time is taken to be straight. Where it has a knee, the best
        number lies there, and is never found by steps of only the numbers that look best.
        """
        if best and self._num_steps % _VARIED_EVERY == 0:
            for part in _VARIED_PARTS:
                if not self._steps.knows(num_tokens + int(best * part)):
                    return int(best * part)
        return best

    def _room(self, num_tokens: int) -> int:
        """Drafted tokens that the known times say something about."""
        return max(_RAMP * max(num_tokens, self._steps.largest), _FIRST_TOKENS) - num_tokens

    def _is_plain_due(self, num_tokens: int) -> bool:
        """Whether this step should go without drafts for the sake of its time."""
        limit = _PLAIN_AFTER if self._steps.knows(num_tokens) else _FIRST_PLAIN_AFTER
        return self._num_steps - self._last_plain > limit

    def _probe(self, wanted: Seq[tuple[Sequence, int]], num_tokens: int) -> list[int]:
        """A few draft tokens for the sequence that showed nothing for longest, if they can be afforded."""
        given = [0] * len(wanted)
        seen = [self._own[sequence].seen if sequence in self._own else 0 for sequence, _ in wanted]
        oldest = min((i for i, (_, limit) in enumerate(wanted) if limit), key=seen.__getitem__)
        length = min(wanted[oldest][1], _PROBE_TOKENS)
        plain, drafted = self._seconds(num_tokens, np.array([0, length]))
        cost = max(drafted - plain, plain * min(length / num_tokens, _PROBE_COST))
        self._credit = min(self._credit, cost)
        is_due = (
            self._num_steps - seen[oldest] > _EVIDENCE_AGE
            or self._num_steps - self._last_drafted > _DRAFTED_AGE
        )
        if is_due and self._credit >= cost:
            self._credit = 0.0
            given[oldest] = length
        return given
