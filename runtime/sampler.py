"""Choosing the next tokens of every sequence of a step.

The order of processing is vLLM's (its `v1/sample/sampler.py`):

1. log-probabilities, when asked for, of the logits as the model gave them;
2. tokens that the form of a structured output does not allow are masked;
3. below `min_tokens`, EOS and `stop_token_ids` are masked;
4. the request's logit processors, in their order;
5. `logit_bias` is added;
6. penalties: repetition, then frequency, then presence;
7. greedy requests (temperature below 1e-5) take the largest logit, of equal ones the lowest id;
8. others draw from the distribution after temperature, min_p, top_k and top_p.

Every row is processed on its own, and a draw takes one uniform number that is a function of the request's
seed, the choice's index and the output position. So a request's tokens depend on nothing but its own logits:
not on batch mates, place in the batch, preemption or the steps that led there.

Drafted tokens are verified row by row, each row processed with the drafted tokens before it in place:

- A token that was chosen is accepted if the row, sampled as ever, gives that token. It is so with probability p(token),
  which is what rejection sampling gives for a draft that is certain of its token, and the tokens that come out are the
  very same as without the draft.
- A token that was drawn from q is accepted with probability min(1, p / q); else the row's token is drawn from
  max(0, p - q), normalised (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
  appendix A.1; Chen et al. 2023). What comes out has the distribution p.

The first token that is not the drafted one ends it; a whole accepted draft is followed by one token more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import EngineError, RequestError
from .outputs import TokenEvent, TokenLogprob
from .penalties import TokenCounts, has_penalties
from .request import SamplingParams
from .sequence import Sequence
from .speculate.draft import NO_DRAFT, Draft
from .structured import Masks
from .truncation import draw, processed_weights

# Lower log-probabilities, down to the -inf of masked tokens, are reported as this value: JSON has no -inf.
LOGPROB_FLOOR = -9999.0

# Requests with a lower temperature are greedy.
GREEDY_BELOW = 1e-5

# Of fewer than one in so many tokens a copy is quicker than working on all.
_SPARSE = 4

# Why a row gives no token.
POISONED = "the model's logits are NaN or infinite"
NOTHING_LEFT = "min_tokens, logit_bias and penalties leave no finite logit"


# What the uniform numbers of an output position are for besides the draw, which takes the one without a purpose:
# whether a drawn draft is accepted, the draw where it is not, and the draft's own draw (with where the draft starts).
_ACCEPT, _LEFTOVER, DRAFT = 1, 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """What a step found out for `sequence`: row `row + j` of the logits follows the first j tokens of `draft`.

    `masks` tell which tokens may follow there (None: all). Without a draft this is sampling.
    """

    sequence: Sequence
    row: int
    draft: Draft = NO_DRAFT
    masks: Masks | None = None


class Sampler(Protocol):
    """Samples from what the executor that made it returns as `StepOutput.logits`, and there, wherever that is.

    What it remembers of a sequence is a function of the sequence's tokens: dropped at any time, it is made again.
    """

    @property
    def reads_whole_masks(self) -> bool:
        """Whether `Verification.masks` are read row by row, all of them: they are best filled beforehand."""
        ...

    def validate(self, params: SamplingParams) -> None:
        """Raise `RequestError` naming the field where `params` do not fit the model's vocabulary.

        `top_k` above the vocabulary is valid: it means the whole vocabulary.
        """
        ...

    def verify(self, logits: Any, verifications: Seq[Verification]) -> list[list[TokenEvent | EngineError]]:
        """The next tokens of each sequence from `logits` `[N, vocab_size]` float32, which stay unchanged.

        That is the accepted beginning of its draft and one token more, in its place an `EngineError` where the row has
        no largest finite logit (NaN, +inf, or all -inf). The other sequences are not affected. `request.params.seed`
        must be set unless the request is greedy.
        """
        ...

    def prompt_logprobs(self, logits: Any, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
        """Log-probability of `token_ids[i]` under row i of `logits`, with the `num_top` likeliest tokens.

        Raises `EngineError` where a row has no largest finite logit.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is remembered of a finished sequence. Idempotent."""
        ...


class HostSampler:
    """`Sampler` in numpy for a model whose logits are `vocab_size` wide and whose turns end with `eos_token_ids`.

    It remembers the token counts of sequences with penalties.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = ids_within(vocab_size, eos_token_ids)
        self._counts: dict[Sequence, TokenCounts] = {}

    @property
    def reads_whole_masks(self) -> bool:
        return False

    def validate(self, params: SamplingParams) -> None:
        check_vocabulary(params, self._vocab_size)

    def verify(
        self, logits: np.ndarray, verifications: Seq[Verification]
    ) -> list[list[TokenEvent | EngineError]]:
        if logits.shape[1:] != (self._vocab_size,):
            raise ValueError(f"logits of shape {logits.shape} for a vocabulary of {self._vocab_size}")
        if not verifications:
            return []
        best = logits.argmax(axis=1)
        # argmax puts NaN above all else, so the maximum tells whether the row holds one.
        is_valid = np.isfinite(logits[np.arange(len(logits)), best])
        return [self._verify_one(logits, best, is_valid, verification) for verification in verifications]

    def prompt_logprobs(self, logits: np.ndarray, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
        return [_logprob(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        self._counts.pop(sequence, None)

    def _verify_one(
        self, logits: np.ndarray, best: np.ndarray, is_valid: np.ndarray, verification: Verification
    ) -> list[TokenEvent | EngineError]:
        sequence, draft = verification.sequence, verification.draft
        counts = self._counts_of(sequence)
        events: list[TokenEvent | EngineError] = []
        pushed: list[int] = []
        for place in range(len(draft) + 1):
            row = verification.row + place
            if not is_valid[row]:
                events.append(no_token(sequence, POISONED, place))
                break
            try:
                processed = self._process(logits[row], int(best[row]), verification, place, counts)
            except RequestError as error:
                events.append(no_token(sequence, str(error), place))
                break
            except EngineError as error:  # of the form
                if not place:
                    events.append(error)
                break  # what is ahead may have failed for the draft alone
            likeliest = int(best[row]) if processed is None else int(processed.argmax())
            if processed is not None and not np.isfinite(processed[likeliest]):
                events.append(no_token(sequence, NOTHING_LEFT, place))
                break
            token_id = self._choose(
                logits[row] if processed is None else processed, likeliest, verification, place
            )
            num_top = sequence.request.params.logprobs
            logprob = None if num_top is None else _logprob(logits[row], token_id, num_top)
            events.append(TokenEvent(token_id, logprob))
            if place == len(draft) or token_id != draft.token_ids[place]:
                break
            if counts is not None:
                counts.push(token_id)
                pushed.append(token_id)
        for token_id in reversed(pushed):  # counted for good when they have joined the sequence
            counts.pop(token_id)  # type: ignore[union-attr]
        return events

    def _choose(self, row: np.ndarray, likeliest: int, verification: Verification, place: int) -> int:
        """The token of a processed row, `place` tokens into the draft."""
        sequence, draft = verification.sequence, verification.draft
        params = sequence.request.params
        if params.temperature < GREEDY_BELOW:
            return likeliest
        if params.seed is None:
            raise ValueError(f"request {sequence.request.request_id} samples without a seed")
        seed, index, position = params.seed, sequence.index, sequence.num_output_tokens + place
        if draft.probs is None or place == len(draft):
            uniform = uniform_at(seed, index, position)
            if verification.masks is not None:
                return _draw_masked(row, params, uniform)
            return draw(processed_weights(row, params), uniform)
        return accept_or_redraw(
            processed_weights(row, params),
            draft.probs[place],
            draft.token_ids[place],
            uniform_at(seed, index, position, _ACCEPT),
            uniform_at(seed, index, position, _LEFTOVER),
        )

    def _counts_of(self, sequence: Sequence) -> TokenCounts | None:
        """Up to date; None for a sequence without penalties."""
        if not has_penalties(sequence.request.params):
            return None
        counts = self._counts.get(sequence)
        if counts is None:
            counts = self._counts[sequence] = TokenCounts(sequence)
        counts.update(sequence)
        return counts

    def _process(
        self,
        row: np.ndarray,
        best: int,
        verification: Verification,
        place: int,
        counts: TokenCounts | None,
    ) -> np.ndarray | None:
        """A processed copy of `row`, which is `place` tokens into the draft and whose largest logit is `best`'s.

        None where nothing that applies to it changes what is chosen.
        """
        sequence, masks = verification.sequence, verification.masks
        params, drafted = sequence.request.params, verification.draft.token_ids[:place]
        is_short = sequence.num_output_tokens + len(drafted) < params.min_tokens
        is_changed = is_short or params.logit_bias or params.logits_processors or counts is not None
        if not is_changed:
            is_greedy = params.temperature < GREEDY_BELOW
            if masks is None or (is_greedy and masks.allows(place, best)):
                return None
        row = row.copy() if masks is None else _masked(row, masks.row(place))
        if is_short:
            row[self._eos_token_ids] = -np.inf
            row[list(params.stop_token_ids)] = -np.inf
        if params.logits_processors:
            row = _run_processors(row, sequence, drafted)
        if params.logit_bias:
            row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
        if counts is not None:
            counts.apply(row, params)
        return row


def _run_processors(row: np.ndarray, sequence: Sequence, drafted: tuple[int, ...]) -> np.ndarray:
    """Raises `RequestError` where the user's code fails."""
    output = (*sequence.output_token_ids, *drafted)
    for processor in sequence.request.params.logits_processors:
        try:
            result = np.asarray(processor(sequence.request.prompt_token_ids, output, row), np.float32)
        except Exception as error:
            raise RequestError(f"logits_processors: {type(error).__name__}: {error}") from error
        if result.shape != row.shape or np.isnan(result).any() or np.isposinf(result).any():
            raise RequestError(
                f"logits_processors: the result must be logits of shape {row.shape} without NaN and +inf"
            )
        row = result
    return row


def allowed_tokens(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """`[vocab_size]` bool of the bits of `mask` `[ceil(vocab_size / 32)]` int32."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def _masked(row: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A copy of `row` with -inf for the tokens that `mask` leaves out."""
    allowed = allowed_tokens(mask, len(row))
    if 2 * np.count_nonzero(allowed) > len(row):  # whichever writes fewer
        masked = row.copy()
        masked[~allowed] = -np.inf
    else:
        masked = np.full_like(row, -np.inf)
        np.copyto(masked, row, where=allowed)
    return masked


def _draw_masked(row: np.ndarray, params: SamplingParams, uniform: float) -> int:
    """As `draw` from the processed weights. Where a mask has left little, the rest is not worked on."""
    is_left = row > -np.inf
    if _SPARSE * np.count_nonzero(is_left) > len(row):
        return draw(processed_weights(row, params), uniform)
    left = np.flatnonzero(is_left)
    return int(left[draw(processed_weights(row[left], params), uniform)])


def accept_or_redraw(
    weights: np.ndarray, probs: np.ndarray, token_id: int, accept: float, leftover: float
) -> int:
    """`token_id`, which was drawn from `probs`, or in its place another, such that the result has the distribution of
    `weights` (not normalised) for `accept` and `leftover` even in [0, 1).
    """
    target = weights / weights.sum(dtype=np.float64)
    if accept * float(probs[token_id]) < target[token_id]:
        return token_id
    rest = np.maximum(target - probs, 0.0)
    # Where rounding leaves nothing, target and draft are equal but for it.
    return draw(rest if rest.any() else target, leftover)


def ids_within(vocab_size: int, token_ids: Iterable[int]) -> list[int]:
    """Those of `token_ids` that the model has, ascending: tokenizers may know more."""
    return sorted(i for i in set(token_ids) if 0 <= i < vocab_size)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """What `Sampler.validate` promises."""
    for name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name}: {token_id} is outside the model's vocabulary of {vocab_size} tokens",
                    field=name,
                )
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise RequestError(
                f"{name}: {count} is above the size of the model's vocabulary, {vocab_size}",
                field=name,
            )


def uniform_at(seed: int, index: int, position: int, *purpose: int) -> float:
    """A number in [0, 1), evenly distributed, that is a function of its arguments (53 bits of BLAKE2b)."""
    values = (seed, index, position, *purpose)
    counter = b"".join(value.to_bytes(9, "little", signed=True) for value in values)
    digest = hashlib.blake2b(counter, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _logprob(row: np.ndarray, token_id: int, num_top: int) -> TokenLogprob:
    """Rank 1 is the likeliest token; equal logits are ranked by the lower id."""
    top = float(row.max())
    if not np.isfinite(top):
        raise EngineError(POISONED)
    log_total = top + float(np.log(np.exp(row - np.float32(top)).sum(dtype=np.float64)))
    value = row[token_id]
    rank = 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))
    return TokenLogprob(
        token_id,
        floored(float(value) - log_total),
        tuple((i, floored(float(row[i]) - log_total)) for i in _top(row, num_top)),
        rank,
    )


def _top(row: np.ndarray, count: int) -> list[int]:
    """Ids of the `count` largest logits, largest first, equal ones by id; masked ones (-inf) are left out."""
    count = min(count, len(row))
    if count == 0:
        return []
    limit = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero((row >= limit) & (row > -np.inf))
    # flatnonzero ascends, so a stable sort keeps equal logits by id.
    ranked: list[int] = ids[np.argsort(-row[ids], kind="stable")][:count].tolist()
    return ranked


def floored(logprob: float) -> float:
    """`logprob` as it is reported."""
    # Rounding can give a certain token a value just above 0.
    return min(max(logprob, LOGPROB_FLOOR), 0.0)


def no_token(sequence: Sequence, cause: str, num_drafted: int = 0) -> EngineError:
    """Why `sequence` has no token behind the first `num_drafted` of its draft."""
    position = sequence.num_output_tokens + num_drafted
    return EngineError(f"request {sequence.request.request_id}, output token {position}: {cause}")
