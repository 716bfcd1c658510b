"""Pelton's operators on CUDA tensors: their Triton launchers as kernels of the torch operators.

What is compiled ahead of time calls an operator by its name, and PyTorch's dispatcher finds the kernel for the device
of its tensors; on CPU tensors that stays the plain PyTorch reference. Triton is imported at the first call.
"""

from __future__ import annotations

from torch import Tensor

from . import fp8_linear, int4_linear, moe_experts


def register_kernels(device_type: str = "cuda") -> None:
    """Let the operators run their Triton kernels on tensors of `device_type`; may be called again."""
    int4_linear.int4_linear.register_kernel(device_type, _int4_linear)
    fp8_linear.fp8_linear.register_kernel(device_type, _fp8_linear)
    moe_experts.moe_experts.register_kernel(device_type, _moe_experts)


def _int4_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bias: Tensor | None = None,
    perm: Tensor | None = None,
) -> Tensor:
    from .int4_linear_triton import int4_linear as launch

    return launch(x, qweight, scales, zeros, group_size, bias, perm)


def _fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    from .fp8_linear_triton import fp8_linear as launch

    return launch(x, weight, weight_scale, input_scale, bias)


def _moe_experts(
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
    from .moe_experts_triton import moe_experts as launch

    return launch(
        x.contiguous(),
        router_weights.contiguous(),
        expert_ids.contiguous(),
        moe_experts.Stack(gate_up, gate_up_scales, gate_up_zeros, group_size),
        moe_experts.Stack(down, down_scales, down_zeros, group_size),
        activation,
    )
