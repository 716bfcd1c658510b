"""Optimisation profiles of a TensorRT engine, derived from the limits that a user gives.

An engine is built for ranges of shapes, and its kernels are chosen for the `opt` shape of a profile. Two profiles cover
every step that the scheduler can plan:

    decode   each sequence advances by one token: T = B
    mixed    prompts, chunks of prompts and decodes together: T up to max_step_tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import BuildError
from .bundle import Limits

if TYPE_CHECKING:
    from .export import KVGeometry

# TensorRT counts the elements of a tensor in 31 bits.
_MAX_ELEMENTS = 2**31 - 1
# Contexts of this many tokens are what decode kernels are chosen for, where the model can have them.
_TYPICAL_CONTEXT = 1024

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Smallest, typical and largest shape of one input. Raises `BuildError` unless min <= opt <= max in each size."""

    name: str
    min: Shape
    opt: Shape
    max: Shape

    def __post_init__(self) -> None:
        sizes = zip(self.min, self.opt, self.max, strict=True)
        if any(not 0 < low <= typical <= high for low, typical, high in sizes):
            raise BuildError(
                f"{self.name}: the shapes of its profile are not min <= opt <= max: {self.min}, {self.opt}, {self.max}"
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile and, for people, what it is for."""

    name: str
    purpose: str
    shapes: Mapping[str, ShapeRange]

    def to_json(self) -> dict[str, object]:
        shapes = {s.name: [list(s.min), list(s.opt), list(s.max)] for s in self.shapes.values()}
        return {"name": self.name, "shapes": shapes}


def derive_profiles(
    limits: Limits, geometry: Sequence[KVGeometry], num_blocks: int
) -> tuple[Profile, Profile]:
    """The decode and the mixed profile of `limits`; pages are `[num_blocks, block_size, Hkv, D]`.

    The number of pages may later be chosen anew, between 1 and what a tensor can hold.
    """
    batch, tokens = limits.max_batch_size, limits.max_step_tokens
    typical_batch = max(1, batch // 2)
    decode = Profile(
        "decode",
        f"one token of each sequence, 1 to {batch} sequences; kernels are chosen for {typical_batch}",
        _shapes(
            limits, geometry, num_blocks, tokens=(1, typical_batch, batch), rows=(1, typical_batch, batch)
        ),
    )
    mixed = Profile(
        "mixed",
        f"prompts, chunks and decodes, 1 to {tokens} tokens; kernels are chosen for a full step",
        # Rows: one for each sequence, or all when the log-probabilities of a prompt are wanted.
        _shapes(limits, geometry, num_blocks, tokens=(1, tokens, tokens), rows=(1, typical_batch, tokens)),
    )
    return decode, mixed


def _shapes(
    limits: Limits,
    geometry: Sequence[KVGeometry],
    num_blocks: int,
    *,
    tokens: tuple[int, int, int],
    rows: tuple[int, int, int],
) -> dict[str, ShapeRange]:
    batch, pages = limits.max_batch_size, limits.max_blocks_per_sequence
    typical_batch, typical_pages = max(1, batch // 2), min(pages, -(-_TYPICAL_CONTEXT // limits.block_size))
    low, typical, high = tokens
    ranges = [
        ShapeRange("input_ids", (1, low), (1, typical), (1, high)),
        ShapeRange("positions", (1, low), (1, typical), (1, high)),
        ShapeRange("block_table", (1, 1), (typical_batch, typical_pages), (batch, pages)),
        ShapeRange("seq_lens", (1,), (typical_batch,), (batch,)),
        ShapeRange("query_start_loc", (2,), (typical_batch + 1,), (batch + 1,)),
        ShapeRange("logits_rows", (rows[0],), (rows[1],), (rows[2],)),
    ]
    for kind in ("k_caches", "v_caches"):
        for layer, pages_of in enumerate(geometry):
            page = (limits.block_size, pages_of.num_heads, pages_of.head_dim)
            most = _MAX_ELEMENTS // (page[0] * page[1] * page[2])
            if num_blocks > most:
                raise BuildError(
                    f"kv_cache_bytes: {num_blocks} blocks are more than the {most} that one tensor can hold; lower it"
                )
            ranges.append(ShapeRange(f"{kind}_{layer}", (1, *page), (num_blocks, *page), (most, *page)))
    return {r.name: r for r in ranges}
