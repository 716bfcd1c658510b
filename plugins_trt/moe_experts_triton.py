"""`pelton::moe_experts` on NVIDIA GPUs, of Triton kernels; see `moe_experts.py` for the contract. The launches:

    group     count_rows_kernel, place_rows_kernel                      moe_experts_rows_triton.py
    products  gate_up_kernel, down_kernel; fp8: each after its rows     moe_experts_products_triton.py
              have been rounded; int4: kernels of their own             moe_experts_int4_triton.py
    out       sum_kernel: weighted sum over a token's k rows, in order  moe_experts_rows_triton.py

Nothing is read back to the host, so the launches can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .moe_experts import FP8, INT4, Stack, check
from .moe_experts_int4_triton import int4_products, int4_variants
from .moe_experts_products_triton import product_variants, products
from .moe_experts_rows_triton import group_rows, group_variants, sum_rows, sum_variant
from .moe_experts_tactics import TACTICS, Problem, Tactic, default_tactic, supports, workspace_layout
from .triton_compile import KernelVariant
from .workspace import carve


def moe_experts(
    x: Tensor,
    router_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Stack,
    down: Stack,
    activation: str,
    *,
    tactic: Tactic | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """The operator, on contiguous tensors of one device. `out`: `[T, H]` to write into.

    Pass a flat `workspace` (sized by `workspace_layout`) where allocating is not wanted.
    """
    check(x, router_weights, expert_ids, gate_up, down, activation)
    problem = problem_of(x, expert_ids, gate_up)
    if tactic is None:
        tactic = default_tactic(problem)
    elif not supports(tactic, problem):
        raise ValueError(f"{tactic} does not support {problem}")
    if out is None:
        out = torch.empty_like(x)
    if problem.num_tokens == 0:
        return out
    scratch = carve(workspace_layout(problem, tactic), workspace, x.device)
    group_rows(expert_ids, scratch["counts"], scratch["tile_expert"], scratch["tile_rows"])
    multiply = int4_products if problem.form == INT4 else products
    outputs = multiply(x, scratch, gate_up, down, top_k=problem.top_k, activation=activation, tactic=tactic)
    sum_rows(outputs, router_weights, out)
    return out


def problem_of(x: Tensor, expert_ids: Tensor, gate_up: Stack) -> Problem:
    """The problem that a call with these arguments is."""
    return Problem(
        num_tokens=expert_ids.shape[0],
        top_k=expert_ids.shape[1],
        num_experts=gate_up.weight.shape[0],
        hidden_size=x.shape[1],
        intermediate_size=gate_up.weight.shape[-2] // 2,
        dtype=x.dtype,
        form=gate_up.form,
        group_size=gate_up.group_size,
    )


def report_variants() -> Iterator[KernelVariant]:
    """Every tile of each form for bfloat16, the activations on the first."""
    yield from group_variants(128, TACTICS[0].block_m)
    for tactic in TACTICS:
        variants = (
            *product_variants(tactic, "bf16", top_k=8, activation="silu"),
            *product_variants(tactic, "bf16", form=FP8, top_k=8, activation="silu"),
            *int4_variants(tactic, "bf16", has_zeros=True, top_k=8, activation="silu"),
        )
        for variant in variants:
            yield replace(variant, is_quick=tactic is TACTICS[0])
    for activation in ("gelu", "gelu_tanh"):
        yield product_variants(TACTICS[0], "fp16", top_k=2, activation=activation)[0]
    yield from int4_variants(TACTICS[0], "fp16", has_zeros=False, top_k=2, activation="silu")
    yield sum_variant("bf16", top_k=8)
