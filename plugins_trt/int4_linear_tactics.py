"""`int4_linear` on NVIDIA GPUs: problems and the tactics for them. Pure: imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .linear_tactics import Tactic, default_of, rows_to_size
from .workspace import Layout, num_bytes

# With more rows x is permuted by a kernel of its own: gathering would keep tiles of x from being copied as they lie.
MAX_GATHERED_ROWS = 16
PERMUTE_BLOCK = 512  # features of a row that one program permutes

# Each fits into the shared memory of every architecture.
TACTICS = (
    *(
        Tactic(16, block_n, block_k, split_k, 4, 4)
        for block_n, block_k in ((64, 128), (128, 64), (128, 32))
        for split_k in (1, 2, 4, 8)
    ),
    Tactic(32, 128, 64, 1, 4, 4),
    Tactic(32, 128, 32, 4, 4, 4),
    Tactic(64, 64, 32, 1, 8, 3),
    Tactic(64, 128, 64, 1, 8, 3),
    Tactic(128, 128, 32, 1, 8, 3),
    Tactic(128, 128, 64, 1, 8, 3),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One call: `rows` is the product of all dimensions of x but the last, `dtype` that of x."""

    rows: int
    out_features: int
    in_features: int
    group_size: int
    dtype: torch.dtype


def supports(tactic: Tactic, problem: Problem) -> bool:
    """Whether a tile lies in one group, its sums in registers, and no split is needless."""
    if problem.group_size != -1 and problem.group_size % tactic.block_k:
        return False
    if problem.dtype == torch.float32 and tactic.block_m * tactic.block_n > 64 * 64:
        return False  # three products per weight, of operands twice as large
    return tactic.can_split(problem.rows, problem.in_features)


def default_tactic(problem: Problem) -> Tactic:
    usable = (tactic for tactic in TACTICS if supports(tactic, problem))
    return default_of(usable, problem.rows, problem.out_features)


def workspace_layout(problem: Problem, tactic: Tactic, *, has_perm: bool) -> Layout:
    """Scratch: `permuted` x `[M, K]` where it is not gathered, `parts` `[split_k, M, N]` of a split product."""
    permuted: Layout = {}
    if has_perm and problem.rows > MAX_GATHERED_ROWS:
        permuted = {"permuted": ((problem.rows, problem.in_features), problem.dtype)}
    return {**permuted, **tactic.parts(problem.rows, problem.out_features)}


def workspace_bytes(problem: Problem, tactic: Tactic | None, *, has_perm: bool) -> int:
    """Enough for every call of at most `problem.rows` rows with `tactic`; None: with the default one of each call."""
    if tactic is not None:
        return num_bytes(workspace_layout(problem, tactic, has_perm=has_perm))
    calls = (replace(problem, rows=rows) for rows in rows_to_size(problem.rows))
    return max(num_bytes(workspace_layout(call, default_tactic(call), has_perm=has_perm)) for call in calls)
