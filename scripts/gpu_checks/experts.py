"""Cases of `moe_experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...plugins_trt import moe_experts as moe
from ...plugins_trt import moe_experts_tactics
from .call import Call, default_first
from .measure import name_of
from .roofline import Work, experts_work


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """The activation is SiLU. `num_tokens * top_k` is a multiple of the number of experts, or less."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def products(self) -> str:
        return name_of(self.dtype)

    @property
    def name(self) -> str:
        sizes = f"{self.num_tokens} tokens x {self.top_k} of {self.num_experts} experts"
        return f"moe_experts: {sizes}, {self.hidden_size} x {self.intermediate_size}, {name_of(self.dtype)}"

    @property
    def bound(self) -> float:
        """Rounded to the dtype are hidden activations, each expert's output, and the sum."""
        return 2 * torch.finfo(self.dtype).eps

    @property
    def num_busy_experts(self) -> int:
        return min(self.num_experts, self.num_tokens * self.top_k)

    def work(self) -> Work:
        return experts_work(
            self.num_tokens, self.top_k, self.num_busy_experts, self.hidden_size, self.intermediate_size,
            element_bytes=self.dtype.itemsize,
        )  # fmt: skip

    def tactics(self) -> list[Any]:
        problem = moe_experts_tactics.Problem(
            self.num_tokens,
            self.top_k,
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            self.dtype,
        )
        usable = [t for t in moe_experts_tactics.TACTICS if moe_experts_tactics.supports(t, problem)]
        return default_first(moe_experts_tactics.default_tactic(problem), usable)

    def prepare(self, device: torch.device) -> Call:
        from ...plugins_trt.moe_experts_triton import moe_experts

        random = torch.Generator(device).manual_seed(0)

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=random, device=device) * scale).to(self.dtype)

        e, h, i, busy = self.num_experts, self.hidden_size, self.intermediate_size, self.num_busy_experts
        x = randn(self.num_tokens, h)
        gate_up, down = randn(e, 2 * i, h, scale=h**-0.5), randn(e, h, i, scale=i**-0.5)
        router = torch.rand(self.num_tokens, self.top_k, generator=random, device=device)
        # Evenly spread in random order: as many rows for each expert as for any other.
        order = torch.randperm(self.num_tokens * self.top_k, generator=random, device=device)
        ids = (order % busy).to(torch.int32)
        by_expert = ids.argsort()  # routed rows
        spread = x[by_expert // self.top_k].view(busy, -1, h)
        arguments = router, ids.view(self.num_tokens, self.top_k), gate_up, down
        out = torch.empty_like(x)

        def batched() -> Tensor:
            gate, up = torch.bmm(spread, gate_up[:busy].transpose(1, 2)).chunk(2, -1)
            return torch.bmm(functional.silu(gate) * up, down[:busy].transpose(1, 2))

        def summed() -> Tensor:
            outputs = torch.empty(self.num_tokens * self.top_k, h, device=device)
            outputs[by_expert] = batched().flatten(0, 1).float()
            return (outputs.view(self.num_tokens, self.top_k, h) * router[..., None]).sum(1)

        return Call(
            out=out,
            compute=lambda tactic: moe_experts(x, *arguments, "silu", tactic=tactic, out=out),
            reference=lambda: moe.moe_experts(
                x.cpu().double(),
                router.cpu(),
                arguments[1].cpu(),
                gate_up.cpu().double(),
                down.cpu().double(),
                "silu",
            ),
            expected=summed,
            others={"cublas (batched, rows sorted by expert before)": batched},
        )
