"""What the tests of `moe_experts` run in the interpreter's process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from pelton.plugins_trt.fp8_linear import LARGEST
from pelton.plugins_trt.int4_linear import GROUP_SIZES, Int4Weight, dequantize
from pelton.plugins_trt.moe_experts import (
    ACTIVATIONS,
    FLOAT,
    FP8,
    INT4,
    Stack,
    moe_experts,
    stack_fp8,
    stack_int4,
)
from pelton.plugins_trt.moe_experts_tactics import Problem, Tactic

from .kernel_cases import Poisoned, guarded, integer

_FLOAT32_SUM = 16 * 2**-24  # as in `Poisoned.error`


@dataclass(frozen=True)
class Case:
    """One random call of the operator."""

    x: Tensor
    router_weights: Tensor
    expert_ids: Tensor
    gate_up: Stack
    down: Stack
    activation: str

    def __str__(self) -> str:
        (num_tokens, hidden_size), top_k = self.x.shape, self.expert_ids.shape[1]
        experts, size = self.gate_up.weight.shape[0], self.gate_up.weight.shape[-2] // 2
        sizes = f"T {num_tokens} k {top_k} E {experts} H {hidden_size} I {size}"
        return f"{sizes} {self.activation} {self.gate_up.form} group {self.gate_up.group_size}"

    def reference(self, dtype: torch.dtype) -> Tensor:
        """Of the operator, on x in `dtype`."""
        gate_up, down = (
            replace(stack, weight=stack.weight.to(dtype)) if stack.form == FLOAT else stack
            for stack in (self.gate_up, self.down)
        )
        return moe_experts(
            self.x.to(dtype), self.router_weights, self.expert_ids, gate_up.weight, down.weight, self.activation,
            gate_up.scales, down.scales, gate_up.zeros, down.zeros, gate_up.group_size,
        )  # fmt: skip

    def run(self, tactic: Tactic | None, out: Tensor | None = None) -> Tensor:
        """The kernels, on inputs with NaN around them in memory."""
        from pelton.plugins_trt import moe_experts_triton as kernels

        gate_up, down = (_guarded_stack(stack) for stack in (self.gate_up, self.down))
        return kernels.moe_experts(
            guarded(self.x), guarded(self.router_weights), self.expert_ids, gate_up, down, self.activation,
            tactic=tactic, out=out,
        )  # fmt: skip


def _guarded_stack(stack: Stack) -> Stack:
    weight = (
        guarded(stack.weight) if stack.weight.is_floating_point() and stack.form == FLOAT else stack.weight
    )
    return replace(stack, weight=weight, scales=None if stack.scales is None else guarded(stack.scales))


def random_case(
    random: torch.Generator, form: str, dtype: torch.dtype, number: int, tactic: Tactic | None = None
) -> Case:
    """Ragged sizes; the experts are drawn from a part of them, so that others get no row."""
    num_tokens, top_k, num_experts = (integer(random, 1, most) for most in (24, 4, 6))
    hidden_size, intermediate_size = integer(random, 1, 90), integer(random, 1, 90)
    busy = integer(random, 1, num_experts)
    groups = [size for size in GROUP_SIZES if size == -1 or tactic is None or size % tactic.block_k == 0]
    group_size = groups[integer(random, 0, len(groups) - 1)]
    has_zeros = bool(integer(random, 0, 1))

    def stack(rows: int, columns: int) -> Stack:
        weights = torch.randn(num_experts, rows, columns, generator=random) / columns**0.5
        if form == INT4:
            return stack_int4(weights, group_size, symmetric=not has_zeros)
        return stack_fp8(weights) if form == FP8 else Stack(weights.to(dtype))

    return Case(
        x=torch.randn(num_tokens, hidden_size, generator=random).to(dtype),
        router_weights=torch.rand(num_tokens, top_k, generator=random),
        expert_ids=torch.randint(0, busy, (num_tokens, top_k), generator=random, dtype=torch.int32),
        gate_up=stack(2 * intermediate_size, hidden_size),
        down=stack(hidden_size, intermediate_size),
        activation=ACTIVATIONS[number % len(ACTIVATIONS)],
    )


def moe_errors(
    form: str, tactic: Tactic | None, dtype: torch.dtype, seed: int, count: int
) -> list[tuple[str, float]]:
    """(case, error) of `count` random calls with `tactic`, or with the default one if it is None."""
    random = torch.Generator().manual_seed(seed)
    errors = []
    for number in range(count):
        case = random_case(random, form, dtype, number, tactic)
        out = Poisoned(*case.x.shape, dtype)
        case.run(tactic, out.view)
        errors.append((str(case), out.error(case.reference(torch.float64), *_allowances(case, dtype))))
    return errors


def _allowances(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, H]: the sums of magnitudes in the last product and over j, and what rounding on the way may change.

    On the way `hidden` and each expert's output are rounded to the dtype, `hidden` being off by a float32 sum before;
    in fp8 it is rounded to e4m3 next, where a small difference can become a whole step.
    """
    is_fp8 = case.gate_up.form == FP8
    x = _to_e4m3(case.x.double()) if is_fp8 else case.x.double()
    ids, weights = case.expert_ids.long(), case.router_weights.double()
    gate_up, down = _dense(case.gate_up, x.shape[1]), _dense(case.down, case.gate_up.weight.shape[-2] // 2)
    gate, up = torch.einsum("tkih,th->tki", gate_up[ids], x).chunk(2, 2)
    gate_sum, up_sum = torch.einsum("tkih,th->tki", gate_up[ids].abs(), x.abs()).chunk(2, 2)
    act = {"silu": functional.silu, "gelu": functional.gelu}.get(
        case.activation, lambda gate: functional.gelu(gate, approximate="tanh")
    )
    hidden = act(gate) * up
    # No activation is steeper than 1.13, nor larger than its argument.
    shift = 2 * _FLOAT32_SUM * (gate_sum * up.abs() + gate.abs() * up_sum)
    shift = shift + torch.finfo(dtype).eps / 2 * hidden.abs()
    rounded = hidden
    if is_fp8:
        rounded = _to_e4m3(hidden)
        scale, error = _scale(hidden), shift.amax(-1, keepdim=True) / LARGEST
        scales = scale + error, (scale - error).clamp(min=1e-30)
        corners = [_e4m3((hidden + sign * shift) / s) * s for sign in (-1, 1) for s in scales]
        shift = torch.stack([(corner - rounded).abs() for corner in corners]).amax(0)
    outputs = torch.einsum("tkhi,tki->tkh", down[ids], rounded)
    summed = torch.einsum("tkhi,tki->tkh", down[ids].abs(), rounded.abs())
    shifted = (
        torch.einsum("tkhi,tki->tkh", down[ids].abs(), shift) + torch.finfo(dtype).eps / 2 * outputs.abs()
    )
    return (weights[..., None] * summed).sum(1), (weights[..., None] * shifted).sum(1)


def _dense(stack: Stack, in_features: int) -> Tensor:
    """[E, N, K] float64."""
    if stack.scales is None:
        return stack.weight.double()
    if stack.form == FP8:
        return stack.weight.double() * stack.scales.double()[..., None]
    experts = (stack.of_expert(e) for e in range(stack.weight.shape[0]))
    weights = (Int4Weight(e.weight, e.scales, e.zeros, e.group_size, in_features) for e in experts)
    return torch.stack([dequantize(weight, torch.float64) for weight in weights])


def _scale(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest / LARGEST)


def _e4m3(values: Tensor) -> Tensor:
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).double()


def _to_e4m3(rows: Tensor) -> Tensor:
    """Rows as fp8 sees them, each with the scale of its largest magnitude."""
    return _e4m3(rows / _scale(rows)) * _scale(rows)


def plugin_error(form: str, seed: int) -> float:
    """Of a random float16 call through the plugin's inputs and fields, with the largest tile and the memory that the
    plugin asks for."""
    from pelton.plugins_trt.moe_experts_plugin import MOE_EXPERTS_PLUGIN, _fixed, run
    from pelton.plugins_trt.plugin import Described

    case = random_case(torch.Generator().manual_seed(seed), form, torch.float16, seed)
    gate_up, down = case.gate_up, case.down
    optional = (gate_up.scales, down.scales, gate_up.zeros, down.zeros)
    tensors = [case.x, case.router_weights, case.expert_ids, gate_up.weight, down.weight]
    tensors += [tensor for tensor in optional if tensor is not None]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    assert MOE_EXPERTS_PLUGIN.accepts(dtypes, ["float16"])
    fields = {"activation": ACTIVATIONS.index(case.activation), "group_size": gate_up.group_size}
    described = [Described(tuple(t.shape), dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
    out = Poisoned(*case.x.shape, torch.float16)
    tactic = MOE_EXPERTS_PLUGIN.tactics(described, fields)[-1]
    workspace = torch.empty(MOE_EXPERTS_PLUGIN.workspace(described, fields, tactic), dtype=torch.uint8)
    run(tensors, fields, _fixed(tactic), out.view, workspace)
    return out.error(case.reference(torch.float64), *_allowances(case, torch.float16))


def with_and_without_padding(form: str) -> tuple[Tensor, Tensor]:
    """The first rows' output beside rows of garbage (NaN, infinity), and alone."""
    case = random_case(torch.Generator().manual_seed(3), form, torch.float16, 0)
    padded = replace(case, x=case.x.clone())
    used = case.x.shape[0] // 2
    padded.x[used::2], padded.x[used + 1 :: 2] = float("nan"), float("inf")
    alone = replace(
        case, x=case.x[:used], router_weights=case.router_weights[:used], expert_ids=case.expert_ids[:used]
    )
    tactic = Tactic(16, 64, 32, 4, 3)
    return padded.run(tactic)[:used], alone.run(tactic)


def grouped(expert_ids: Tensor, num_experts: int, block_m: int) -> tuple[list[int], list[list[int]]]:
    """(tile_expert, tile_rows) of the kernels that group rows, in int32 buffers that held garbage."""
    from pelton.plugins_trt.moe_experts_rows_triton import group_rows

    max_tiles = Problem(*expert_ids.shape, num_experts, 1, 1, torch.float32).max_tiles(block_m)
    counts, tile_expert = expert_ids.new_empty(num_experts), expert_ids.new_empty(max_tiles)
    tile_rows = expert_ids.new_empty(max_tiles, block_m)
    group_rows(expert_ids, counts, tile_expert, tile_rows)
    return tile_expert.tolist(), tile_rows.tolist()
