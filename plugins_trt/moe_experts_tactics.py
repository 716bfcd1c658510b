"""`moe_experts` on NVIDIA GPUs: problems, the tactics for them, and the launches' sizes. Pure: imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .moe_experts import FLOAT, FP8, INT4
from .workspace import Layout, num_bytes

GROUP_BLOCK = 1024  # routed rows that one program looks through at a time
SUM_BLOCK = 256  # outputs that one program adds up


@dataclass(frozen=True, slots=True)
class Tactic:
    """Tiles of both products: `block_m` routed rows of one expert, `block_n` output and `block_k` input features."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def blocks(self) -> dict[str, object]:
        """Constants of the products' kernels."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}

    def options(self) -> dict[str, object]:
        """Keyword arguments of their launches."""
        return {**self.blocks(), "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True)
class Problem:
    """One call. A routed row is a token on its way to one of its `top_k` experts.

    `form` of the stacks, and `group_size` if that is INT4.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    form: str = FLOAT
    group_size: int = -1

    @property
    def rows(self) -> int:
        return self.num_tokens * self.top_k

    def max_tiles(self, block_m: int) -> int:
        """As many tiles of rows as there can be, however the rows are spread over the experts."""
        return self.rows // block_m + min(self.num_experts, self.rows)


# Each fits into the 99 KiB of shared memory of Ada and of consumer Blackwell.
TACTICS = (
    Tactic(16, 64, 64, 4, 4),
    Tactic(16, 128, 32, 4, 4),
    Tactic(32, 64, 64, 4, 4),
    Tactic(64, 64, 64, 4, 3),
    Tactic(64, 128, 32, 8, 3),
    Tactic(128, 64, 32, 8, 3),
)


def supports(tactic: Tactic, problem: Problem) -> bool:
    """Whether both sums of a tile (gate and up) fit into registers, and an int4 tile lies in one group."""
    if problem.form == INT4 and problem.group_size != -1 and problem.group_size % tactic.block_k:
        return False
    return problem.dtype != torch.float32 or tactic.block_m <= 32


def default_tactic(problem: Problem) -> Tactic:
    """The smallest tile that holds the mean number of rows of an expert."""
    usable = [tactic for tactic in TACTICS if supports(tactic, problem)]
    mean = problem.rows / problem.num_experts
    return next((tactic for tactic in usable if tactic.block_m >= mean), usable[-1])


def workspace_layout(problem: Problem, tactic: Tactic) -> Layout:
    """Scratch: rows grouped by expert (`moe_experts_rows_triton.py`), `hidden` `[R, I]` and `outputs` `[R, H]` in the
    dtype of x; FP8: what both products read, rounded, with a scale for each row."""
    rows, tokens = problem.rows, problem.num_tokens
    max_tiles = problem.max_tiles(tactic.block_m)
    layout = {
        "counts": ((problem.num_experts,), torch.int32),
        "tile_expert": ((max_tiles,), torch.int32),
        "tile_rows": ((max_tiles, tactic.block_m), torch.int32),
        "hidden": ((rows, problem.intermediate_size), problem.dtype),
        "outputs": ((rows, problem.hidden_size), problem.dtype),
    }
    if problem.form == FP8:
        layout |= {
            "x_values": ((tokens, problem.hidden_size), torch.float8_e4m3fn),
            "x_scale": ((tokens,), torch.float32),
            "hidden_values": ((rows, problem.intermediate_size), torch.float8_e4m3fn),
            "hidden_scale": ((rows,), torch.float32),
        }
    return layout


def workspace_bytes(problem: Problem, tactic: Tactic | None) -> int:
    """Enough for every call of at most `problem.num_tokens` with `tactic`; None: with the default one of each call."""
    # What a tactic needs grows with the tokens, and tactics differ little: in their lists of rows alone.
    tactics = [t for t in TACTICS if supports(t, problem)] if tactic is None else [tactic]
    return max(num_bytes(workspace_layout(problem, tactic)) for tactic in tactics)
