"""`pelton::paged_attention` as a TensorRT plugin; the contract stands in `paged_attention.py`.

Inputs are the operator's tensors in its order. Sinks and ALiBi slopes, float32, follow each other without a gap: an
input cannot be left out in the middle, so the attributes `has_sinks` and `has_alibi_slopes` say which of them there
are.

Registering it needs no torch: what does is imported when TensorRT asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from .architectures import ARCHITECTURES
from .plugin import Described, Fields, Launch, Operator, Output

if TYPE_CHECKING:
    from torch import Tensor

    from .paged_attention_tactics import Problem, Tactic

_QUERY, _K_CACHE, _V_CACHE, _BLOCK_TABLE = 0, 3, 4, 5
_NUM_INPUTS = 8  # without sinks and slopes
_QUERY_DTYPES = ("float16", "bfloat16")
_CACHE_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "int8")
# Chosen by the shapes of each step; the tactics of fixed tiles follow it.
_BY_SHAPES = 1
_FLOAT32_BYTES = 4


def _accepts(inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    query, key, value, k_cache, v_cache, *others = inputs
    num_indices = _NUM_INPUTS - _BLOCK_TABLE
    return (
        query in _QUERY_DTYPES
        and key == value == query
        and k_cache in _CACHE_DTYPES
        and v_cache == k_cache
        and others[:num_indices] == ["int32"] * num_indices
        and all(dtype == "float32" for dtype in others[num_indices:])
        and list(outputs) == [query, k_cache, v_cache]
    )


def _problem(inputs: Sequence[Described], fields: Fields, arch: int) -> Problem:
    import torch

    from .paged_attention_tactics import Problem

    query, k_cache = inputs[_QUERY], inputs[_K_CACHE]
    return Problem(
        num_heads=query.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=query.shape[2],
        block_size=k_cache.shape[1],
        query_dtype=getattr(torch, query.dtype),
        cache_dtype=getattr(torch, k_cache.dtype),
        arch=arch,
        has_window=fields["window"] > 0,
        has_soft_cap=fields["soft_cap"] > 0,
        has_sinks=bool(fields["has_sinks"]),
        has_alibi=bool(fields["has_alibi_slopes"]),
    )


def _tactics(inputs: Sequence[Described], fields: Fields) -> list[int]:
    """A plan may be for several architectures: tiles must fit all of them."""
    from .paged_attention_tactics import TACTICS, supports

    problems = [_problem(inputs, fields, arch) for arch in ARCHITECTURES]
    fixed = [
        _BY_SHAPES + 1 + i for i, tactic in enumerate(TACTICS) if all(supports(tactic, p) for p in problems)
    ]
    return [_BY_SHAPES, *fixed]


def _workspace(inputs: Sequence[Described], fields: Fields, tactic: int) -> int:
    from .paged_attention_tactics import TACTICS, workspace_elements

    tokens, sequences = inputs[_QUERY].shape[0], inputs[_BLOCK_TABLE].shape[0]
    elements = 0
    for arch in ARCHITECTURES:
        problem = _problem(inputs, fields, arch)
        if tactic != _BY_SHAPES:
            elements = max(elements, sum(workspace_elements(TACTICS[tactic - 2], problem, sequences)))
            continue
        for batch in range(1, sequences + 1):
            for rows in {1, *(min(r, tokens // batch) for r in (2, 4, 8, 16))} - {0}:
                chosen = _choose(problem, rows * batch, batch)
                elements = max(elements, sum(workspace_elements(chosen, problem, batch)))
    return elements * _FLOAT32_BYTES


def _enqueue(launch: Launch) -> None:
    from .paged_attention_tactics import TACTICS, workspace_elements
    from .paged_attention_triton import Scoring, paged_attention_, problem_of

    fields = launch.fields
    with launch.on_stream():
        tensors = [buffer.as_tensor() for buffer in launch.inputs]
        query, key, value, k_cache, v_cache, *indices = tensors[:_NUM_INPUTS]
        sinks, alibi_slopes = _per_head(tensors[_NUM_INPUTS:], fields)
        scoring = Scoring(
            float(fields["scale"]), int(fields["window"]), float(fields["soft_cap"]), sinks, alibi_slopes
        )
        if launch.is_timing:
            indices = _typical_step(query.shape[0], k_cache, indices[0])
        block_table, seq_lens, query_start_loc = indices
        problem, sequences = problem_of(query, k_cache, scoring), block_table.shape[0]
        if launch.tactic > _BY_SHAPES:
            tactic = TACTICS[launch.tactic - 2]
        else:
            tactic = _choose(problem, query.shape[0], sequences)
        paged_attention_(
            launch.outputs[0].as_tensor(), query, key, value, k_cache, v_cache, block_table, seq_lens,
            query_start_loc, scoring.scale, scoring.window, scoring.soft_cap, sinks, alibi_slopes,
            float(fields["k_scale"]), float(fields["v_scale"]),
            tactic=tactic, workspace=launch.workspace_tensor(sum(workspace_elements(tactic, problem, sequences))),
        )  # fmt: skip


def _per_head(tensors: Sequence[Tensor], fields: Fields) -> tuple[Tensor | None, Tensor | None]:
    """Sinks and ALiBi slopes among the inputs that follow the others."""
    rest = iter(tensors)
    sinks = next(rest) if fields["has_sinks"] else None
    return sinks, next(rest) if fields["has_alibi_slopes"] else None


@cache
def _choose(problem: Problem, num_tokens: int, num_sequences: int) -> Tactic:
    """`default_tactic` costs as much time as a launch."""
    from .paged_attention_tactics import default_tactic

    return default_tactic(problem, num_tokens, num_sequences)


def _typical_step(num_tokens: int, k_cache: Tensor, block_table: Tensor) -> list[Tensor]:
    """Indices of a step of these sizes: kernels follow them, so they must not be garbage when a tactic is timed.

    Tokens are shared out evenly, and each sequence has as long a context as its row of the table can hold.
    """
    import torch

    batch, width = block_table.shape
    num_blocks, block_size = k_cache.shape[:2]
    like: dict[str, Any] = {"dtype": torch.int32, "device": block_table.device}
    pages = torch.arange(batch * width, **like).remainder(num_blocks).view(batch, width)
    starts = (torch.arange(batch + 1, **like) * num_tokens).div(batch, rounding_mode="floor").int()
    # No sequence has more rows than positions.
    longest = min(width * block_size, num_blocks * block_size)
    starts = starts.minimum(torch.arange(batch + 1, **like) * longest)
    return [pages, torch.full((batch,), longest, **like), starts]


PAGED_ATTENTION_PLUGIN = Operator(
    name="paged_attention",
    outputs=(
        Output(dtype_of=_QUERY, shape_of=_QUERY),
        Output(dtype_of=_K_CACHE, shape_of=_K_CACHE, alias=_K_CACHE),
        Output(dtype_of=_V_CACHE, shape_of=_V_CACHE, alias=_V_CACHE),
    ),
    fields={
        "scale": float,
        "window": int,
        "soft_cap": float,
        "k_scale": float,
        "v_scale": float,
        "has_sinks": int,
        "has_alibi_slopes": int,
    },
    accepts=_accepts,
    tactics=_tactics,
    workspace=_workspace,
    enqueue=_enqueue,
)
