"""Steps of paged attention, computed by the Triton kernels and by the float64 reference. Runs under `interpreted`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from pelton.plugins_trt.paged_attention import paged_attention, quantise
from pelton.plugins_trt.paged_attention_tactics import Tactic, Tile

from .interpreted import Region, counted_reads

NUM_GUARD_PAGES = 2
# Smaller than real ones, so that short contexts have many tiles and splits.
SMALL_TACTICS = tuple(
    Tactic(Tile(m, n, 4, 1), Tile(m, n, 4, 1), splits)
    for m in (16, 32)
    for n in (16, 32)
    for splits in (1, 2, 4)
)


@dataclass(frozen=True)
class Case:
    """A step: `past` tokens of each sequence are in the cache, `new` are computed now."""

    past: tuple[int, ...]
    new: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    query_dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype = torch.float16
    k_scale: float = 1.0
    v_scale: float = 1.0
    tactic: Tactic | None = field(default=SMALL_TACTICS[3])
    num_padding_rows: int = 0
    num_padding_sequences: int = 0
    merged_projection: bool = False
    tells_max_rows: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """`error`: largest deviation of a (token, head) row of the output, relative to the row's largest element."""

    error: float
    padding_is_zero: bool
    owned_pages_are_equal: bool
    other_pages_are_untouched: bool
    forbidden_reads: int


def random_case(seed: int) -> Case:
    """Any combination of the features, of a size that the interpreter computes in a fraction of a second."""
    draw = random.Random(seed)
    num_kv_heads = draw.choice([1, 1, 2])
    batch = draw.randint(1, 3)
    new = [draw.choice([0, 1, 1, 2, 4, draw.randint(5, 16)]) for _ in range(batch)]
    past = [draw.choice([0, draw.randint(0, 60), 16 * draw.randint(0, 4)]) for _ in range(batch)]
    query_dtype = draw.choice([torch.float16, torch.bfloat16])
    cache_dtype = draw.choice([query_dtype, torch.float8_e4m3fn, torch.int8])
    is_quantised = cache_dtype != query_dtype
    return Case(
        past=tuple(past),
        new=tuple(new),
        num_heads=num_kv_heads * draw.choice([1, 2, 3, 4, 8]),
        num_kv_heads=num_kv_heads,
        head_dim=draw.choice([64, 64, 80, 96, 128, 256]),
        block_size=draw.choice([16, 32, 64]),
        window=draw.choice([0, 0, 1, 7, 16, 40]),
        soft_cap=draw.choice([0.0, 0.0, 2.0, 30.0]),
        sinks=draw.random() < 0.3,
        alibi=draw.random() < 0.3,
        query_dtype=query_dtype,
        cache_dtype=cache_dtype,
        k_scale=draw.choice([0.02, 0.031]) if is_quantised else 1.0,
        v_scale=draw.choice([0.02, 0.05]) if is_quantised else 1.0,
        tactic=draw.choice(SMALL_TACTICS),
        num_padding_rows=draw.choice([0, 0, 3]),
        num_padding_sequences=draw.choice([0, 0, 2]),
        merged_projection=draw.random() < 0.3,
        tells_max_rows=draw.random() < 0.3,
        seed=seed,
    )


@dataclass(frozen=True)
class _Layout:
    """Where the sequences stand: the operator's tensors, and what the kernels may touch of the table and the cache."""

    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_blocks: int
    is_read: torch.Tensor  # [num_blocks + guard pages]
    is_entry_read: torch.Tensor  # like table

    @property
    def num_rows(self) -> int:
        return int(self.query_start_loc[-1])

    def guarded_table(self) -> torch.Tensor:
        """Entries that must not be read point to a guard page."""
        return self.table.where(self.is_entry_read, self.num_blocks)


def _lay_out(case: Case) -> _Layout:
    """Sequences without rows own no pages, whatever their `seq_lens` say."""
    new = (*case.new, *[0] * case.num_padding_sequences)
    past = (*case.past, *[1] * case.num_padding_sequences)
    lengths = [p + n for p, n in zip(past, new, strict=True)]
    counts = [-(-length // case.block_size) if n else 0 for length, n in zip(lengths, new, strict=True)]
    num_blocks = sum(counts) + 2
    owned = torch.randperm(num_blocks)[: sum(counts)]
    table = torch.full((len(new), max(counts) + 2), num_blocks, dtype=torch.int32)
    is_entry_read = torch.zeros_like(table, dtype=torch.bool)
    for b, part in enumerate(owned.split(counts)):
        table[b, : len(part)] = part
        hidden = max(lengths[b] - new[b] - case.window + 1, 0) // case.block_size if case.window else 0
        is_entry_read[b, hidden : len(part)] = True
    is_read = torch.zeros(num_blocks + NUM_GUARD_PAGES, dtype=torch.bool)
    is_read[table[is_entry_read].long()] = True
    starts = torch.from_numpy(np.cumsum([0, *new])).to(torch.int32)
    return _Layout(
        table, torch.tensor(lengths, dtype=torch.int32), starts, num_blocks, is_read, is_entry_read
    )


def run_case(case: Case) -> Outcome:
    """Compute the step with poison wherever the kernels have no business.

    NaN stands in the output, in pages that no sequence owns or that lie outside every window, and in guard pages
    behind the cache, to which all table entries point that must not be read. (int8 has no NaN: its extremes.) Reads of
    such pages and entries are counted, even if nothing comes of them.
    """
    from pelton.plugins_trt.paged_attention_triton import paged_attention_

    torch.manual_seed(case.seed)
    at = _lay_out(case)
    key, value, query = _tokens(case, at.num_rows + case.num_padding_rows)
    shape = (len(at.is_read), case.block_size, case.num_kv_heads, case.head_dim)
    caches = [_random_cache(shape, case.cache_dtype) for _ in range(2)]
    sinks = torch.randn(case.num_heads) * 2 if case.sinks else None
    slopes = torch.rand(case.num_heads) * 0.2 if case.alibi else None
    options = (case.head_dim**-0.5, case.window, case.soft_cap, sinks, slopes, case.k_scale, case.v_scale)
    expected, *new_caches = paged_attention(
        query.double(),
        key.double(),
        value.double(),
        *caches,
        at.table,
        at.seq_lens,
        at.query_start_loc,
        *options,
    )

    for cache in caches:
        _poison(cache, ~at.is_read)
    before = [cache.clone() for cache in caches]
    table = at.guarded_table()
    regions = [Region(cache.data_ptr(), cache[0].nbytes, ~at.is_read.numpy()) for cache in caches]
    regions.append(Region(table.data_ptr(), table.itemsize, ~at.is_entry_read.flatten().numpy()))
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    with counted_reads(regions) as reads:
        paged_attention_(
            out, query, key, value, *[cache[: at.num_blocks] for cache in caches],
            table, at.seq_lens, at.query_start_loc, *options,
            tactic=case.tactic, max_rows=max(case.new) if case.tells_max_rows else None,
        )  # fmt: skip
    return Outcome(
        error=_row_error(out[: at.num_rows], expected[: at.num_rows]),
        padding_is_zero=bool((out[at.num_rows :] == 0).all()),
        owned_pages_are_equal=all(
            _equal_bits(cache[at.is_read], new[at.is_read])
            for cache, new in zip(caches, new_caches, strict=True)
        ),
        other_pages_are_untouched=all(
            _equal_bits(cache[~at.is_read], old[~at.is_read])
            for cache, old in zip(caches, before, strict=True)
        ),
        forbidden_reads=reads["forbidden"],
    )


def rows_filled_by_each_kernel(new: tuple[int, ...]) -> dict[str, list[bool]]:
    """Launch one attention kernel alone, decode tiles holding 4 tokens: which rows of a NaN output does it fill?"""
    from pelton.plugins_trt import paged_attention_triton as kernels

    starts = torch.from_numpy(np.cumsum([0, *new])).to(torch.int32)
    seq_lens = torch.tensor(new, dtype=torch.int32)
    table = torch.arange(len(new), dtype=torch.int32)[:, None]
    query = torch.randn(int(starts[-1]), 4, 64).half()
    caches = (torch.randn(len(new), 16, 1, 64).half(), torch.randn(len(new), 16, 1, 64).half())
    pages, scoring = kernels.Pages(*caches, table, seq_lens, starts), kernels.Scoring(0.125)
    problem = kernels.problem_of(query, caches[0], scoring)
    tactic = Tactic(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), 2)
    outs = {name: torch.full_like(query, float("nan")) for name in ("prefill", "decode")}
    kernels.prefill(outs["prefill"], query, pages, scoring, problem=problem, tile=tactic.prefill, min_rows=5)
    workspace = torch.empty(sum(kernels.workspace_elements(tactic, problem, len(new))))
    kernels.decode(outs["decode"], query, pages, scoring, problem=problem, tactic=tactic, workspace=workspace)
    return {name: [bool(row.isfinite().all()) for row in out] for name, out in outs.items()}


def wrongly_quantised(dtype: torch.dtype, scale: float) -> list[float]:
    """Float16 numbers, all of which are written as keys and values, that the kernel does not store as the reference."""
    from pelton.plugins_trt import paged_attention_triton as kernels

    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(64, 1, 1024)
    caches = [torch.zeros(4, 16, 1, 1024, dtype=dtype) for _ in range(2)]
    problem = kernels.Problem(1, 1, 1024, 16, torch.float16, dtype, 0)
    pages = kernels.Pages(
        *caches, torch.arange(4, dtype=torch.int32)[None],
        torch.tensor([64], dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32), scale, scale,
    )  # fmt: skip
    kernels.write_kv(torch.empty_like(numbers), numbers, numbers, pages, problem=problem)
    expected = quantise(numbers, scale, dtype).view(torch.uint8).flatten()
    wrong = torch.zeros(2**16, dtype=torch.bool)
    for cache in caches:
        stored = cache.view(torch.uint8).flatten()
        both_nan = (stored & expected & 0x7F == 0x7F) & (dtype == torch.float8_e4m3fn)
        wrong |= (stored != expected) & ~both_nan
    return numbers.flatten()[wrong].tolist()


def wrongly_read(dtype: torch.dtype, query_dtype: torch.dtype) -> list[int]:
    """Bytes that the attention over a single token with all of them as its value does not read as the reference."""
    from pelton.plugins_trt import paged_attention_triton as kernels

    stored = torch.zeros(1, 16, 1, 256, dtype=torch.uint8)
    stored[0, 0, 0] = torch.arange(256)
    query = torch.zeros(1, 1, 256, dtype=query_dtype)
    pages = kernels.Pages(
        torch.zeros_like(stored).view(dtype), stored.view(dtype), torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32),
    )  # fmt: skip
    scoring = kernels.Scoring(1.0)
    problem = kernels.problem_of(query, pages.k_cache, scoring)
    tactic = Tactic(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), 1)
    out = torch.empty_like(query)
    kernels.decode(out, query, pages, scoring, problem=problem, tactic=tactic, workspace=torch.empty(0))
    expected = stored[0, 0, 0].view(dtype).float()
    actual = out[0, 0].float()
    return torch.nonzero((actual != expected) & ~(actual.isnan() & expected.isnan())).flatten().tolist()


def huge_cache_equals_small_one() -> bool:
    """The same tokens in a small cache and in the last pages of one with 2^31 elements before them, never touched."""
    from pelton.plugins_trt.paged_attention_triton import paged_attention_

    torch.manual_seed(0)
    query, key, value = (torch.randn(20, 1, 64).half() for _ in range(3))
    step = (torch.tensor([40], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32))
    small = [torch.randint(-100, 100, (3, 16, 1, 64)).to(torch.int8) for _ in range(2)]
    num_blocks = 2**31 // (16 * 64) + 3
    huge = [torch.empty(num_blocks, 16, 1, 64, dtype=torch.int8) for _ in range(2)]
    for cache, pages in zip(huge, small, strict=True):
        cache[-3:] = pages
    outs = []
    for caches, first in ((small, 0), (huge, num_blocks - 3)):
        table = torch.arange(first, first + 3, dtype=torch.int32)[None]
        for tactic in (SMALL_TACTICS[1], Tactic(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), 2)):
            out = torch.empty_like(query)
            paged_attention_(
                out,
                query,
                key,
                value,
                *caches,
                table,
                *step,
                0.125,
                k_scale=0.02,
                v_scale=0.02,
                tactic=tactic,
            )
            outs.append(out)
    return (
        torch.equal(torch.stack(outs[:2]), torch.stack(outs[2:]))
        and bool(outs[0].isfinite().all())
        and all(torch.equal(a, b[-3:]) for a, b in zip(small, huge, strict=True))
    )


def run_with_transposed_heads() -> None:
    from pelton.plugins_trt.paged_attention_triton import paged_attention_

    query = torch.zeros(1, 2, 64).half()
    cache = torch.zeros(1, 16, 2, 64).half()
    scattered = torch.zeros(1, 64, 2).half().transpose(1, 2)
    table = torch.zeros(1, 1, dtype=torch.int32)
    step = (table, torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), 1.0)
    paged_attention_(torch.empty_like(query), query, scattered, scattered, cache, cache.clone(), *step)


def _tokens(case: Case, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """key, value, query; as slices of one projection's output if the case says so."""
    heads = (case.num_kv_heads, case.num_kv_heads, case.num_heads)
    merged = torch.randn(total, sum(heads) * case.head_dim).to(case.query_dtype)
    widths = [h * case.head_dim for h in heads]
    parts = [p.view(total, h, case.head_dim) for p, h in zip(merged.split(widths, dim=1), heads, strict=True)]
    key, value, query = parts if case.merged_projection else [p.contiguous() for p in parts]
    return key, value, query


def _random_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-100, 101, shape).to(dtype)
    spread = 40 if dtype == torch.float8_e4m3fn else 1
    return (torch.randn(shape) * spread).to(dtype)


def _poison(cache: torch.Tensor, pages: torch.Tensor) -> None:
    bits = {torch.int8: 0x7F, torch.float8_e4m3fn: 0x7F, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}[
        cache.dtype
    ]
    raw = cache.view(torch.uint8 if cache.dtype.itemsize == 1 else torch.int16)
    raw[pages] = bits


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.uint8 if a.dtype.itemsize == 1 else torch.int16
    return bool((a.contiguous().view(kind) == b.contiguous().view(kind)).all())


def _row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN if anything is."""
    if not expected.numel():
        return 0.0
    difference = (actual.double() - expected).abs().amax(-1)  # amax propagates NaN
    return float((difference / expected.abs().amax(-1)).max())
