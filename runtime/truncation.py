"""The distribution that a token is drawn from: temperature, min_p, top_k and top_p, exactly.

Tokens are ranked by logit, equal logits by the lower id, and min_p, top_k and top_p each keep a beginning of
that ranking. No row is sorted for it: the boundary is located by partition or by bucket sums, and only the
tokens around it are ranked.
"""

from __future__ import annotations

import numpy as np

from .request import SamplingParams

_BLOCK = 256
# The share of top_p lies almost always among tokens that weigh more than this, and those are few.
_NEAR = np.float32(1e-5)


def processed_weights(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The processed distribution of one row of finite or -inf logits with a finite maximum; temperature > 0.

    Float32 weights in order of id, not normalised: the likeliest token has 1, removed ones have 0. In this
    order: temperature; min_p keeps tokens at least min_p times as likely as the likeliest; top_k keeps the k
    likeliest of those; top_p keeps the smallest set of likeliest ones that has the share p of what then
    remains.
    """
    # How much less likely than the likeliest token, in nats: never negative, and 0.0 rather than -0.0, which the
    # difference would be where the largest logit is -0.0 beside 0.0; adding 0 makes that 0.0.
    cost = logits.max() + np.float32(0.0) - logits
    cost /= np.float32(params.temperature)
    weights: np.ndarray = -cost
    np.exp(weights, out=weights)
    if params.min_p > 0.0:
        weights *= weights >= np.float32(params.min_p)
    if 0 < params.top_k < len(cost):
        _keep_top_k(cost, weights, params.top_k)
    if params.top_p < 1.0:
        _keep_top_p(cost, weights, params.top_p)
    return weights


def draw(weights: np.ndarray, uniform: float) -> int:
    """The id at `uniform` in [0, 1) of the cumulative distribution in order of id; never one of weight 0."""
    # Summing blocks first is many times faster than one cumulative sum over the vocabulary.
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    target = uniform * blocks[-1]
    block = _first_above(blocks, target)
    start = block * _BLOCK
    within = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + _first_above(within, target - (blocks[block - 1] if block else 0.0))


def _keep_top_k(cost: np.ndarray, weights: np.ndarray, k: int) -> None:
    limit = np.partition(cost, k - 1)[k - 1]
    ties = np.flatnonzero(cost == limit)
    weights *= cost <= limit
    weights[ties[k - int(np.count_nonzero(cost < limit)) :]] = 0.0


def _keep_top_p(cost: np.ndarray, weights: np.ndarray, p: float) -> None:
    share = p * weights.sum(dtype=np.float64)
    near = np.flatnonzero(weights > _NEAR)
    if weights[near].sum(dtype=np.float64) < share:
        near = np.arange(len(cost))
    kept = near[_shortest(cost[near], weights[near], share)]
    kept_weights = weights[kept]
    weights.fill(0.0)
    weights[kept] = kept_weights


def _shortest(cost: np.ndarray, weights: np.ndarray, share: float) -> np.ndarray:
    """Places, in any order, of the shortest beginning of the ranking that weighs at least `share`."""
    # Non-negative floats are ordered like their bits, so the upper ones number buckets, 64 per power of two.
    buckets = cost.view(np.int32) >> 17
    mass = np.cumsum(np.bincount(buckets.astype(np.intp), weights))
    crossing = int(np.searchsorted(mass, share, side="left"))
    ranked = np.flatnonzero(buckets == crossing)
    ranked = ranked[np.argsort(cost[ranked], kind="stable")]
    within = np.cumsum(weights[ranked], dtype=np.float64) + (mass[crossing - 1] if crossing else 0.0)
    count = int(np.searchsorted(within, share, side="left")) + 1
    return np.concatenate([np.flatnonzero(buckets < crossing), ranked[:count]])


def _first_above(cumulative: np.ndarray, target: float) -> int:
    """The first place whose cumulative weight is above `target`, or the last that adds weight."""
    place = int(np.searchsorted(cumulative, target, side="right"))
    return min(place, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
