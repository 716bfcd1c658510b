"""Weights in fewer bits, by rounding to the nearest: linear layers of the decoder become Pelton's quantised operators.

The head and the embedding stay as they are. Layers are replaced before the model is exported, so the graph holds the
operators and the proof runs their PyTorch references.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import BuildError
from ..plugins_trt.fp8_linear import fp8_linear, quantize_fp8
from ..plugins_trt.int4_linear import int4_linear, quantize_int4

SCHEMES = ("int4", "fp8")


@dataclass(frozen=True, slots=True)
class Quantization:
    """`group_size` (input features that share a scale) and `symmetric` are for int4."""

    scheme: str
    group_size: int = 128
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise BuildError(f"quantize: {self.scheme!r} is unknown; choose one of {', '.join(SCHEMES)}")


class Int4Linear(nn.Module):
    """A linear layer on `pelton::int4_linear`."""

    def __init__(self, linear: nn.Linear, group_size: int, symmetric: bool) -> None:
        super().__init__()
        weight = quantize_int4(linear.weight.detach(), group_size, symmetric)
        self.group_size = group_size
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = int4_linear(x, self.qweight, self.scales, self.zeros, self.group_size)
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
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(f"{layers_prefix}.")
    ]
    for name in names:
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = parent.get_submodule(leaf)
        assert isinstance(linear, nn.Linear)
        try:
            setattr(parent, leaf, _quantized(linear, quantization))
        except ValueError as error:
            raise BuildError(f"{name}: {error}") from error
    if not names:
        raise BuildError(
            f"quantize: {type(model).__name__} has no linear layers under {layers_prefix}; build it without --quantize"
        )
    return len(names)


def _quantized(linear: nn.Linear, quantization: Quantization) -> nn.Module:
    if quantization.scheme == "int4":
        return Int4Linear(linear, quantization.group_size, quantization.symmetric)
    return Fp8Linear(linear)
