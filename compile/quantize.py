"""Weights in fewer bits, by rounding to the nearest: linear layers of the decoder become Pelton's quantised operators.

The head and the embedding stay as they are. Layers are replaced before the model is exported, so the graph holds the
operators and the proof runs their PyTorch references.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BuildError
from ..plugins_trt.fp8_linear import fp8_linear, quantize_fp8
from ..plugins_trt.int4_linear import (
    FEATURES_PER_BLOCK,
    Int4Weight,
    int4_linear,
    num_groups,
    quantize_int4,
)

SCHEMES = ("int4", "fp8")
# What configs call the number of routed experts.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Quantization:
    """`group_size` (input features that share a scale) and `symmetric` are for int4."""

    scheme: str
    group_size: int = 128
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise BuildError(f"quantize: {self.scheme!r} is unknown; choose one of {', '.join(SCHEMES)}")

    def facts(self) -> dict[str, Any]:
        """How the weights were made, for the manifest and the content key."""
        return {"method": "rounding", **self._details()}

    def __str__(self) -> str:
        details = ", ".join(f"{name} {value}" for name, value in self._details().items())
        return f"the decoder's linear layers, rounded to the nearest{f' ({details})' if details else ''}"

    def _details(self) -> dict[str, Any]:
        if self.scheme != "int4":
            return {}
        return {"group_size": self.group_size, "symmetric": self.symmetric}


class Int4Linear(nn.Module):
    """A linear layer on `pelton::int4_linear`; features stored out of order (`perm`) are read in the operator."""

    def __init__(self, weight: Int4Weight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.group_size = weight.group_size
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("perm", weight.perm)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = int4_linear(x, self.qweight, self.scales, self.zeros, self.group_size, perm=self.perm)
        return out if self.bias is None else out + self.bias


class Fp8Linear(nn.Module):
    """A linear layer on `pelton::fp8_linear`: a scale per output feature, activations scaled row by row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = quantize_fp8(linear.weight.detach(), per_channel=True)
        self.register_buffer("weight", weight.weight)
        self.register_buffer("weight_scale", weight.scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = fp8_linear(x, self.weight, self.weight_scale, None)
        return out if self.bias is None else out + self.bias


def quantize_linears(model: nn.Module, layers_prefix: str, quantization: Quantization) -> int:
    """Replace the linear layers under `layers_prefix` in place, one after the other; returns how many.

    Raises `BuildError` naming a layer whose weight cannot be rounded, or if there is none to replace.
    """
    linears = decoder_linears(model, layers_prefix)
    for name in linears:
        try:
            model.set_submodule(name, _quantized(_linear(model, name), quantization), strict=True)
        except ValueError as error:
            raise BuildError(f"{name}: {error}") from error
    return len(linears)


def decoder_linears(model: nn.Module, layers_prefix: str) -> list[str]:
    """Names of the linear layers under `layers_prefix`; `BuildError` if there is none.

    Routers and gates, a logit for each expert or one for all, decide too much and weigh too little to be rounded.
    """
    config: Any = model.config
    gates = {1, *(getattr(config, name, None) for name in _EXPERT_COUNTS)}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(f"{layers_prefix}.")
        and module.out_features not in gates
    ]
    if not names:
        raise BuildError(
            f"quantize: {type(model).__name__} has no linear layers under {layers_prefix}; build it without --quantize"
        )
    return names


def linear_bytes(model: nn.Module, layers_prefix: str, quantization: Quantization) -> dict[str, int]:
    """What each weight that `quantize_linears` would replace takes then, by name; `model` may be on `meta`."""
    linears = decoder_linears(model, layers_prefix)
    return {f"{name}.weight": matrix_bytes(_linear(model, name).weight, quantization) for name in linears}


def matrix_bytes(weight: Tensor, quantization: Quantization) -> int:
    """Bytes of `weight` `[..., N, K]` once quantised; it may be on `meta`."""
    *stack, out_features, in_features = weight.shape
    if quantization.scheme == "int4":
        size = int4_bytes(
            out_features, in_features, quantization.group_size, has_zeros=not quantization.symmetric
        )
    else:
        size = out_features * (in_features + torch.float32.itemsize)
    return math.prod(stack) * size


def int4_bytes(
    out_features: int, in_features: int, group_size: int, *, has_zeros: bool, scale_bytes: int = 2
) -> int:
    """Of an `Int4Weight` without `perm`."""
    blocks = -(-in_features // FEATURES_PER_BLOCK)
    groups = num_groups(in_features, group_size)
    per_feature = blocks * FEATURES_PER_BLOCK // 2 + groups * (scale_bytes + has_zeros)
    return out_features * per_feature


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def _quantized(linear: nn.Linear, quantization: Quantization) -> nn.Module:
    if quantization.scheme == "int4":
        weight = quantize_int4(linear.weight.detach(), quantization.group_size, quantization.symmetric)
        return Int4Linear(weight, linear.bias)
    return Fp8Linear(linear)
