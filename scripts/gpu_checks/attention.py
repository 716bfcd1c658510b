"""`paged_attention`: its Triton kernels against the reference, and against the roofline beside torch's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...plugins_trt.paged_attention import QUANTISED_DTYPES, paged_attention, quantise
from ...plugins_trt.paged_attention_tactics import (
    TACTICS,
    Problem,
    Tactic,
    Tile,
    default_tactic,
    supports,
    workspace_elements,
)
from .measure import Timer, name_of, row_error
from .records import Accuracy, Record, Timing
from .roofline import Work, attention_work
from .units import Unavailable, Unit

F16, BF16, FP8, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8


@dataclass(frozen=True, slots=True)
class Case:
    """A step: `past` tokens of each sequence are in the cache, `new` are computed now."""

    past: tuple[int, ...]
    new: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 32
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False
    query_dtype: torch.dtype = F16
    cache_dtype: torch.dtype = F16

    @property
    def name(self) -> str:
        """What is particular about it, in one line."""
        past, new = (_runs(counts) for counts in (self.past, self.new))
        parts = [
            f"past {past}, new {new}, heads {self.num_heads}/{self.num_kv_heads} of {self.head_dim}",
            f"{name_of(self.query_dtype)} on {name_of(self.cache_dtype)} pages of {self.block_size}",
        ]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        parts += ["sinks"] if self.has_sinks else []
        parts += ["ALiBi"] if self.has_alibi else []
        return f"attention: {', '.join(parts)}"

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def cache_scale(self) -> float:
        """`k_scale` and `v_scale`: random numbers fill the range of quantised caches."""
        return 0.02 if self.cache_dtype in QUANTISED_DTYPES else 1.0

    @property
    def bound(self) -> float:
        """Weights and output are rounded to the queries' dtype: twice its epsilon, as under the interpreter."""
        return 2 * torch.finfo(self.query_dtype).eps

    def work(self) -> Work:
        return attention_work(
            self.past,
            self.new,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            query_bytes=self.query_dtype.itemsize,
            cache_bytes=self.cache_dtype.itemsize,
            window=self.window,
        )


_MIXED = Case(past=(100, 0, 61, 0, 200), new=(1, 37, 4, 0, 130))
_DECODE = Case(past=(8191, 3000, 17, 1), new=(1, 1, 1, 1))
CHECKS = (
    *(replace(_MIXED, head_dim=dim) for dim in (64, 80, 96, 128, 256)),
    *(replace(_MIXED, query_dtype=BF16, cache_dtype=dtype) for dtype in (BF16, FP8, INT8)),
    *(replace(_MIXED, cache_dtype=dtype) for dtype in (FP8, INT8)),
    *(replace(_MIXED, head_dim=dim, cache_dtype=FP8) for dim in (64, 96, 256)),
    *(replace(_MIXED, num_heads=q, num_kv_heads=kv, head_dim=64) for q, kv in ((8, 8), (14, 2), (16, 1))),
    *(replace(_MIXED, block_size=size) for size in (16, 64)),
    replace(_MIXED, window=40),
    replace(_MIXED, soft_cap=30.0),
    replace(_MIXED, has_sinks=True),
    replace(_MIXED, has_alibi=True),
    replace(_MIXED, window=40, soft_cap=30.0, has_sinks=True, head_dim=64, cache_dtype=FP8),
    *(replace(_DECODE, cache_dtype=dtype) for dtype in (F16, FP8, INT8)),
    replace(_DECODE, new=(5, 5, 5, 5)),
    replace(_DECODE, window=1024),
    Case(past=(0, 513), new=(1024, 700)),
    Case(past=(0, 513), new=(1024, 700), window=256, query_dtype=BF16, cache_dtype=BF16),
)
_BATCH = Case(past=(2047,) * 64, new=(1,) * 64)
SPEEDS = (
    _BATCH,
    replace(_BATCH, cache_dtype=FP8),
    Case(past=(2048,), new=(2048,)),
    Case(past=(0,), new=(4096,)),
    Case(past=(8191,), new=(1,)),
    replace(_BATCH, query_dtype=BF16, cache_dtype=BF16, head_dim=64),
    replace(_BATCH, past=(2044,) * 32, new=(4,) * 32),
    replace(_BATCH, cache_dtype=INT8),
    Case(past=(0,), new=(4096,), head_dim=64, query_dtype=BF16, cache_dtype=BF16),
    replace(_BATCH, past=(8191,) * 16, new=(1,) * 16, window=1024),
)


@dataclass(frozen=True, slots=True)
class Step:
    """The operator's tensors on a device, and the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    out: Tensor


def check_units(device: torch.device, cases: Sequence[Case] = CHECKS) -> Iterator[Unit]:
    for case in cases:
        yield Unit(case.name, partial(check, case, device))


def check(case: Case, device: torch.device) -> list[Record]:
    """The default tactic against the reference in float64, which runs on the CPU: on a GPU the operator may be ours."""
    from ...plugins_trt.paged_attention_triton import paged_attention_

    step = make_step(case, device)
    options = _options(case, step)
    pages = step.k_cache, step.v_cache, step.block_table, step.seq_lens, step.query_start_loc
    expected, *new_caches = paged_attention(
        *(tensor.cpu().double() for tensor in (step.query, step.key, step.value)),
        *(tensor.cpu() for tensor in pages),
        **{name: option.cpu() if isinstance(option, Tensor) else option for name, option in options.items()},
    )
    paged_attention_(step.out, step.query, step.key, step.value, *pages, **options)
    caches = zip((step.k_cache, step.v_cache), new_caches, strict=True)
    accuracy = Accuracy(
        name=case.name,
        error=row_error(step.out.cpu(), expected),
        bound=case.bound,
        is_state_equal=all(_equal_bits(cache.cpu(), new) for cache, new in caches),
    )
    return [accuracy]


def speed_units(device: torch.device, timer: Timer, cases: Sequence[Case] = SPEEDS) -> Iterator[Unit]:
    """Each tactic of each case, and torch's attention."""
    for case in cases:
        prepared = cache(partial(_prepare, case, device))
        yield Unit(f"{case.name}, sdpa", partial(_time_sdpa, case, prepared, timer), is_ours=False)
        for tactic in tactics(problem_of(case, device), case):
            name = f"{case.name}, {tactic_name(case, tactic)}"
            yield Unit(name, partial(_time_tactic, case, prepared, tactic, timer))


def tactics(problem: Problem, case: Case) -> list[Tactic]:
    """The default one, and all that differ from it in the kernel that this case is for."""
    default = default_tactic(problem, sum(case.new), len(case.new))
    rows = max(case.new)
    if rows <= default.decode_rows(problem):
        options = [replace(t, prefill=default.prefill) for t in TACTICS if t.decode_rows(problem) >= rows]
    else:
        options = [replace(t, decode=default.decode, splits=default.splits) for t in TACTICS]
    return list(dict.fromkeys([default, *(t for t in options if supports(t, problem))]))


def problem_of(case: Case, device: torch.device) -> Problem:
    from ...plugins_trt import paged_attention_triton as kernels

    query = torch.empty(0, case.num_heads, case.head_dim, dtype=case.query_dtype, device=device)
    shape = 0, case.block_size, case.num_kv_heads, case.head_dim
    sinks = torch.empty(0) if case.has_sinks else None
    slopes = torch.empty(0) if case.has_alibi else None
    scoring = kernels.Scoring(case.scale, case.window, case.soft_cap, sinks, slopes)
    return kernels.problem_of(query, torch.empty(shape, dtype=case.cache_dtype, device=device), scoring)


def tactic_name(case: Case, tactic: Tactic) -> str:
    """Of the kernel that the case is for."""
    group = case.num_heads // case.num_kv_heads
    if max(case.new) <= tactic.decode.block_m // group:
        return f"{_tile_name(tactic.decode)}, {tactic.splits} splits"
    return _tile_name(tactic.prefill)


def make_step(case: Case, device: torch.device, *, seed: int = 0) -> Step:
    """Random tensors; pages in random order, as many as are needed."""
    random = torch.Generator(device).manual_seed(seed)
    lengths = [past + new for past, new in zip(case.past, case.new, strict=True)]
    counts = [-(-length // case.block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=random, device=device).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
    for row, part in zip(table, torch.split(order, counts), strict=True):
        row[: len(part)] = part
    starts = torch.tensor([0, *case.new], device=device).cumsum(0).to(torch.int32)
    tokens = sum(case.new)
    shape = sum(counts), case.block_size, case.num_kv_heads, case.head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    def cached() -> Tensor:
        """Numbers of about 1 after the scale."""
        if case.cache_dtype == INT8:
            return torch.randint(-100, 101, shape, generator=random, device=device, dtype=INT8)
        return (torch.randn(shape, generator=random, device=device, dtype=F16) / case.cache_scale).to(
            case.cache_dtype
        )

    query = randn(tokens, case.num_heads, case.head_dim).to(case.query_dtype)
    return Step(
        query=query,
        key=randn(tokens, case.num_kv_heads, case.head_dim).to(case.query_dtype),
        value=randn(tokens, case.num_kv_heads, case.head_dim).to(case.query_dtype),
        k_cache=cached(),
        v_cache=cached(),
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_start_loc=starts,
        sinks=randn(case.num_heads) * 2 if case.has_sinks else None,
        alibi_slopes=randn(case.num_heads).abs() / 8 if case.has_alibi else None,
        out=torch.full_like(query, float("nan")),
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step, and the same attention for torch: heads before tokens, K/V [B, Hkv, S, D] in one piece."""

    step: Step
    attend: Callable[[], Tensor]  # [B, Hq, new, D]
    expected: Tensor  # [T, Hq, D]


def _prepare(case: Case, device: torch.device) -> _Prepared:
    """Sequences must be alike, and torch knows neither caps nor sinks nor slopes (`Unavailable`)."""
    if len({*zip(case.past, case.new, strict=True)}) > 1 or case.soft_cap or case.has_sinks or case.has_alibi:
        raise Unavailable("torch's attention does not compute this case")
    step = make_step(case, device)
    batch, new, past = len(case.new), case.new[0], case.past[0]
    query = step.query.view(batch, new, case.num_heads, case.head_dim).transpose(1, 2)
    keys, values = (
        _contiguous(case, cached, step, tokens)
        for cached, tokens in ((step.k_cache, step.key), (step.v_cache, step.value))
    )
    is_causal = new > 1 and past == 0 and not case.window
    mask = None if is_causal or (new == 1 and not case.window) else _mask(case, device)

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=case.scale, enable_gqa=True
        )

    return _Prepared(step, attend, attend().transpose(1, 2).flatten(0, 1).clone())


def _contiguous(case: Case, cached: Tensor, step: Step, tokens: Tensor) -> Tensor:
    """What the sequences see once the step's tokens are written: [B, Hkv, S, D] in the queries' dtype."""
    batch, past = len(case.new), case.past[0]
    pages = torch.stack(
        [cached[row.long()].flatten(0, 1)[:past] for row in step.block_table]
    )  # [B, past, Hkv, D]
    new = quantise(tokens, case.cache_scale, case.cache_dtype).view(
        batch, -1, case.num_kv_heads, case.head_dim
    )
    numbers = torch.cat([part.to(case.query_dtype) for part in (pages, new)], dim=1) * case.cache_scale
    return numbers.transpose(1, 2).contiguous()


def _mask(case: Case, device: torch.device) -> Tensor:
    """Which key position each query position sees: [new, S]."""
    past, new = case.past[0], case.new[0]
    distance = torch.arange(past, past + new, device=device)[:, None] - torch.arange(
        past + new, device=device
    )
    visible = distance >= 0
    return visible & (distance < case.window) if case.window else visible


def _time_tactic(case: Case, prepared: Callable[[], _Prepared], tactic: Tactic, timer: Timer) -> list[Record]:
    from ...plugins_trt.paged_attention_triton import paged_attention_

    step, expected = prepared().step, prepared().expected
    problem = problem_of(case, step.query.device)
    size = sum(workspace_elements(tactic, problem, len(case.new)))
    workspace = torch.empty(size, dtype=torch.float32, device=step.query.device)
    out = torch.full_like(step.out, float("nan"))

    def run() -> None:
        paged_attention_(
            out, step.query, step.key, step.value, step.k_cache, step.v_cache,
            step.block_table, step.seq_lens, step.query_start_loc, **_options(case, step),
            tactic=tactic, workspace=workspace, max_rows=max(case.new),
        )  # fmt: skip

    seconds = timer.seconds(run, is_cold=True)
    is_default = tactic == default_tactic(problem, sum(case.new), len(case.new))
    error = row_error(out, expected)
    return [_timing(case, "pelton", tactic_name(case, tactic), is_default, seconds, error)]


def _time_sdpa(case: Case, prepared: Callable[[], _Prepared], timer: Timer) -> list[Record]:
    """On K/V that lie in one piece in the queries' dtype; nothing is written."""
    seconds = timer.seconds(prepared().attend, is_cold=True)
    return [_timing(case, f"sdpa ({name_of(case.query_dtype)}, no pages)", None, False, seconds, 0.0)]


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
        products=name_of(case.query_dtype),
        error=error,
        bound=2 * case.bound,  # torch's result is rounded as well
    )


def _options(case: Case, step: Step) -> dict[str, Any]:
    """The operator's arguments beside the tensors of the step."""
    return {
        "scale": case.scale,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": step.sinks,
        "alibi_slopes": step.alibi_slopes,
        "k_scale": case.cache_scale,
        "v_scale": case.cache_scale,
    }


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.uint8 if a.dtype.itemsize == 1 else torch.int16
    return bool((a.view(kind) == b.view(kind)).all())


def _tile_name(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"


def _runs(counts: Sequence[int]) -> str:
    """`64 x 2047`, or each of them."""
    if len(counts) > 1 and len(set(counts)) == 1:
        return f"{len(counts)} x {counts[0]}"
    return "+".join(map(str, counts))
