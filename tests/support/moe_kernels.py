"""What the tests of `moe_experts` run in the interpreter's process."""

from __future__ import annotations

import torch
from torch import Tensor

from pelton.plugins_trt.moe_experts import ACTIVATIONS, moe_experts
from pelton.plugins_trt.moe_experts_tactics import Problem, Tactic

from .kernel_cases import Poisoned, guarded, integer


def moe_errors(tactic: Tactic | None, dtype: torch.dtype, seed: int, count: int) -> list[tuple[str, float]]:
    """(case, error) of `count` random calls with `tactic`, or with the default one if it is None."""
    from pelton.plugins_trt import moe_experts_triton as kernels

    random = torch.Generator().manual_seed(seed)
    errors = []
    for number in range(count):
        num_tokens, top_k, num_experts = (integer(random, 1, most) for most in (24, 4, 6))
        hidden_size, intermediate_size = integer(random, 1, 90), integer(random, 1, 90)
        activation = ACTIVATIONS[number % len(ACTIVATIONS)]
        x = torch.randn(num_tokens, hidden_size, generator=random).to(dtype)
        # Drawn from a part of the experts: others get no row.
        busy = integer(random, 1, num_experts)
        expert_ids = torch.randint(0, busy, (num_tokens, top_k), generator=random, dtype=torch.int32)
        weights = torch.rand(num_tokens, top_k, generator=random)
        gate_up = torch.randn(num_experts, 2 * intermediate_size, hidden_size, generator=random).to(dtype)
        down = torch.randn(num_experts, hidden_size, intermediate_size, generator=random).to(dtype)
        gate_up /= hidden_size**0.5
        out = Poisoned(num_tokens, hidden_size, dtype)
        kernels.moe_experts(
            guarded(x), guarded(weights), expert_ids, guarded(gate_up), guarded(down), activation,
            tactic=tactic, out=out.view,
        )  # fmt: skip
        wide = gate_up.double(), down.double(), activation
        expected = moe_experts(x.double(), weights, expert_ids, *wide)
        rounded, summed = _magnitudes(
            x.double(), weights.double(), expert_ids, gate_up.double(), down.double()
        )
        case = f"T {num_tokens} k {top_k} E {num_experts} H {hidden_size} I {intermediate_size} {activation}"
        # What is rounded on the way: `hidden` and each expert's output, by half a last place each.
        errors.append((case, out.error(expected, 2 * summed, torch.finfo(dtype).eps * rounded)))
    return errors


def _magnitudes(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """[T, H]: sums of the magnitudes of what is rounded to the dtype, and of all that is summed in float32.

    No activation exceeds its argument.
    """
    gate, up = gate_up[expert_ids].chunk(2, 2)  # [T, k, I, H]
    scaled = down[expert_ids].abs() * weights[..., None, None]  # [T, k, H, I]

    def outputs(gate: Tensor, up: Tensor, x: Tensor) -> Tensor:
        hidden = torch.einsum("tkih,th->tki", gate, x).abs() * torch.einsum("tkih,th->tki", up, x).abs()
        return torch.einsum("tkhi,tki->th", scaled, hidden)

    return outputs(gate, up, x), outputs(gate.abs(), up.abs(), x.abs())


def grouped(expert_ids: Tensor, num_experts: int, block_m: int) -> tuple[list[int], list[list[int]]]:
    """(tile_expert, tile_rows) of the kernels that group rows, in int32 buffers that held garbage."""
    from pelton.plugins_trt import moe_experts_triton as kernels

    problem = Problem(*expert_ids.shape, num_experts, 1, 1, torch.float32)
    tile_expert, tile_rows = kernels.group_rows(expert_ids, num_experts, block_m, problem.max_tiles(block_m))
    return tile_expert.tolist(), tile_rows.tolist()
