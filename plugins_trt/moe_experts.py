"""`pelton::moe_experts`: the routed experts of a mixture-of-experts layer, each a gated MLP.

Contract
--------
    x              [T, H]       float16, bfloat16 or float32
    router_weights [T, k]       float32
    expert_ids     [T, k] int32 0 <= id < E; a token may name an expert twice
    gate_up        [E, 2I, H]   the gate's I rows, then those of the up projection; dtype of x
    down           [E, H, I]    dtype of x
    activation     one of ACTIVATIONS

    hidden[t, j] = activation(gate_up[e, :I] @ x[t]) * (gate_up[e, I:] @ x[t])      e = expert_ids[t, j]
    out[t]       = sum over j, in order, of router_weights[t, j] * (down[e] @ hidden[t, j])      [T, H], dtype of x

`hidden` and each expert's output are rounded to the dtype of x; the sums within a product and over j are float32
(float64 for float64 inputs). What a token gets does not depend on the tokens beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

NAME = "pelton::moe_experts"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@torch.library.custom_op(NAME, mutates_args=())
def moe_experts(
    x: Tensor, router_weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Plain PyTorch reference of the contract: one expert at a time."""
    precision = torch.promote_types(x.dtype, torch.float32)
    num_tokens, top_k = expert_ids.shape
    outputs = x.new_empty(num_tokens, top_k, x.shape[1])
    for expert in range(gate_up.shape[0]):
        tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
        rows = x[tokens].to(precision)
        gate, up = (rows @ gate_up[expert].to(precision).T).chunk(2, -1)
        hidden = (_activate(gate, activation) * up).to(x.dtype)
        outputs[tokens, choices] = (hidden.to(precision) @ down[expert].to(precision).T).to(x.dtype)
    weighted = outputs.to(precision) * router_weights.to(precision)[..., None]
    return weighted.sum(1).to(x.dtype)


@moe_experts.register_fake
def _(
    x: Tensor, router_weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    return torch.empty_like(x)


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    if activation == "gelu":
        return functional.gelu(gate)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    raise ValueError(f"activation {activation!r}: one of {', '.join(ACTIVATIONS)}")
