"""Paged attention on NVIDIA GPUs: problems, the tactics for them, and the launches' sizes. Pure: imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from .architectures import shared_memory_limit

QUERY_DTYPES = (torch.float16, torch.bfloat16)
CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
BLOCK_SIZES = (16, 32, 64)
MAX_HEAD_DIM = 256
MAX_DECODE_ROWS = 16  # of a sequence, for which the default tactic has a decode tile
_FULL_GPU_PROGRAMS = 256  # about two per multiprocessor of a large GPU
_BARRIER_BYTES = 1024  # of asynchronous copies and products, at most
WRITE_BLOCK = 1024  # elements of a token's row that one program writes


@dataclass(frozen=True, slots=True)
class Problem:
    """What a model, a cache and a device settle, and the kernels are compiled for.

    `arch`: see `architectures.py`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    arch: int
    has_window: bool = False
    has_soft_cap: bool = False
    has_sinks: bool = False
    has_alibi: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        return _power_of_two(self.head_dim)

    @property
    def converts(self) -> bool:
        """Whether K/V must be converted before they can be multiplied."""
        return self.cache_dtype != self.query_dtype

    @property
    def is_asynchronous(self) -> bool:
        """Whether matrix products run beside the warps, on operands in shared memory."""
        return 90 <= self.arch < 120


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows (query tokens x query heads of a KV head) and keys that one program holds at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tactic:
    """Tile shapes of both kernels, and over how many programs a decode tile's context is split at most."""

    prefill: Tile
    decode: Tile
    splits: int

    def decode_rows(self, problem: Problem) -> int:
        """Sequences of at most this many rows are the decode kernel's."""
        return self.decode.block_m // problem.group


_PREFILL_TILES = (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2))
_DECODE_TILES = (
    Tile(16, 64, 4, 3),
    Tile(16, 32, 4, 3),
    Tile(32, 64, 4, 3),
    Tile(64, 32, 8, 2),
    Tile(128, 32, 8, 2),
)
_SPLITS = (1, 4, 16)
TACTICS = tuple(Tactic(*parts) for parts in product(_PREFILL_TILES, _DECODE_TILES, _SPLITS))


def unsupported_reason(problem: Problem) -> str | None:
    """Why no tactic computes the problem, or None."""
    if problem.query_dtype not in QUERY_DTYPES:
        return f"queries must be float16 or bfloat16, not {problem.query_dtype}"
    if problem.cache_dtype not in CACHE_DTYPES:
        return f"caches must be float16, bfloat16, float8_e4m3fn or int8, not {problem.cache_dtype}"
    if problem.block_size not in BLOCK_SIZES:
        return f"pages must hold 16, 32 or 64 tokens, not {problem.block_size}"
    if problem.num_heads % problem.num_kv_heads:
        return f"{problem.num_heads} query heads cannot share {problem.num_kv_heads} KV heads evenly"
    if problem.head_dim % 16 or not 0 < problem.head_dim <= MAX_HEAD_DIM:
        return f"heads must have a multiple of 16 elements, at most {MAX_HEAD_DIM}, not {problem.head_dim}"
    if not any(supports(tactic, problem) for tactic in TACTICS):
        return f"no tile holds {problem.group} query heads per KV head of {problem.head_dim} elements"
    return None


def supports(tactic: Tactic, problem: Problem) -> bool:
    """Whether the kernels of `tactic` hold the problem's heads in their rows and its tiles in shared memory."""
    limit = shared_memory_limit(problem.arch)
    needs = ((tactic.prefill, problem.query_dtype), (tactic.decode, torch.float32))
    return all(
        tile.block_m >= problem.group and shared_memory(tile, problem, results) <= limit
        for tile, results in needs
    )


def shared_memory(tile: Tile, problem: Problem, results: torch.dtype) -> int:
    """Upper bound of the bytes of shared memory that a kernel takes.

    In the loop: queries, K/V tiles of all stages in flight, one K/V tile as it is multiplied if the cache holds it
    otherwise, and the weights between the products, unless each warp multiplies what it has. After it: results of type
    `results` on their way to rows.
    """
    elements = tile.block_n * problem.padded_dim
    # Asynchronous products may still read a buffer while the next but one is being filled.
    buffers = tile.num_stages - (not problem.is_asynchronous)
    stored = 2 * elements * problem.cache_dtype.itemsize * buffers
    converted = 2 * elements * 2 if problem.converts else 0
    queries = tile.block_m * problem.padded_dim * 2
    has_whole_rows = tile.block_m >= 128 and problem.padded_dim <= 128
    weights = 0 if has_whole_rows else tile.block_m * tile.block_n * 2
    written = tile.block_m * problem.padded_dim * results.itemsize
    return max(stored + converted + queries + weights, written) + _BARRIER_BYTES * (problem.arch >= 90)


def default_tactic(problem: Problem, num_tokens: int, num_sequences: int) -> Tactic:
    """By shapes alone: a decode tile for the mean rows of a sequence, splits until a large GPU has work.

    Raises `ValueError` with the reason if no tactic supports the problem.
    """
    fitting = [t for t in TACTICS if supports(t, problem)]
    fitting.sort(key=lambda t: _is_register_bound(t, problem))
    if not fitting:
        raise ValueError(unsupported_reason(problem))
    rows = -(-num_tokens // max(num_sequences, 1))
    wanted = problem.group * (rows if rows <= MAX_DECODE_ROWS else 1)
    block_m = min(max(t.decode.block_m for t in fitting), wanted)
    programs = num_sequences * problem.num_kv_heads
    splits = next((s for s in _SPLITS if s * programs >= _FULL_GPU_PROGRAMS), _SPLITS[-1])
    return next(t for t in fitting if t.decode.block_m >= block_m and t.splits == splits)


def _is_register_bound(tactic: Tactic, problem: Problem) -> bool:
    """Whether a tile is likely to spill, from what `scripts/kernel_report.py` shows."""
    prefill, decode, dim = tactic.prefill, tactic.decode, problem.padded_dim
    if problem.is_asynchronous:
        # For 10.0 the assembler confines itself to 128 registers where results are small.
        needs_narrow_tiles = problem.arch >= 100 and dim <= 64
    else:
        # Products read K/V from registers, beside those that convert or mask them.
        needs_narrow_tiles = problem.converts or dim != problem.head_dim
    return (
        prefill.block_m * dim > 128 * 128  # results
        or (needs_narrow_tiles and prefill.block_n > 32)
        or (decode.block_m > 16 and decode.block_n * dim > 64 * 128)  # K/V, whole in each warp
    )


def workspace_elements(tactic: Tactic, problem: Problem, num_sequences: int) -> tuple[int, int]:
    """float32 elements of the partial results and of their statistics.

    partial [B, Hkv, splits, block_m, D]      stats [B, Hkv, splits, block_m, 2]
    """
    if tactic.splits == 1:
        return 0, 0
    rows = num_sequences * problem.num_kv_heads * tactic.splits * tactic.decode.block_m
    return rows * problem.head_dim, rows * 2


def write_grid(problem: Problem, num_tokens: int) -> tuple[int, int]:
    return num_tokens, -(-problem.num_kv_heads * problem.head_dim // WRITE_BLOCK)


def prefill_grid(problem: Problem, tile: Tile, num_tokens: int, num_sequences: int) -> tuple[int, int]:
    """Enough tiles however the tokens are spread over the sequences (`find_sequence`)."""
    return num_tokens // (tile.block_m // problem.group) + num_sequences, problem.num_kv_heads


def decode_grid(problem: Problem, tactic: Tactic, num_sequences: int) -> tuple[int, int, int]:
    return tactic.splits, problem.num_kv_heads, num_sequences


def reduce_grid(
    problem: Problem, tactic: Tactic, num_tokens: int, num_sequences: int
) -> tuple[int, int, int]:
    return problem.num_heads, min(tactic.decode_rows(problem), num_tokens), num_sequences


def _power_of_two(number: int) -> int:
    """The least that is not below `number`."""
    return 1 << (number - 1).bit_length()
