"""`int4_linear`, `fp8_linear` and `moe_experts`: their Triton kernels against the references, and against the roofline
beside cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .experts import ExpertsCase
from .linears import Fp8Case, Int4Case
from .measure import Timer, row_error
from .records import Accuracy, Record, Timing
from .units import Unit

__all__ = ["CHECKS", "SPEEDS", "Case", "ExpertsCase", "Fp8Case", "Int4Case", "check_units", "speed_units"]

F16, BF16 = torch.float16, torch.bfloat16
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
    *(ExpertsCase(tokens, 4, 16, 512, 704, form="int4", group_size=64) for tokens in (24, 640)),
    *(ExpertsCase(tokens, 4, 16, 512, 704, form="fp8") for tokens in (24, 640)),
)
# A layer of Llama 3 8B (gate and up in one, and down), and the experts of Qwen3-30B-A3B.
SPEEDS: tuple[Case, ...] = (
    *(Int4Case(rows, 28672, 4096) for rows in (1, 16, 2048)),
    *(Fp8Case(rows, 28672, 4096) for rows in (16, 2048)),
    *(ExpertsCase(tokens, 8, 128, 2048, 768) for tokens in (16, 2048)),
    ExpertsCase(16, 8, 128, 2048, 768, form="int4", group_size=128),
    ExpertsCase(2048, 8, 128, 2048, 768, form="fp8"),
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
