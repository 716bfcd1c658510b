"""Tactics of the quantised linear layers on NVIDIA GPUs. Pure: imports no Triton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .workspace import Layout

# More rows than this are computed in float32 parts only at a cost above that of reading the weights.
MAX_SPLIT_ROWS = 64
_FULL_GPU_PROGRAMS = 256  # about two per multiprocessor of a large GPU


@dataclass(frozen=True, slots=True)
class Tactic:
    """A tile of `block_m` rows, `block_n` output and `block_k` input features; split_k programs per tile."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    def grid(self, rows: int, out_features: int) -> tuple[int, int, int]:
        """Programs of the product's kernel."""
        return -(-rows // self.block_m), -(-out_features // self.block_n), self.split_k

    def parts(self, rows: int, out_features: int) -> Layout:
        """Scratch for the `parts` that `split_k_triton.py` adds up, if there are any."""
        if self.split_k == 1:
            return {}
        return {"parts": ((self.split_k, rows, out_features), torch.float32)}

    def can_split(self, rows: int, in_features: int) -> bool:
        """Splits are for few rows, and there is no more of them than tiles of input features."""
        return self.split_k == 1 or (
            rows <= MAX_SPLIT_ROWS and (self.split_k - 1) * self.block_k < in_features
        )


def rows_to_size(rows: int) -> Iterable[int]:
    """Among calls of up to `rows` rows with default tactics, one of these takes the most scratch memory.

    Without splits it grows with the rows; how far fewer rows are split does not.
    """
    return {*range(1, min(rows, MAX_SPLIT_ROWS) + 1), rows}


def default_of(tactics: Iterable[Tactic], rows: int, out_features: int) -> Tactic:
    """A reasonable choice without measuring, of those that can be used: the smallest tile of rows that holds them, then
    as many programs as keep a large GPU busy, then the deepest tile."""
    usable = list(tactics)
    holding = [tactic.block_m for tactic in usable if tactic.block_m >= rows]
    block_m = min(holding) if holding else max(tactic.block_m for tactic in usable)

    def preference(tactic: Tactic) -> tuple[int, int, int]:
        row_tiles, column_tiles, split_k = tactic.grid(rows, out_features)
        return -abs(row_tiles * column_tiles * split_k - _FULL_GPU_PROGRAMS), tactic.block_k, -split_k

    return max((tactic for tactic in usable if tactic.block_m == block_m), key=preference)
