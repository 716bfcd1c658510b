"""`pelton::moe_experts`: the routed experts of a mixture-of-experts layer, each a gated MLP.

Contract
--------
    x              [T, H]       float16, bfloat16 or float32
    router_weights [T, k]       float32
    expert_ids     [T, k] int32 0 <= id < E; a token may name an expert twice
    gate_up        stack of E weights [2I, H]: the gate's I rows, then those of the up projection
    down           stack of E weights [H, I]
    activation     one of ACTIVATIONS

    hidden[t, j] = activation(gate_up[e, :I] @ x[t]) * (gate_up[e, I:] @ x[t])      e = expert_ids[t, j]
    out[t]       = sum over j, in order, of router_weights[t, j] * (down[e] @ hidden[t, j])      [T, H], dtype of x

`hidden` and each expert's output are rounded to the dtype of x; the sums within a product and over j are float32
(float64 for float64 inputs). What a token gets does not depend on the tokens beside it.

Stacks
------
Both are in one form. G is the number of groups of `group_size` input features (32, 64, 128, or -1: all of them).

    form   a stack of E weights [N, K]       scales                            zeros
    float  [E, N, K], dtype of x             None                              None
    int4   [E, ceil(K / 32), N, 16] int8     [E, G, N] float16 to float32      [E, G, N] int8; None: all are 8
    fp8    [E, N, K] float8_e4m3fn           [E, N] float32                    None

A product with one expert's weight is what `pelton::int4_linear` or `pelton::fp8_linear` (scales per output feature)
computes with that weight, before it is rounded to the dtype of x: their modules say what the layouts and scales mean.
So fp8 rounds rows of x and of `hidden` to e4m3 too, each row with a scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .fp8_linear import quantize_activations, quantize_fp8
from .int4_linear import FEATURES_PER_BLOCK, GROUP_SIZES, Int4Weight, dequantize, num_groups, quantize_int4

NAME = "pelton::moe_experts"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
FLOAT, INT4, FP8 = "float", "int4", "fp8"


@dataclass(frozen=True)
class Stack:
    """The weights `[N, K]` of all experts; the fields are the operator's arguments."""

    weight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group_size: int = -1

    @property
    def form(self) -> str:
        """FLOAT, INT4 or FP8. Values of e4m3 may have been widened, as long as their scales are there."""
        if self.scales is None:
            return FLOAT
        return INT4 if self.weight.dtype == torch.int8 else FP8

    def of_expert(self, expert: int) -> Stack:
        """The same without the dimension of experts."""
        scales, zeros = (None if t is None else t[expert] for t in (self.scales, self.zeros))
        return Stack(self.weight[expert], scales, zeros, self.group_size)


@torch.library.custom_op(NAME, mutates_args=())
def moe_experts(
    x: Tensor,
    router_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    gate_up_zeros: Tensor | None = None,
    down_zeros: Tensor | None = None,
    group_size: int = -1,
) -> Tensor:
    """Plain PyTorch reference of the contract: one expert at a time. `ValueError` names what does not fit."""
    gates = Stack(gate_up, gate_up_scales, gate_up_zeros, group_size)
    downs = Stack(down, down_scales, down_zeros, group_size)
    check(x, router_weights, expert_ids, gates, downs, activation)
    precision = torch.promote_types(x.dtype, torch.float32)
    num_tokens, top_k = expert_ids.shape
    outputs = x.new_empty(num_tokens, top_k, x.shape[1])
    for expert in range(gate_up.shape[0]):
        tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
        gate, up = _product(x[tokens], gates.of_expert(expert)).chunk(2, -1)
        hidden = (_activate(gate, activation) * up).to(x.dtype)
        outputs[tokens, choices] = _product(hidden, downs.of_expert(expert)).to(x.dtype)
    weighted = outputs.to(precision) * router_weights.to(precision)[..., None]
    return weighted.sum(1).to(x.dtype)


@moe_experts.register_fake
def _(
    x: Tensor,
    router_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    gate_up_zeros: Tensor | None = None,
    down_zeros: Tensor | None = None,
    group_size: int = -1,
) -> Tensor:
    return torch.empty_like(x)


def check(
    x: Tensor, router_weights: Tensor, expert_ids: Tensor, gate_up: Stack, down: Stack, activation: str
) -> None:
    """Raise `ValueError` naming the argument that the contract does not allow. No value is read."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: one of {', '.join(ACTIVATIONS)}")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_ids: {list(expert_ids.shape)}, not [{x.shape[0]}, k]")
    _expect("router_weights", router_weights, *expert_ids.shape)
    if gate_up.form != down.form:
        raise ValueError(f"down: of form {down.form}, while gate_up is {gate_up.form}")
    if (gate_up.zeros is None) != (down.zeros is None):
        raise ValueError("gate_up_zeros and down_zeros: both or neither")
    hidden_size, intermediate_size = x.shape[1], gate_up.weight.shape[-2] // 2
    num_experts = gate_up.weight.shape[0]
    _check_stack("gate_up", gate_up, num_experts, 2 * intermediate_size, hidden_size)
    _check_stack("down", down, num_experts, hidden_size, intermediate_size)


def _check_stack(name: str, stack: Stack, num_experts: int, rows: int, columns: int) -> None:
    if stack.form != INT4:
        _expect(name, stack.weight, num_experts, rows, columns)
        if stack.scales is not None:
            _expect(f"{name}_scales", stack.scales, num_experts, rows)
        if stack.zeros is not None:
            raise ValueError(f"{name}_zeros: a stack of form {stack.form} has no zero points")
        return
    if stack.group_size not in GROUP_SIZES:
        raise ValueError(f"group_size {stack.group_size}: one of {GROUP_SIZES}")
    _expect(name, stack.weight, num_experts, -(-columns // FEATURES_PER_BLOCK), rows, FEATURES_PER_BLOCK // 2)
    groups = num_groups(columns, stack.group_size)
    for kind, tensor in (("scales", stack.scales), ("zeros", stack.zeros)):
        if tensor is not None:
            _expect(f"{name}_{kind}", tensor, num_experts, groups, rows)


def _expect(name: str, tensor: Tensor, *shape: int) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: {list(tensor.shape)}, not {list(shape)}")


def stack_int4(weights: Tensor, group_size: int, symmetric: bool) -> Stack:
    """`[E, N, K]` rounded by `quantize_int4`, expert by expert."""
    experts = [quantize_int4(weight, group_size, symmetric) for weight in weights]
    zeros = [expert.zeros for expert in experts if expert.zeros is not None]
    return Stack(
        torch.stack([expert.qweight for expert in experts]),
        torch.stack([expert.scales for expert in experts]),
        torch.stack(zeros) if zeros else None,
        group_size,
    )


def stack_fp8(weights: Tensor) -> Stack:
    """`[E, N, K]` rounded by `quantize_fp8`, expert by expert, with a scale per output feature."""
    experts = [quantize_fp8(weight, per_channel=True) for weight in weights]
    return Stack(torch.stack([e.weight for e in experts]), torch.stack([e.scale for e in experts]))


def _product(rows: Tensor, weight: Stack) -> Tensor:
    """`[M, K]` with the weight `[N, K]` of one expert: `[M, N]` in float32, or float64 for float64 rows."""
    precision = torch.promote_types(rows.dtype, torch.float32)
    if weight.scales is None:
        return rows.to(precision) @ weight.weight.to(precision).T
    if weight.form == INT4:
        stored = Int4Weight(weight.weight, weight.scales, weight.zeros, weight.group_size, rows.shape[1])
        return rows.to(precision) @ dequantize(stored, precision).T
    quantised, row_scales = quantize_activations(rows, None)
    product = quantised.to(precision) @ weight.weight.to(precision).T
    return product * row_scales.to(precision) * weight.scales.to(precision)


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    if activation == "gelu":
        return functional.gelu(gate)
    return functional.gelu(gate, approximate="tanh")
