"""`pelton::int4_linear`: a linear layer whose weight is stored in 4 bits, one scale per group of input features.

Contract
--------
    x          [..., K]                 float16, bfloat16 or float32
    qweight    [ceil(K / 32), N, 16]    int8, two weights per byte (below)
    scales     [G, N]                   float16, bfloat16 or float32
    zeros      [G, N] int8, 0..15       zero points; None: symmetric, the zero point is 8
    group_size 32, 64, 128              input features that share a scale; G = ceil(K / group_size), or
               -1                       all of them; G = 1
    bias       [N]                      None: no bias
    perm       [K] int32                None: stored column k belongs to input feature k; else to perm[k]

    w[n, k] = (q[n, k] - zero[k // group_size, n]) * scale[k // group_size, n]
    out[..., n] = bias[n] + sum over k of x[..., perm[k]] * w[n, k]        [..., N], the dtype of x

The weight is not rounded to the dtype of x: `q - zero` is exact in all of them, and the scale is applied to the
float32 sum over a tile of its group. `perm` carries GPTQ's act-order: features are stored in the order in which they
were quantised, so that a group is a contiguous run, and x is read through the permutation.

Layout
------
AWQ, GPTQ and weights quantised here are all brought into this form when an engine is built.

                 32 input features b * 32 + ...            next block: b + 1
              byte 0       byte 1             byte 15
            +------------+------------+     +------------+
    n = 0   |  16  |   0 |  17  |   1 | ... |  31  |  15 |    high nibble: feature 16 + byte
            +------------+------------+     +------------+     low nibble: feature      byte
    n = 1   |  16  |   0 |  17  |   1 | ... |  31  |  15 |
            +------------+------------+     +------------+
            :                                            :
            N rows of 16 bytes, then the next 32 features

- A row of a block is one 16-byte load, and the rows of a tile of output features lie end to end: reads are coalesced
  whatever the size of the tile, and each weight is read once.
- The low nibbles of a tile, as they lie, are one operand of a matrix product and the high nibbles another one, each
  against 16-feature runs of x: nothing is interleaved or shuffled in registers.
- No group is smaller than a block, so both nibbles of a byte have the same scale.
- Features past K (K need not be a multiple of 32) hold zeros and meet zeros.

int8 and not uint8, because TensorRT's parser widens uint8 initialisers to int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NAME = "pelton::int4_linear"
FEATURES_PER_BLOCK = 32
GROUP_SIZES = (32, 64, 128, -1)
SYMMETRIC_ZERO = 8
_LARGEST = 15
_HALF = FEATURES_PER_BLOCK // 2


@dataclass(frozen=True)
class Int4Weight:
    """A weight `[N, K]` in the layout of this module; the fields are the operator's arguments."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    in_features: int
    perm: Tensor | None = None


@torch.library.custom_op(NAME, mutates_args=())
def int4_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bias: Tensor | None = None,
    perm: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch reference of the contract: dequantise, permute, multiply."""
    precision = torch.promote_types(x.dtype, torch.float32)
    stored = Int4Weight(qweight, scales, zeros, group_size, x.shape[-1])
    weight = dequantize(stored, precision)  # [N, K], columns as stored
    rows = (x if perm is None else x[..., perm.long()]).to(precision)
    out = rows @ weight.T
    if bias is not None:
        out += bias.to(precision)
    return out.to(x.dtype)


@int4_linear.register_fake
def _(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bias: Tensor | None = None,
    perm: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], qweight.shape[1])


def num_groups(in_features: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-in_features // group_size)


def pack_int4(values: Tensor) -> Tensor:
    """Integers 0..15 `[N, K]`, in stored order -> `[ceil(K / 32), N, 16]` int8."""
    out_features, in_features = values.shape
    padding = -in_features % FEATURES_PER_BLOCK
    nibbles = torch.nn.functional.pad(values.to(torch.uint8), (0, padding))
    low, high = nibbles.view(out_features, -1, 2, _HALF).unbind(2)  # [N, blocks, 16]
    return (low | high << 4).transpose(0, 1).contiguous().view(torch.int8)


def unpack_int4(qweight: Tensor, in_features: int) -> Tensor:
    """Inverse of `pack_int4`: `[N, K]` uint8."""
    packed = qweight.view(torch.uint8).transpose(0, 1)  # [N, blocks, 16]
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1)[:, :in_features]


def dequantize(weight: Int4Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight `[N, K]` that `weight` stands for, its columns in the order of the input features."""
    values = unpack_int4(weight.qweight, weight.in_features).to(dtype)
    zeros = SYMMETRIC_ZERO if weight.zeros is None else _per_feature(weight.zeros, weight)
    stored = (values - zeros) * _per_feature(weight.scales, weight).to(dtype)
    if weight.perm is None:
        return stored
    ordered = torch.empty_like(stored)
    ordered[:, weight.perm.long()] = stored
    return ordered


def _per_feature(per_group: Tensor, weight: Int4Weight) -> Tensor:
    """`[G, N]` -> `[N, K]`."""
    repeats = weight.in_features if weight.group_size == -1 else weight.group_size
    return per_group.T.repeat_interleave(repeats, dim=1)[:, : weight.in_features]


def quantize_int4(weight: Tensor, group_size: int, symmetric: bool) -> Int4Weight:
    """Round `[N, K]` to the nearest of 16 levels between the extremes of each group.

    Levels are -7..7 times the scale if `symmetric`; else 16 of them from the minimum to the maximum, 0 always among
    them. Scales are float16, as in AWQ and GPTQ checkpoints, and rounded before the weights are.
    """
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size {group_size}: one of {GROUP_SIZES}")
    out_features, in_features = weight.shape
    width = in_features if group_size == -1 else group_size
    padded = torch.nn.functional.pad(weight.float(), (0, -in_features % width))
    groups = padded.view(out_features, -1, width)  # [N, G, width]
    if symmetric:
        scales = _float16_scales(groups.abs().amax(2) / (_LARGEST // 2))
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = _float16_scales((high - low) / _LARGEST)
        zeros = (-low / scales).round().clamp(0, _LARGEST)
    values = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, _LARGEST)
    return Int4Weight(
        qweight=pack_int4(values.flatten(1)[:, :in_features]),
        scales=scales.T.contiguous().half(),
        zeros=None if symmetric else zeros.T.contiguous().to(torch.int8),
        group_size=group_size,
        in_features=in_features,
    )


def _float16_scales(scales: Tensor) -> Tensor:
    """`scales` as float16 will hold them; 1 for a group without extent, whose weights are all zero."""
    rounded = scales.half().float()
    if not torch.isfinite(rounded).all():
        raise ValueError("the weight holds NaN, infinity or values too large for float16 scales")
    return torch.where(rounded == 0, 1.0, rounded)
