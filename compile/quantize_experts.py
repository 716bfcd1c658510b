"""Routed experts in fewer bits: what `quantize.py` does for linear layers, for stacks of experts' weights."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import BuildError
from ..plugins_trt.moe_experts import Stack, stack_fp8, stack_int4
from .experts import QuantizedExperts, activation_of, experts_of
from .quantize import Quantization, matrix_bytes

_STACKS = ("gate_up_proj", "down_proj")


def quantize_experts(model: nn.Module, layers_prefix: str, quantization: Quantization) -> int:
    """Replace the routed experts under `layers_prefix` in place, one module after the other; returns how many modules.

    Routers stay as they are. Raises `BuildError` naming a module whose experts cannot be quantised.
    """
    experts = _decoder_experts(model, layers_prefix)
    for name, module in experts.items():
        activation = activation_of(name, module)
        try:
            gate_up, down = (_quantized(module.get_parameter(stack), quantization) for stack in _STACKS)
        except ValueError as error:
            raise BuildError(f"{name}: {error}") from error
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, QuantizedExperts(gate_up, down, activation))
    _refuse_others(model, layers_prefix)
    return len(experts)


def expert_bytes(model: nn.Module, layers_prefix: str, quantization: Quantization) -> dict[str, int]:
    """What each stack that `quantize_experts` would replace takes then, by name; `model` may be on `meta`."""
    return {
        f"{name}.{stack}": matrix_bytes(module.get_parameter(stack), quantization)
        for name, module in _decoder_experts(model, layers_prefix).items()
        for stack in _STACKS
    }


def _decoder_experts(model: nn.Module, layers_prefix: str) -> dict[str, nn.Module]:
    return {
        name: module for name, module in experts_of(model).items() if name.startswith(f"{layers_prefix}.")
    }


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
