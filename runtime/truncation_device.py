"""`truncation.py` on tensors of any device: many rows at once, each as if it were alone.

A device may add up a row's numbers in another order when there are other rows beside it, and floating-point sums
depend on the order. So weights are integers here: multiples of 2^-bits of the likeliest token's, which is 1. Their sums
are exact in any order, and so a row's token is the same, to the bit, in every batch. What is lost are tokens less
likely than the likeliest by a factor of some 2^45 (a vocabulary of 2^17), which have weight 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256


def weight_bits(vocab_size: int) -> int:
    """The likeliest token weighs 2^bits: as much as lets a vocabulary and a block of such weights fit into int64."""
    return 62 - (vocab_size + _BLOCK).bit_length()


def costs(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """How much less likely than the likeliest token, in nats; in place of `logits` `[C, V]`.

    `largest` and `temperature` `[C]` float32.
    """
    # Adding 0 turns a largest logit of -0.0 into 0.0, so that no cost is -0.0: sorting may look at bits.
    return torch.sub((largest + 0.0)[:, None], logits, out=logits).div_(temperature[:, None])


def weights_of(costs: Tensor, min_p: Tensor | None = None) -> Tensor:
    """Integer weights `[C, V]` int64 for `costs` `[C, V]` float32, which are overwritten.

    0 for tokens less than `min_p` `[C]` float32 times as likely as the likeliest.
    """
    weights = costs.neg_().exp_()
    if min_p is not None:
        weights.masked_fill_(weights < min_p[:, None], 0.0)
    # Exact but for the rounding to an integer: the factor is a power of two.
    return weights.mul_(2.0 ** weight_bits(weights.shape[1])).round_().long()


def truncate(weights: Tensor, costs: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set the weights `[C, V]` to 0 that top_k and then top_p remove; equal costs rank by the lower id.

    `top_k` `[C]` int64, V for all; `top_p` `[C]` float64, 1.0 for all.
    """
    order = torch.sort(costs, dim=1, stable=True).indices  # [C, V]
    ranked = weights.gather(1, order)
    place = torch.arange(weights.shape[1], device=weights.device)  # [V]
    ranked.masked_fill_(place >= top_k[:, None], 0)
    sums = _block_sums(ranked)
    total = sums.sum(1)
    share = torch.minimum((top_p * total.double()).ceil().long(), total)
    count = _first_above(ranked, sums, share - 1) + 1
    count = torch.where(top_p < 1.0, count, weights.shape[1])
    ranked.masked_fill_(place >= count[:, None], 0)
    weights.scatter_(1, order, ranked)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The ids `[C]` at `uniform` `[C]` float64 in [0, 1) of the cumulative distributions in order of id."""
    sums = _block_sums(weights)
    total = sums.sum(1)
    target = torch.minimum((uniform * total.double()).long(), total - 1)
    return _first_above(weights, sums, target)


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of each `_BLOCK` neighbours `[C, blocks]`; the last block may be shorter."""
    num_whole = weights.shape[1] // _BLOCK
    whole = weights[:, : num_whole * _BLOCK].view(len(weights), num_whole, _BLOCK).sum(2)
    if num_whole * _BLOCK == weights.shape[1]:
        return whole
    return torch.cat([whole, weights[:, num_whole * _BLOCK :].sum(1, keepdim=True)], 1)


def _first_above(weights: Tensor, sums: Tensor, target: Tensor) -> Tensor:
    """The first places `[C]` whose cumulative weight is above `target` `[C]`, which must be below the row's total.

    Rows that hold anything else (a NaN became a weight) give some place of the row.
    """
    last = weights.shape[1] - 1
    cumulative = sums.cumsum(1)
    block = (cumulative <= target[:, None]).sum(1, keepdim=True).clamp_(max=sums.shape[1] - 1)  # [C, 1]
    before = cumulative.gather(1, block) - sums.gather(1, block)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # [C, _BLOCK]
    # Places past the end repeat the last one: they are behind it, so never the first above.
    within = weights.gather(1, places.clamp_(max=last)).cumsum(1) + before
    offset = (within <= target[:, None]).sum(1, keepdim=True)
    return (block * _BLOCK + offset).clamp_(max=last).squeeze(1)
