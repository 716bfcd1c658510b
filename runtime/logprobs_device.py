"""Log-probabilities of rows of logits on a device: sums and rankings there, the logarithm on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from .outputs import TokenLogprob
from .sampler import floored
from .truncation_device import weight_bits, weights_of

_NUM_FIXED = 4  # the largest logit, the token's, the sum of weights, the rank


def score_width(num_top: int) -> int:
    """How many int64 `score` has for a row."""
    return _NUM_FIXED + 2 * num_top


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """What `read_scores` makes log-probabilities of `[L, score_width]` int64, for `logits` `[L, V]`, unchanged, and
    `token_ids` `[L]` int64.

    Largest logit, the token's logit, the sum of weights, the token's rank, then ids and logits of the `num_top`
    likeliest. Logits are float64 in the bits of int64, so that one tensor holds everything.
    """
    largest = logits.amax(1, keepdim=True)
    total = weights_of(largest - logits).sum(1, keepdim=True)
    chosen = token_ids[:, None]
    value = logits.gather(1, chosen)
    ids = torch.arange(logits.shape[1], device=logits.device)
    # Equal logits are ranked by the lower id.
    rank = (logits > value).sum(1, keepdim=True) + 1
    rank += ((logits == value) & (ids < chosen)).sum(1, keepdim=True)
    columns = [_bits(largest), _bits(value), total, rank]
    if num_top:
        likeliest = _likeliest(logits, ids, num_top)
        columns += [likeliest, _bits(logits.gather(1, likeliest))]
    return torch.cat(columns, 1)


def read_scores(
    scores: np.ndarray, token_ids: Seq[int], nums_top: Seq[int], vocab_size: int
) -> list[TokenLogprob | None]:
    """The log-probability of `token_ids[i]` and its `nums_top[i]` likeliest tokens, from row i of `scores` on the host.

    None where the row has no largest finite logit.
    """
    num_top = (scores.shape[1] - _NUM_FIXED) // 2
    values = scores.view(np.float64)
    result: list[TokenLogprob | None] = []
    for row, floats, token_id, count in zip(scores, values, token_ids, nums_top, strict=True):
        largest = float(floats[0])
        if not math.isfinite(largest):
            result.append(None)
            continue
        log_total = largest + math.log(int(row[2]) / (1 << weight_bits(vocab_size)))
        ids = row[_NUM_FIXED : _NUM_FIXED + count].tolist()
        logits = floats[_NUM_FIXED + num_top : _NUM_FIXED + num_top + count].tolist()
        top = tuple(
            (i, floored(logit - log_total)) for i, logit in zip(ids, logits, strict=True) if logit > -math.inf
        )
        result.append(TokenLogprob(token_id, floored(float(floats[1]) - log_total), top, int(row[3])))
    return result


def _bits(values: Tensor) -> Tensor:
    return values.double().view(torch.int64)


def _likeliest(logits: Tensor, ids: Tensor, count: int) -> Tensor:
    """Ids `[L, count]` of the largest logits, largest first, equal ones by the lower id."""
    # As an integer of its bits a float is in order, if the bits of negative ones are flipped; adding 0 turns -0 into
    # 0. Below those bits stands the id, so that no two keys are equal: topk does not say which of equal ones it takes.
    bits = (logits + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = logits.shape[1] - 1
    keys = (bits.long() << 32).add_(last - ids)
    return last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
