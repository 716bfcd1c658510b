"""Routed experts in fewer bits: what `quantize.py` does for linear layers, for stacks of experts' weights."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import BuildError
from ..plugins_trt.moe_experts import Stack, stack_fp8, stack_int4
from .experts import QuantizedExperts, activation_of, experts_of
from .quantize import Quantization


def quantize_experts(model: nn.Module, layers_prefix: str, quantization: Quantization) -> int:
    """Replace the routed experts under `layers_prefix` in place, one module after the other; returns how many modules.

    Routers stay as they are. Raises `BuildError` naming a module whose experts cannot be quantised.
    """
    names = {
        name: module for name, module in experts_of(model).items() if name.startswith(f"{layers_prefix}.")
    }
    for name, module in names.items():
        activation = activation_of(name, module)
        try:
            gate_up, down = (
                _quantized(module.get_parameter(f"{kind}_proj"), quantization) for kind in ("gate_up", "down")
            )
        except ValueError as error:
            raise BuildError(f"{name}: {error}") from error
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, QuantizedExperts(gate_up, down, activation))
    _refuse_others(model, layers_prefix)
    return len(names)


def _quantized(weights: Tensor, quantization: Quantization) -> Stack:
    weights = weights.detach()
    if quantization.scheme == "int4":
        return stack_int4(weights, quantization.group_size, quantization.symmetric)
    return stack_fp8(weights)


def _refuse_others(model: nn.Module, layers_prefix: str) -> None:
    """Weights that are neither in linear layers nor in known experts would silently stay as large as they are."""
    for name, parameter in model.named_parameters():
        if name.startswith(f"{layers_prefix}.") and parameter.ndim > 2:
            raise BuildError(
                f"quantize: {name} is a stack of weights of a form that is not supported; build without --quantize"
            )
