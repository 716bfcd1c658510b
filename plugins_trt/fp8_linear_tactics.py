"""`fp8_linear` on NVIDIA GPUs: problems and the tactics for them. Pure: imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .linear_tactics import Tactic, default_of, rows_to_size
from .workspace import Layout, num_bytes

QUANTIZE_BLOCK = 1024  # features of a row that are quantised at a time

# Each fits into the 99 KiB of shared memory of Ada and of consumer Blackwell.
TACTICS = (
    *(
        Tactic(16, block_n, block_k, split_k, 4, 4)
        for block_n, block_k in ((64, 128), (64, 256), (128, 128))
        for split_k in (1, 2, 4, 8)
    ),
    Tactic(32, 64, 128, 1, 4, 4),
    Tactic(32, 64, 128, 4, 4, 4),
    Tactic(64, 64, 128, 1, 4, 4),
    Tactic(64, 128, 128, 1, 4, 3),
    Tactic(128, 128, 64, 1, 8, 4),
    Tactic(128, 128, 128, 1, 8, 3),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One call: `rows` is the product of all dimensions of x but the last."""

    rows: int
    out_features: int
    in_features: int


def supports(tactic: Tactic, problem: Problem) -> bool:
    return tactic.can_split(problem.rows, problem.in_features)


def default_tactic(problem: Problem) -> Tactic:
    usable = (tactic for tactic in TACTICS if supports(tactic, problem))
    return default_of(usable, problem.rows, problem.out_features)


def workspace_layout(problem: Problem, tactic: Tactic, *, is_static: bool) -> Layout:
    """Scratch: `quantised` x `[M, K]`, its `scale` `[M]` unless that is given, `parts` `[split_k, M, N]` of a split
    product."""
    scale: Layout = {} if is_static else {"scale": ((problem.rows,), torch.float32)}
    quantised = (problem.rows, problem.in_features), torch.float8_e4m3fn
    return {"quantised": quantised, **scale, **tactic.parts(problem.rows, problem.out_features)}


def workspace_bytes(problem: Problem, tactic: Tactic | None, *, is_static: bool) -> int:
    """Enough for every call of at most `problem.rows` rows with `tactic`; None: with the default one of each call."""
    if tactic is not None:
        return num_bytes(workspace_layout(problem, tactic, is_static=is_static))
    calls = (replace(problem, rows=rows) for rows in rows_to_size(problem.rows))
    return max(num_bytes(workspace_layout(call, default_tactic(call), is_static=is_static)) for call in calls)
