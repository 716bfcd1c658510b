"""`int4_linear`, `fp8_linear` and `moe_experts`: their Triton kernels against the references, and against the roofline
beside cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...plugins_trt import fp8_linear as fp8
from ...plugins_trt import fp8_linear_tactics, int4_linear_tactics, moe_experts_tactics
from ...plugins_trt import int4_linear as int4
from ...plugins_trt import moe_experts as moe
from .measure import Timer, arch_of, float8_product, name_of, row_error
from .records import Accuracy, Record, Timing
from .roofline import Work, experts_work, int4_scale_bytes, linear_work
from .units import Unavailable, Unit

F16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Call:
    """A case on a device: what is computed by whom."""

    out: Tensor
    compute: Callable[
        [Any], Tensor
    ]  # into `out` by Pelton's kernels, with a tactic or (None) the default one
    reference: Callable[[], Tensor]  # by the operator's reference in float64, on the CPU
    expected: Callable[[], Tensor]  # by torch on the device, for sizes that the reference takes long for
    others: dict[str, Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class Int4Case:
    rows: int
    out_features: int
    in_features: int
    group_size: int = 128
    has_zeros: bool = True
    has_bias: bool = False
    has_perm: bool = False
    dtype: torch.dtype = BF16

    @property
    def products(self) -> str:
        return name_of(self.dtype)

    @property
    def name(self) -> str:
        flags = [flag for flag in ("zeros", "bias", "perm") if getattr(self, f"has_{flag}")]
        sizes = f"{self.rows} x {self.in_features} -> {self.out_features}"
        return ", ".join([f"int4_linear: {sizes}, group {self.group_size}, {name_of(self.dtype)}", *flags])

    @property
    def bound(self) -> float:
        """The output is rounded to the dtype; products of 4 and 16 bits are exact, sums float32."""
        return torch.finfo(self.dtype).eps

    def work(self) -> Work:
        scales = int4_scale_bytes(
            self.out_features, self.in_features, self.group_size, has_zeros=self.has_zeros
        )
        return linear_work(
            self.rows, self.out_features, self.in_features,
            weight_bits=4, activation_bytes=self.dtype.itemsize, scale_bytes=scales,
        )  # fmt: skip

    def tactics(self) -> list[Any]:
        problem = int4_linear_tactics.Problem(
            self.rows, self.out_features, self.in_features, self.group_size, self.dtype
        )
        usable = [t for t in int4_linear_tactics.TACTICS if int4_linear_tactics.supports(t, problem)]
        return _default_first(int4_linear_tactics.default_tactic(problem), _worthwhile(usable, self.rows))

    def prepare(self, device: torch.device) -> Call:
        from ...plugins_trt.int4_linear_triton import int4_linear

        random = torch.Generator(device).manual_seed(0)
        weight = self._weight(random, device)
        x = torch.randn(self.rows, self.in_features, generator=random, device=device).to(self.dtype)
        bias = torch.randn(self.out_features, generator=random, device=device).to(self.dtype)
        parts = weight.qweight, weight.scales, weight.zeros, self.group_size
        options = bias if self.has_bias else None, weight.perm
        whole = cache(lambda: int4.dequantize(weight).to(self.dtype))  # [N, K]
        out = x.new_empty(self.rows, self.out_features)
        return Call(
            out=out,
            compute=lambda tactic: int4_linear(x, *parts, *options, tactic=tactic, out=out),
            reference=lambda: int4.int4_linear(x.cpu().double(), *_on_cpu(parts), *_on_cpu(options)),
            expected=lambda: x.float() @ int4.dequantize(weight).T + (bias.float() if self.has_bias else 0),
            others={f"cublas ({name_of(self.dtype)} weights)": lambda: x @ whole().T},
        )

    def _weight(self, random: torch.Generator, device: torch.device) -> int4.Int4Weight:
        n, k = self.out_features, self.in_features
        groups = int4.num_groups(k, self.group_size)
        blocks = -(-k // int4.FEATURES_PER_BLOCK)
        packed = torch.randint(-128, 128, (blocks, n, 16), generator=random, device=device, dtype=torch.int8)
        zeros = torch.randint(0, 16, (groups, n), generator=random, device=device, dtype=torch.int8)
        perm = torch.randperm(k, generator=random, device=device).to(torch.int32)
        return int4.Int4Weight(
            qweight=packed,
            scales=(torch.rand(groups, n, generator=random, device=device) * 0.02 + 0.001).half(),
            zeros=zeros if self.has_zeros else None,
            group_size=self.group_size,
            in_features=k,
            perm=perm if self.has_perm else None,
        )


@dataclass(frozen=True, slots=True)
class Fp8Case:
    rows: int
    out_features: int
    in_features: int
    is_static: bool = False
    per_channel: bool = True
    has_bias: bool = False
    dtype: torch.dtype = BF16

    @property
    def products(self) -> str:
        return name_of(torch.float8_e4m3fn)

    @property
    def name(self) -> str:
        parts = [f"fp8_linear: {self.rows} x {self.in_features} -> {self.out_features}"]
        parts += [
            "static" if self.is_static else "dynamic",
            "per channel" if self.per_channel else "per tensor",
        ]
        return ", ".join([*parts, name_of(self.dtype), *(["bias"] if self.has_bias else [])])

    @property
    def bound(self) -> float:
        """Rounding of the output, and what Hopper drops of sums within 128 products."""
        return torch.finfo(self.dtype).eps + 2**-8

    def work(self) -> Work:
        return linear_work(
            self.rows, self.out_features, self.in_features,
            weight_bits=8, activation_bytes=self.dtype.itemsize,
            scale_bytes=4 * (self.out_features if self.per_channel else 1),
        )  # fmt: skip

    def tactics(self) -> list[Any]:
        problem = fp8_linear_tactics.Problem(self.rows, self.out_features, self.in_features)
        usable = [t for t in fp8_linear_tactics.TACTICS if fp8_linear_tactics.supports(t, problem)]
        return _default_first(fp8_linear_tactics.default_tactic(problem), _worthwhile(usable, self.rows))

    def prepare(self, device: torch.device) -> Call:
        from ...plugins_trt.fp8_linear_triton import fp8_linear

        if device.type == "cuda":
            reason = fp8.unsupported_reason(arch_of(device))
            if reason is not None:
                raise Unavailable(reason)
        random = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.rows, self.in_features, generator=random, device=device).to(self.dtype)
        matrix = torch.randn(self.out_features, self.in_features, generator=random, device=device)
        weight = fp8.quantize_fp8(matrix, self.per_channel)
        bias = torch.randn(self.out_features, generator=random, device=device).to(self.dtype)
        scale = x.float().abs().amax().view(1) / fp8.LARGEST / 2  # some activations saturate
        arguments = (
            weight.weight,
            weight.scale,
            scale if self.is_static else None,
            bias if self.has_bias else None,
        )
        quantised = fp8.quantize_activations(x, None)[0]
        whole = matrix.to(self.dtype)
        out = x.new_empty(self.rows, self.out_features)
        return Call(
            out=out,
            compute=lambda tactic: fp8_linear(x, *arguments, tactic=tactic, out=out),
            reference=lambda: fp8.fp8_linear(x.cpu().double(), *_on_cpu(arguments)),
            expected=lambda: _dequantised_product(x, *arguments),
            others={
                "cublas (float8, activations quantised before)": float8_product(
                    quantised, weight.weight, self.dtype
                ),
                f"cublas ({name_of(self.dtype)} weights)": lambda: x @ whole.T,
            },
        )


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """The activation is SiLU. `num_tokens * top_k` is a multiple of the number of experts, or less."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype = BF16

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
        return _default_first(moe_experts_tactics.default_tactic(problem), usable)

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


Case = Int4Case | Fp8Case | ExpertsCase

_INT4 = Int4Case(16, 1000, 1056)
_FP8 = Fp8Case(16, 1008, 1040)
CHECKS: tuple[Case, ...] = (
    *(replace(_INT4, rows=rows, dtype=dtype) for rows in (1, 16, 200) for dtype in (F16, BF16)),
    *(replace(_INT4, group_size=size, has_zeros=size != 32) for size in (32, 64, -1)),
    *(replace(_INT4, rows=rows, has_bias=True, has_perm=True) for rows in (3, 130)),
    replace(_INT4, has_zeros=False, dtype=F16, rows=40),
    *(replace(_FP8, rows=rows) for rows in (1, 16, 40, 200)),
    *(
        replace(_FP8, rows=rows, is_static=True, per_channel=False, has_bias=True, dtype=F16)
        for rows in (5, 130)
    ),
    ExpertsCase(24, 2, 8, 512, 704),
    ExpertsCase(1, 4, 16, 512, 704, dtype=F16),
    ExpertsCase(640, 4, 16, 512, 704),
)
# A layer of Llama 3 8B (gate and up in one, and down), and the experts of Qwen3-30B-A3B.
SPEEDS: tuple[Case, ...] = (
    *(Int4Case(rows, 28672, 4096) for rows in (1, 16, 2048)),
    *(Fp8Case(rows, 28672, 4096) for rows in (16, 2048)),
    *(ExpertsCase(tokens, 8, 128, 2048, 768) for tokens in (16, 2048)),
    *(Int4Case(rows, 4096, 14336) for rows in (1, 16)),
    Fp8Case(16, 4096, 14336),
)


def check_units(device: torch.device, cases: Sequence[Case] = CHECKS) -> Iterator[Unit]:
    for case in cases:
        yield Unit(case.name, partial(check, case, device))


def check(case: Case, device: torch.device) -> list[Record]:
    """The default tactic against the reference in float64 on the CPU."""
    call = case.prepare(device)
    call.out.fill_(float("nan"))
    call.compute(None)
    return [Accuracy(case.name, row_error(call.out.cpu(), call.reference()), case.bound)]


def speed_units(device: torch.device, timer: Timer, cases: Sequence[Case] = SPEEDS) -> Iterator[Unit]:
    """Each tactic of each case, and what cuBLAS takes for the same."""
    for case in cases:
        call = cache(partial(case.prepare, device))
        expected = cache(partial(_expected, call))
        for tactic in case.tactics():
            run = partial(_time_tactic, case, call, expected, tactic, timer)
            yield Unit(f"{case.name}, {tactic_name(tactic)}", run)
        yield Unit(f"{case.name}, cublas", partial(_time_others, case, call, timer), is_ours=False)


def tactic_name(tactic: Any) -> str:
    split = getattr(tactic, "split_k", 1)
    tile = f"{tactic.block_m}x{tactic.block_n}x{tactic.block_k}, {tactic.num_warps} warps, {tactic.num_stages} stages"
    return f"{tile}, split {split}" if split > 1 else tile


def _expected(call: Callable[[], Call]) -> Tensor:
    return call().expected()


def _time_tactic(
    case: Case, call: Callable[[], Call], expected: Callable[[], Tensor], tactic: Any, timer: Timer
) -> list[Record]:
    called = call()
    called.out.fill_(float("nan"))
    seconds = timer.seconds(partial(called.compute, tactic), is_cold=True)
    error = row_error(called.out, expected())
    return [_timing(case, "pelton", tactic_name(tactic), tactic == case.tactics()[0], seconds, error)]


def _time_others(case: Case, call: Callable[[], Call], timer: Timer) -> Iterator[Record]:
    for name, compute in call().others.items():
        yield _timing(case, name, None, False, timer.seconds(compute, is_cold=True), 0.0)


def _timing(
    case: Case, implementation: str, tactic: str | None, is_default: bool, seconds: float, error: float
) -> Timing:
    work = case.work()
    return Timing(
        case=case.name,
        implementation=implementation,
        tactic=tactic,
        is_default=is_default,
        seconds=seconds,
        num_bytes=work.num_bytes,
        flops=work.flops,
        products=case.products,
        error=error,
        bound=2 * case.bound,  # torch's result may be rounded as well
    )


def _default_first(default: Any, others: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys([default, *others]))


def _worthwhile(tactics: Sequence[Any], rows: int) -> list[Any]:
    """Without tiles that are far larger than all rows, and small ones for many rows."""
    return [tactic for tactic in tactics if min(rows, 32) <= tactic.block_m <= max(rows, 32)]


def _dequantised_product(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    quantised, scale = fp8.quantize_activations(x, input_scale)
    product = quantised.float() @ weight.float().T * scale * weight_scale
    return product if bias is None else product + bias.float()


def _on_cpu(arguments: Sequence[Any]) -> list[Any]:
    return [argument.cpu() if isinstance(argument, Tensor) else argument for argument in arguments]
