"""Paged attention in Triton: the launches of one step, and the kernels to compile ahead for them.

A step is up to four kernels, whose grids follow from shapes alone so that a CUDA graph can hold them:

    write_kv   every token's K/V into its page; zero output for padding tokens
    prefill    sequences with more rows than one tile of the decode kernel holds
    decode     all others, each tile's context split over programs
    reduce     joins the splits

Which of the two attention kernels computes a sequence is decided on the device by its number of rows: programs of the
other one return at once. Nothing here synchronises with the device. Pages past a sequence's end or wholly outside the
window of a tile's rows are not read, nor are table entries past the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .architectures import ARCHITECTURES, FIRST_FLOAT8_ARCHITECTURE, INTERPRETER
from .paged_attention_kernels_triton import decode_kernel, prefill_kernel, reduce_kernel
from .paged_attention_pages_triton import FLOAT8, FLOAT8_NATIVE, INT8, PLAIN, write_kv_kernel
from .paged_attention_tactics import (
    TACTICS,
    WRITE_BLOCK,
    Problem,
    Tactic,
    Tile,
    decode_grid,
    default_tactic,
    prefill_grid,
    reduce_grid,
    supports,
    unsupported_reason,
    workspace_elements,
    write_grid,
)
from .triton_compile import KernelVariant

__all__ = [
    "TACTICS",
    "Pages",
    "Problem",
    "Scoring",
    "Tactic",
    "Tile",
    "decode",
    "default_tactic",
    "kernel_variants",
    "paged_attention_",
    "prefill",
    "problem_of",
    "report_variants",
    "supports",
    "unsupported_reason",
    "workspace_elements",
    "write_kv",
]

_POINTERS = {torch.float16: "*fp16:16", torch.bfloat16: "*bf16:16", torch.int8: "*i8:16"}


@dataclass(frozen=True, slots=True)
class Pages:
    """The caches, contiguous, and where a step's sequences stand in them and in its rows; see `paged_attention.py`."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def num_sequences(self) -> int:
        return self.block_table.shape[0]

    def arguments(self) -> tuple[Tensor, ...]:
        return _raw(self.k_cache), _raw(self.v_cache), self.block_table, self.seq_lens, self.query_start_loc


@dataclass(frozen=True, slots=True)
class Scoring:
    """How logits are made of query . key; see `paged_attention.py`."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


def write_kv(out: Tensor, key: Tensor, value: Tensor, pages: Pages, *, problem: Problem) -> None:
    """Write the step's tokens into their pages, and zeros into the rows of `out` that are padding."""
    write_kv_kernel[write_grid(problem, key.shape[0])](
        out, _rows(key), _rows(value), *pages.arguments(), pages.k_scale, pages.v_scale,
        pages.num_sequences, key.stride(0), value.stride(0), pages.block_table.stride(0),
        **_write_constants(problem), num_warps=4,
    )  # fmt: skip


def prefill(
    out: Tensor,
    query: Tensor,
    pages: Pages,
    scoring: Scoring,
    *,
    problem: Problem,
    tile: Tile,
    min_rows: int = 1,
) -> None:
    """Attention of the sequences that have at least `min_rows` rows, over pages that hold their tokens already."""
    prefill_kernel[prefill_grid(problem, tile, query.shape[0], pages.num_sequences)](
        out, _rows(query), *pages.arguments(), scoring.sinks, scoring.alibi_slopes, scoring.scale, scoring.soft_cap,
        pages.k_scale, pages.v_scale, scoring.window, min_rows,
        pages.num_sequences, query.stride(0), pages.block_table.stride(0),
        **_attention_constants(problem, tile), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def decode(
    out: Tensor,
    query: Tensor,
    pages: Pages,
    scoring: Scoring,
    *,
    problem: Problem,
    tactic: Tactic,
    workspace: Tensor,  # float32, as many elements as `workspace_elements` says, on the queries' device
) -> None:
    """Attention of the sequences that have at most `tactic.decode_rows` rows, over pages that hold their tokens."""
    tile, splits = tactic.decode, tactic.splits
    num_partial, num_stats = workspace_elements(tactic, problem, pages.num_sequences)
    if workspace.numel() < num_partial + num_stats:
        raise ValueError(f"workspace has {workspace.numel()} elements, {num_partial + num_stats} are needed")
    partial, stats = workspace[:num_partial], workspace[num_partial : num_partial + num_stats]
    decode_kernel[decode_grid(problem, tactic, pages.num_sequences)](
        out, partial, stats, _rows(query), *pages.arguments(), scoring.sinks, scoring.alibi_slopes,
        scoring.scale, scoring.soft_cap, pages.k_scale, pages.v_scale, scoring.window,
        query.stride(0), pages.block_table.stride(0),
        **_attention_constants(problem, tile), SPLITS=splits, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        reduce_kernel[reduce_grid(problem, tactic, query.shape[0], pages.num_sequences)](
            out, partial, stats, pages.seq_lens, pages.query_start_loc, scoring.sinks, pages.v_scale, scoring.window,
            **_reduce_constants(problem, tactic), num_warps=4,
        )  # fmt: skip


def paged_attention_(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    tactic: Tactic | None = None,
    workspace: Tensor | None = None,
    max_rows: int | None = None,
) -> None:
    """The operator of `paged_attention.py` in place: fills `out`, changes the caches.

    `out` and the caches are contiguous; query, key and value may be slices of one merged projection. Pass `workspace`
    (sized by `workspace_elements`) where allocating is not wanted. `max_rows`: the caller knows that no sequence has
    more rows; a kernel that cannot have work is not launched then. Raises `ValueError` for what `unsupported_reason`
    names and for tensors of another layout.
    """
    pages = Pages(k_cache, v_cache, block_table, seq_lens, query_start_loc, k_scale, v_scale)
    scoring = Scoring(scale, window, soft_cap, sinks, alibi_slopes)
    problem = problem_of(query, k_cache, scoring)
    reason = unsupported_reason(problem)
    if reason is not None:
        raise ValueError(reason)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous: strides {out.stride()}")
    num_tokens = query.shape[0]
    if num_tokens == 0 or pages.num_sequences == 0:
        out.zero_()
        return
    tactic = tactic or default_tactic(problem, num_tokens, pages.num_sequences)
    if not supports(tactic, problem):
        raise ValueError(f"{tactic} does not support {problem}")
    if workspace is None:
        size = sum(workspace_elements(tactic, problem, pages.num_sequences))
        workspace = torch.empty(size, dtype=torch.float32, device=query.device)
    write_kv(out, key, value, pages, problem=problem)
    decode_rows = tactic.decode_rows(problem)
    if (num_tokens if max_rows is None else max_rows) > decode_rows:
        prefill(out, query, pages, scoring, problem=problem, tile=tactic.prefill, min_rows=decode_rows + 1)
    decode(out, query, pages, scoring, problem=problem, tactic=tactic, workspace=workspace)


def problem_of(query: Tensor, k_cache: Tensor, scoring: Scoring) -> Problem:
    """The problem that a step poses on its device."""
    arch = INTERPRETER
    if query.is_cuda:
        major, minor = torch.cuda.get_device_capability(query.device)
        arch = major * 10 + minor
    return Problem(
        num_heads=query.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=query.shape[2],
        block_size=k_cache.shape[1],
        query_dtype=query.dtype,
        cache_dtype=k_cache.dtype,
        arch=arch,
        has_window=scoring.window > 0,
        has_soft_cap=scoring.soft_cap > 0,
        has_sinks=scoring.sinks is not None,
        has_alibi=scoring.alibi_slopes is not None,
    )


def kernel_variants(problem: Problem, tactic: Tactic) -> dict[str, KernelVariant]:
    """What to compile for a problem, by the kernel's name: `write_kv`, `prefill`, `decode`, and `reduce` if it splits.

    Pointers and row strides are promised to be divisible by 16. `float8_e4m3fn` caches are handed over as bytes.
    """
    query, cache = _POINTERS[problem.query_dtype], _POINTERS.get(problem.cache_dtype, "*u8:16")
    tensors = dict.fromkeys(("block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr"), "*i32:16")
    tensors |= {"k_cache_ptr": cache, "v_cache_ptr": cache, "out_ptr": query}
    numbers = {"k_scale": "fp32", "v_scale": "fp32", "block_table_stride": "i32"}
    partial = {"partial_ptr": "*fp32:16", "stats_ptr": "*fp32:16"}
    sinks = {"sinks_ptr": "*fp32:16"} if problem.has_sinks else {}
    no_sinks: dict[str, object] = {} if problem.has_sinks else {"sinks_ptr": None}
    slopes = {"alibi_slopes_ptr": "*fp32:16"} if problem.has_alibi else {}
    no_slopes: dict[str, object] = {} if problem.has_alibi else {"alibi_slopes_ptr": None}
    attention = tensors | numbers | sinks | slopes | {
        "query_ptr": query, "scale": "fp32", "soft_cap": "fp32", "window": "i32", "query_stride": "i32:16",
    }  # fmt: skip
    variants = {
        "write_kv": _variant(
            write_kv_kernel,
            tensors
            | numbers
            | {"key_ptr": query, "value_ptr": query, "num_sequences": "i32"}
            | {"key_stride": "i32:16", "value_stride": "i32:16"},
            _write_constants(problem),
        ),
        "prefill": _variant(
            prefill_kernel,
            attention | {"min_rows": "i32", "num_sequences": "i32"},
            _attention_constants(problem, tactic.prefill) | no_sinks | no_slopes,
            tactic.prefill,
        ),
        "decode": _variant(
            decode_kernel,
            attention | partial,
            _attention_constants(problem, tactic.decode) | no_sinks | no_slopes | {"SPLITS": tactic.splits},
            tactic.decode,
        ),
    }
    if tactic.splits > 1:
        kept = ("out_ptr", "seq_lens_ptr", "query_start_loc_ptr", "sinks_ptr", "v_scale", "window")
        signature = partial | {name: attention[name] for name in kept if name in attention}
        variants["reduce"] = _variant(reduce_kernel, signature, _reduce_constants(problem, tactic) | no_sinks)
    return variants


def report_variants() -> Iterator[KernelVariant]:
    """Default tactics of a common shape: 32 query heads on 8 KV heads, pages of 32, decode steps of 8 sequences."""
    for head_dim in (64, 128):
        for cache_dtype in (torch.float16, torch.float8_e4m3fn):
            for arch in ARCHITECTURES:
                problem = Problem(32, 8, head_dim, 32, torch.float16, cache_dtype, arch)
                tactic = default_tactic(problem, 8, 8)
                for name, variant in kernel_variants(problem, tactic).items():
                    cache = str(cache_dtype).removeprefix("torch.")
                    if name == "reduce" and cache_dtype != torch.float16:
                        continue  # it reads no cache
                    yield replace(
                        variant,
                        name=f"paged_attention {name}, head {head_dim}, {cache} cache",
                        is_hot=name in ("prefill", "decode"),
                        is_quick=head_dim == 128 and name in ("prefill", "decode"),
                        architectures=(arch,),
                    )


def _variant(
    kernel: Any, signature: dict[str, str], constants: dict[str, object], tile: Tile | None = None
) -> KernelVariant:
    tile = tile or Tile(0, 0, num_warps=4, num_stages=1)
    return KernelVariant(kernel.__name__, kernel, signature, constants, tile.num_warps, tile.num_stages)


def _cache_format(problem: Problem) -> int:
    if problem.cache_dtype == torch.int8:
        return int(INT8.value)
    if problem.cache_dtype == torch.float8_e4m3fn:
        native = problem.arch >= FIRST_FLOAT8_ARCHITECTURE
        return int((FLOAT8_NATIVE if native else FLOAT8).value)
    return int(PLAIN.value)


def _head_constants(problem: Problem) -> dict[str, object]:
    return {
        "NUM_KV_HEADS": problem.num_kv_heads,
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "PADDED_DIM": problem.padded_dim,
        "BLOCK_SIZE": problem.block_size,
        "HAS_WINDOW": problem.has_window,
    }


def _write_constants(problem: Problem) -> dict[str, object]:
    return {
        "ROW": problem.num_kv_heads * problem.head_dim,
        "OUT_ROW": problem.num_heads * problem.head_dim,
        "BLOCK_SIZE": problem.block_size,
        "CACHE": _cache_format(problem),
        "BLOCK": WRITE_BLOCK,
    }


def _is_staged(problem: Problem, tile: Tile) -> bool:
    """Whether K/V pass through shared memory once converted (`decode` of the pages).

    Asynchronous products read them from there in any case. Warps divide the rows of tiles from 64 on, the keys of
    smaller ones, of which none is converted twice. With heads of 256 the spills would cost more than the conversions.
    """
    return (
        problem.converts
        and not problem.is_asynchronous
        and problem.arch != INTERPRETER
        and tile.block_m >= 64
        and problem.padded_dim <= 128
    )


def _attention_constants(problem: Problem, tile: Tile) -> dict[str, object]:
    return _head_constants(problem) | {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CACHE": _cache_format(problem),
        "STAGED": _is_staged(problem, tile),
        "HAS_SOFT_CAP": problem.has_soft_cap,
    }


def _reduce_constants(problem: Problem, tactic: Tactic) -> dict[str, object]:
    tile = tactic.decode
    return _head_constants(problem) | {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SPLITS": tactic.splits,
    }


def _rows(tensor: Tensor) -> Tensor:
    """[T, H, D] whose tokens are rows, which may be parts of longer ones. Raises `ValueError` otherwise."""
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"a token's heads must be contiguous: strides {tensor.stride()}")
    return tensor


def _raw(cache: Tensor) -> Tensor:
    """The cache as the kernels take it."""
    if not cache.is_contiguous():
        raise ValueError(f"caches must be contiguous: strides {cache.stride()}")
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
