"""Routed experts of mixture-of-experts layers, swapped through transformers' experts interface.

transformers calls `experts(module, hidden_states, top_k_index, top_k_weights)` for every class that it marks with
`use_experts_implementation`; which function that is, the model's config names. Pelton's calls
`pelton::moe_experts`. Experts of other classes have a code of their own, which is exported as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..errors import BuildError
from ..plugins_trt.moe_experts import Stack, moe_experts

MOE_EXPERTS = torch.ops.pelton.moe_experts.default
# Names of implementations. transformers' own one gathers the weights of every row's experts and multiplies in batches.
PELTON, BATCHED = "pelton", "batched_mm"

# What the operator's activations are called in configs.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
# Set by `use_experts_implementation` on every instance: (attribute, what the operator needs it to be, what it is else).
_LAYOUT = (
    ("has_gate", True, "without a gate"),
    ("has_bias", False, "with biases"),
    ("has_post_expert_norm", False, "with a norm after each expert"),
    ("is_transposed", False, "with transposed weights"),
    ("is_concatenated", True, "with the rows of gate and up interleaved"),
    ("_is_expert_parallel", False, "spread over several processes"),
)


class QuantizedExperts(nn.Module):
    """Experts with quantised stacks, in the place of a module of `experts_of`."""

    def __init__(self, gate_up: Stack, down: Stack, activation: str) -> None:
        super().__init__()
        self.activation, self.group_size = activation, gate_up.group_size
        for name, stack in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(name, stack.weight)
            self.register_buffer(f"{name}_scales", stack.scales)
            self.register_buffer(f"{name}_zeros", stack.zeros)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return moe_experts(  # type: ignore[no-any-return]
            hidden_states, top_k_weights.float(), top_k_index.int(), self.gate_up, self.down, self.activation,
            self.gate_up_scales, self.down_scales, self.gate_up_zeros, self.down_zeros, self.group_size,
        )  # fmt: skip


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that call the experts interface, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}


def activation_of(name: str, experts: nn.Module) -> str:
    """The activation of a module of `experts_of`, as `pelton::moe_experts` calls it.

    Raises `BuildError` with the reason if the operator does not express what the module computes.
    """
    reasons = [text for attribute, wanted, text in _LAYOUT if getattr(experts, attribute) is not wanted]
    gate: Any = type(experts)._apply_gate  # type: ignore[attr-defined]  # transformers' own unless the class has one
    function = type(getattr(experts, "act_fn", None))
    known = {type(ACT2FN[key]): activation for key, activation in _ACTIVATIONS.items()}
    if gate.__module__ != type(ALL_EXPERTS_FUNCTIONS).__module__:
        reasons.append("with a gate of their own")
    elif function not in known:
        reasons.append(f"with {function.__name__} for an activation")
    if reasons:
        raise BuildError(
            f"{name}: {type(experts).__name__} are experts {', '.join(reasons)}, which pelton::moe_experts does not "
            "compute: this family is not supported on this target"
        )
    return known[function]


def use_experts(model: nn.Module, implementation: str) -> None:
    """Let the experts of `model` run `implementation`: PELTON, or a name that transformers knows.

    Raises `BuildError` naming the module whose experts PELTON cannot run.
    """
    if implementation == PELTON:
        for name, module in experts_of(model).items():
            activation_of(name, module)
        ALL_EXPERTS_FUNCTIONS.register(PELTON, _forward)
    model.set_experts_implementation(implementation)  # type: ignore[operator]


def check_experts(model: nn.Module, graph: Graph) -> None:
    """Raise `BuildError` unless `graph`, exported with PELTON, has one operator for each module of experts."""
    quantised = sum(isinstance(module, QuantizedExperts) for module in model.modules())
    expected, found = len(experts_of(model)) + quantised, count_experts(graph)
    if found != expected:
        raise BuildError(
            f"{type(model).__name__}: {found} of {expected} modules of experts call the experts interface, so this "
            "family cannot be exported"
        )


def count_experts(graph: Graph) -> int:
    """How many `pelton::moe_experts` an exported graph holds."""
    return len(graph.find_nodes(op="call_function", target=MOE_EXPERTS))


def _forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of its own experts: `[T, H]`, `[T, k]`, `[T, k]` of any float dtype."""
    return moe_experts(  # type: ignore[no-any-return]
        hidden_states, top_k_weights.float(), top_k_index.int(), module.gate_up_proj, module.down_proj,
        activation_of("experts", module),
    )  # fmt: skip
