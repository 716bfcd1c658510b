"""Choosing the next token of every sequence of a step.

The order of processing is vLLM's (its `v1/sample/sampler.py`):

1. log-probabilities, when asked for, of the logits as the model gave them;
2. below `min_tokens`, EOS and `stop_token_ids` are masked;
3. `logit_bias` is added;
4. penalties: repetition, then frequency, then presence;
5. greedy requests (temperature below 1e-5) take the largest logit, of equal ones the lowest id;
6. others draw from the distribution after temperature, min_p, top_k and top_p.

Every row is processed on its own, and a draw takes one uniform number that is a function of the request's
seed, the choice's index and the output position. So a request's tokens depend on nothing but its own logits:
not on batch mates, place in the batch, preemption or the steps that led there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from ..errors import EngineError, RequestError
from .outputs import TokenEvent, TokenLogprob
from .penalties import TokenCounts, has_penalties
from .request import SamplingParams
from .sequence import Sequence
from .truncation import draw, processed_weights

# Lower log-probabilities, down to the -inf of masked tokens, are reported as this value: JSON has no -inf.
LOGPROB_FLOOR = -9999.0

# Requests with a lower temperature are greedy.
GREEDY_BELOW = 1e-5

# Why a row gives no token.
POISONED = "the model's logits are NaN or infinite"
NOTHING_LEFT = "min_tokens, logit_bias and penalties leave no finite logit"


class Sampler(Protocol):
    """Samples from what the executor that made it returns as `StepOutput.logits`, and there, wherever that is.

    What it remembers of a sequence is a function of the sequence's tokens: dropped at any time, it is made again.
    """

    def validate(self, params: SamplingParams) -> None:
        """Raise `RequestError` naming the field where `params` do not fit the model's vocabulary.

        `top_k` above the vocabulary is valid: it means the whole vocabulary.
        """
        ...

    def sample(
        self, logits: Any, sequences: Seq[Sequence], rows: Seq[int] | None = None
    ) -> list[TokenEvent | EngineError]:
        """The next token of `sequences[i]` from row `rows[i]` (None: row i) of `logits` `[N, vocab_size]` float32,
        which stay unchanged.

        `request.params.seed` must be set unless the request is greedy. A row without a largest finite logit
        (NaN, +inf, or all -inf) gives an `EngineError` in its place; the other rows are not affected.
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

    def validate(self, params: SamplingParams) -> None:
        check_vocabulary(params, self._vocab_size)

    def sample(
        self, logits: np.ndarray, sequences: Seq[Sequence], rows: Seq[int] | None = None
    ) -> list[TokenEvent | EngineError]:
        if rows is not None and list(rows) != list(range(len(logits))):
            logits = logits[list(rows)]
        if logits.shape != (len(sequences), self._vocab_size):
            raise ValueError(f"logits of shape {logits.shape} for {len(sequences)} x {self._vocab_size}")
        if not sequences:
            return []
        best = logits.argmax(axis=1)
        # argmax puts NaN above all else, so the maximum tells whether the row holds one.
        is_valid = np.isfinite(logits[np.arange(len(sequences)), best])
        return [
            self._sample_row(row, int(token_id), sequence) if valid else no_token(sequence, POISONED)
            for row, token_id, valid, sequence in zip(logits, best, is_valid, sequences, strict=True)
        ]

    def prompt_logprobs(self, logits: np.ndarray, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
        return [_logprob(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        self._counts.pop(sequence, None)

    def _sample_row(self, row: np.ndarray, best: int, sequence: Sequence) -> TokenEvent | EngineError:
        params = sequence.request.params
        processed = self._process(row, sequence)
        if processed is not None:
            best = int(processed.argmax())
            if not np.isfinite(processed[best]):
                return no_token(sequence, NOTHING_LEFT)
        if params.temperature < GREEDY_BELOW:
            token_id = best
        else:
            if params.seed is None:
                raise ValueError(f"request {sequence.request.request_id} samples without a seed")
            uniform = uniform_at(params.seed, sequence.index, sequence.num_output_tokens)
            token_id = draw(processed_weights(row if processed is None else processed, params), uniform)
        logprob = None if params.logprobs is None else _logprob(row, token_id, params.logprobs)
        return TokenEvent(token_id, logprob)

    def _process(self, row: np.ndarray, sequence: Sequence) -> np.ndarray | None:
        """A processed copy of `row`, or None where nothing applies to it."""
        params = sequence.request.params
        is_short = sequence.num_output_tokens < params.min_tokens
        penalised = has_penalties(params)
        if not (is_short or params.logit_bias or penalised):
            return None
        row = row.copy()
        if is_short:
            row[self._eos_token_ids] = -np.inf
            row[list(params.stop_token_ids)] = -np.inf
        if params.logit_bias:
            row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
        if penalised:
            counts = self._counts.get(sequence)
            if counts is None:
                counts = self._counts[sequence] = TokenCounts(sequence)
            counts.update(sequence)
            counts.apply(row, params)
        return row


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


def uniform_at(seed: int, index: int, position: int) -> float:
    """A number in [0, 1), evenly distributed, that is a function of its arguments (53 bits of BLAKE2b)."""
    counter = b"".join(value.to_bytes(9, "little", signed=True) for value in (seed, index, position))
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


def no_token(sequence: Sequence, cause: str) -> EngineError:
    return EngineError(
        f"request {sequence.request.request_id}, output token {sequence.num_output_tokens}: {cause}"
    )
