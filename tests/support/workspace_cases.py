"""What the tests of the operators' scratch memory run in the interpreter's process: one call twice, without and with a
workspace of exactly the bytes that its operator asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pelton.plugins_trt import fp8_linear_tactics, int4_linear_tactics, moe_experts_tactics
from pelton.plugins_trt.fp8_linear import quantize_fp8
from pelton.plugins_trt.int4_linear import quantize_int4
from pelton.plugins_trt.linear_tactics import Tactic

from .moe_kernels import random_case

_POISON = 0xFF  # of every byte: NaN, or -1
_GUARD = 256


def same_bits(run: Callable[[Tensor | None], Tensor], num_bytes: int) -> bool:
    """Whether `run` returns the same bits with a workspace of `num_bytes` as without one, writes into it but not around
    it, and refuses one that is smaller."""
    memory = torch.full((num_bytes + 2 * _GUARD,), _POISON, dtype=torch.uint8)
    block = memory[_GUARD:-_GUARD]
    expected, actual = run(None), run(block)
    around = torch.cat((memory[:_GUARD], memory[-_GUARD:]))
    assert (around == _POISON).all(), "written outside of the workspace"
    assert (block != _POISON).any(), "the workspace was not used"
    with pytest.raises(ValueError, match=f"{num_bytes} are needed"):
        run(block[:-_GUARD])
    return torch.equal(expected, actual)


def int4_case(rows: int, tactic: Tactic) -> bool:
    """With a stored order of the input features."""
    from pelton.plugins_trt.int4_linear_triton import int4_linear

    random = torch.Generator().manual_seed(rows)
    layer = quantize_int4(torch.randn(70, 600, generator=random), -1, symmetric=False)
    x = torch.randn(rows, 600, generator=random).half()
    perm = torch.randperm(600, generator=random).to(torch.int32)
    problem = int4_linear_tactics.Problem(rows, 70, 600, -1, x.dtype)
    return same_bits(
        lambda block: int4_linear(
            x, layer.qweight, layer.scales, layer.zeros, -1, perm=perm, tactic=tactic, workspace=block
        ),
        int4_linear_tactics.workspace_bytes(problem, tactic, has_perm=True),
    )


def fp8_case(rows: int, tactic: Tactic, is_static: bool) -> bool:
    from pelton.plugins_trt.fp8_linear_triton import fp8_linear

    random = torch.Generator().manual_seed(rows)
    weight = quantize_fp8(torch.randn(70, 600, generator=random), per_channel=True)
    x = torch.randn(rows, 600, generator=random).half()
    input_scale = torch.tensor([0.01]) if is_static else None
    problem = fp8_linear_tactics.Problem(rows, 70, 600)
    return same_bits(
        lambda block: fp8_linear(x, weight.weight, weight.scale, input_scale, tactic=tactic, workspace=block),
        fp8_linear_tactics.workspace_bytes(problem, tactic, is_static=is_static),
    )


def moe_case(form: str, tactic: moe_experts_tactics.Tactic) -> bool:
    from pelton.plugins_trt.moe_experts_triton import moe_experts, problem_of

    case = random_case(torch.Generator().manual_seed(5), form, torch.float16, 0, tactic)
    problem = problem_of(case.x, case.expert_ids, case.gate_up)
    return same_bits(
        lambda block: moe_experts(
            case.x, case.router_weights, case.expert_ids, case.gate_up, case.down, case.activation,
            tactic=tactic, workspace=block,
        ),
        moe_experts_tactics.workspace_bytes(problem, tactic),
    )  # fmt: skip
