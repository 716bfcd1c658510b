"""`pelton::fp8_linear`: a linear layer whose weight and activations are multiplied as 8-bit floats (e4m3).

Contract
--------
    x            [..., K]                float16, bfloat16 or float32, finite
    weight       [N, K]                  float8_e4m3fn
    weight_scale [1] or [N] float32      per tensor, or per output feature
    input_scale  [1] float32             static; None: one scale per row of x, its largest magnitude / 448
                                         (1 for a row of zeros)
    bias         [N]                     None: no bias

    q[m, k]   = x[m, k] / input_scale[m], in float32, cut to -448..448, rounded to the nearest e4m3 (ties to even)
    out[m, n] = bias[n] + input_scale[m] * weight_scale[n] * sum over k of q[m, k] * weight[n, k]     the dtype of x

Products and sums are at least float32 as the tensor cores have it: Hopper keeps fewer bits within 128 products, which
are then added in float32. A static scale saturates what is larger than 448 of it. e4m3: Micikevicius et al., "FP8
Formats for Deep Learning", arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NAME = "pelton::fp8_linear"
LARGEST = 448.0
_FIRST_ARCH = 89


@dataclass(frozen=True)
class Fp8Weight:
    """A weight `[N, K]` in float8_e4m3fn and its scale, `[1]` or `[N]` float32."""

    weight: Tensor
    scale: Tensor


def unsupported_reason(arch: int) -> str | None:
    """Why `fp8_linear` cannot run on compute capability `arch` (89 for 8.9), or None if it can."""
    if arch >= _FIRST_ARCH:
        return None
    return (
        f"FP8 needs tensor cores of compute capability 8.9 (Ada) or later; this target is {arch // 10}.{arch % 10}: "
        "use INT4 or the original weights there"
    )


@torch.library.custom_op(NAME, mutates_args=())
def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Plain PyTorch reference of the contract. Quantises in float32 whatever x is; sums float64 in float64."""
    precision = torch.promote_types(x.dtype, torch.float32)
    quantised, scale = quantize_activations(x, input_scale)
    out = quantised.to(precision) @ weight.to(precision).T
    out *= scale.to(precision) * weight_scale.to(precision)
    if bias is not None:
        out += bias.to(precision)
    return out.to(x.dtype)


@fp8_linear.register_fake
def _(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def quantize_activations(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """`[..., K]` -> (`[..., K]` float8_e4m3fn, scale `[..., 1]` float32, or `[1]` if it is given)."""
    values = x.float()
    scale = _scale_of(values.abs().amax(-1, keepdim=True)) if input_scale is None else input_scale
    return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def quantize_fp8(weight: Tensor, per_channel: bool) -> Fp8Weight:
    """Round `[N, K]` to e4m3 with one scale per output feature or one for all: the largest magnitude becomes 448."""
    values = weight.float()
    if not torch.isfinite(values).all():
        raise ValueError("the weight holds NaN or infinity")
    largest = values.abs().amax(1) if per_channel else values.abs().amax().view(1)
    scale = _scale_of(largest)
    return Fp8Weight((values / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale)


def _scale_of(largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 1.0, largest / LARGEST)
