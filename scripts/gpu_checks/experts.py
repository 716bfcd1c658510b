"""Cases of `moe_experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...plugins_trt import fp8_linear as fp8
from ...plugins_trt import int4_linear as int4
from ...plugins_trt import moe_experts as moe
from ...plugins_trt import moe_experts_tactics
from .call import Call, default_first, on_cpu
from .measure import arch_of, name_of
from .roofline import Work, experts_work, int4_scale_bytes
from .units import Unavailable


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """The activation is SiLU. `num_tokens * top_k` is a multiple of the number of experts, or less.

    `form`: how the weights are stored (`moe_experts.py`), in int4 with zero points.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype = torch.bfloat16
    form: str = moe.FLOAT
    group_size: int = -1

    @property
    def products(self) -> str:
        return name_of(torch.float8_e4m3fn if self.form == moe.FP8 else self.dtype)

    @property
    def name(self) -> str:
        sizes = f"{self.num_tokens} tokens x {self.top_k} of {self.num_experts} experts"
        group = f" in groups of {self.group_size}" if self.form == moe.INT4 else ""
        form = "" if self.form == moe.FLOAT else f", {self.form}{group}"
        return f"moe_experts: {sizes}, {self.hidden_size} x {self.intermediate_size}, {name_of(self.dtype)}{form}"

    @property
    def bound(self) -> float:
        """Rounded to the dtype are hidden activations, each expert's output, and the sum.

        With fp8 a few hidden activations, between two numbers of e4m3, may fall to the other side.
        """
        return 2 * torch.finfo(self.dtype).eps + (2**-6 if self.form == moe.FP8 else 0)

    @property
    def num_busy_experts(self) -> int:
        return min(self.num_experts, self.num_tokens * self.top_k)

    def work(self) -> Work:
        h, i = self.hidden_size, self.intermediate_size
        bits, scales = 8 * self.dtype.itemsize, 0
        if self.form == moe.INT4:
            shapes = (2 * i, h), (h, i)
            bits, scales = 4, sum(int4_scale_bytes(*s, self.group_size, has_zeros=True) for s in shapes)
        elif self.form == moe.FP8:
            bits, scales = 8, 4 * (2 * i + h)
        return experts_work(
            self.num_tokens, self.top_k, self.num_busy_experts, h, i,
            weight_bits=bits, element_bytes=self.dtype.itemsize, scale_bytes=scales,
        )  # fmt: skip

    def tactics(self) -> list[Any]:
        problem = moe_experts_tactics.Problem(
            self.num_tokens, self.top_k, self.num_experts, self.hidden_size, self.intermediate_size,
            self.dtype, self.form, self.group_size,
        )  # fmt: skip
        usable = [t for t in moe_experts_tactics.TACTICS if moe_experts_tactics.supports(t, problem)]
        return default_first(moe_experts_tactics.default_tactic(problem), usable)

    def prepare(self, device: torch.device) -> Call:
        from ...plugins_trt.moe_experts_triton import moe_experts

        if self.form == moe.FP8 and device.type == "cuda":
            reason = fp8.unsupported_reason(arch_of(device))
            if reason is not None:
                raise Unavailable(reason)
        random = torch.Generator(device).manual_seed(0)
        h, i, busy = self.hidden_size, self.intermediate_size, self.num_busy_experts
        x = torch.randn(self.num_tokens, h, generator=random, device=device).to(self.dtype)
        gate_up, down = (self._stack(random, device, rows, columns) for rows, columns in ((2 * i, h), (h, i)))
        router = torch.rand(self.num_tokens, self.top_k, generator=random, device=device)
        # Evenly spread in random order: as many rows for each expert as for any other.
        order = torch.randperm(self.num_tokens * self.top_k, generator=random, device=device)
        ids = (order % busy).to(torch.int32).view(self.num_tokens, self.top_k)
        by_expert = ids.flatten().argsort()  # routed rows
        spread = x[by_expert // self.top_k].view(busy, -1, h)
        wide = [_numbers(stack, size, busy).to(self.dtype) for stack, size in ((gate_up, h), (down, i))]
        out = torch.empty_like(x)

        def summed() -> Tensor:
            outputs = torch.empty(self.num_tokens * self.top_k, h, device=device)
            parts = [_by_expert(spread[e], gate_up.of_expert(e), down.of_expert(e)) for e in range(busy)]
            outputs[by_expert] = torch.cat(parts).float()
            return (outputs.view(self.num_tokens, self.top_k, h) * router[..., None]).sum(1)

        def batched() -> Tensor:
            """[busy, R, H] x [busy, 2I, H] and [busy, H, I] -> [busy, R, H]"""
            gate, up = torch.bmm(spread, wide[0].transpose(1, 2)).chunk(2, -1)
            return torch.bmm(functional.silu(gate) * up, wide[1].transpose(1, 2))

        return Call(
            out=out,
            compute=lambda tactic: moe_experts(x, router, ids, gate_up, down, "silu", tactic=tactic, out=out),
            reference=lambda: _reference(x, router, ids, gate_up, down),
            expected=summed,
            others={f"cublas ({name_of(self.dtype)}, batched, rows sorted by expert before)": batched},
        )

    def _stack(self, random: torch.Generator, device: torch.device, rows: int, columns: int) -> moe.Stack:
        """Of weights `[E, rows, columns]` that keep the size of what they are multiplied with."""
        weights = (
            torch.randn(self.num_experts, rows, columns, generator=random, device=device) * columns**-0.5
        )
        if self.form == moe.INT4:
            return moe.stack_int4(weights, self.group_size, symmetric=False)
        return moe.stack_fp8(weights) if self.form == moe.FP8 else moe.Stack(weights.to(self.dtype))


def _reference(x: Tensor, router: Tensor, ids: Tensor, gate_up: moe.Stack, down: moe.Stack) -> Tensor:
    """The operator on the CPU, in float64; for fp8 in the dtype of x, to which hidden activations are rounded before
    they are rounded to e4m3: what lies between two of its numbers must fall to the same side."""
    weights = [stack.weight.cpu() for stack in (gate_up, down)]
    rows = x.cpu() if gate_up.form == moe.FP8 else x.cpu().double()
    if gate_up.form == moe.FLOAT:
        weights = [weight.double() for weight in weights]
    quantised = gate_up.scales, down.scales, gate_up.zeros, down.zeros, gate_up.group_size
    out: Tensor = moe.moe_experts(rows, router.cpu(), ids.cpu(), *weights, "silu", *on_cpu(quantised))
    return out


def _by_expert(rows: Tensor, gate_up: moe.Stack, down: moe.Stack) -> Tensor:
    """[R, H] rows of one expert -> [R, H], with products in float32."""
    rounded = _rounded_to_fp8 if gate_up.form == moe.FP8 else Tensor.float
    gate, up = (rounded(rows) @ _number(gate_up, rows.shape[1]).float().T).chunk(2, -1)
    hidden = (functional.silu(gate) * up).to(rows.dtype)
    return (rounded(hidden) @ _number(down, hidden.shape[1]).float().T).to(rows.dtype)


def _rounded_to_fp8(rows: Tensor) -> Tensor:
    """As the operator rounds activations, in float32."""
    quantised, scale = fp8.quantize_activations(rows, None)
    return quantised.float() * scale


def _numbers(stack: moe.Stack, in_features: int, num_experts: int) -> Tensor:
    """The first experts' weights [E, N, K]."""
    return torch.stack([_number(stack.of_expert(e), in_features) for e in range(num_experts)])


def _number(weight: moe.Stack, in_features: int) -> Tensor:
    """[N, K] of one expert."""
    if weight.scales is None:
        return weight.weight
    if weight.form == moe.FP8:
        return weight.weight.float() * weight.scales[:, None]
    return int4.dequantize(
        int4.Int4Weight(weight.weight, weight.scales, weight.zeros, weight.group_size, in_features)
    )
