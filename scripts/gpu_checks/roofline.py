"""The least time that an operation can take on a device, and how near the measured times come. Pure.

The least is what no implementation can do without: each input read from memory once, each output written once, each
product and sum of the result computed once. The roofline (Williams et al., "Roofline: an insightful visual performance
model", CACM 52(4), 2009) is the longer of both at the device's measured ceilings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .records import Timing

FLOPS_PER_PRODUCT = 2  # a multiplication and an addition


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to and from memory, and floating-point operations of the tensor cores, at the least."""

    num_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device was measured to reach. `flops_per_s` by the dtype that is multiplied."""

    bytes_per_s: float
    flops_per_s: Mapping[str, float]

    def floor(self, work: Work, products: str) -> float | None:
        """Seconds at the least; None if the ceiling of `products` is not known."""
        if products not in self.flops_per_s:
            return None
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s[products])


def attention_work(
    past: Sequence[int],
    new: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_bytes: int,
    cache_bytes: int,
    window: int = 0,
) -> Work:
    """One step of `paged_attention`; `query_bytes` and `cache_bytes` are those of an element.

    Queries, keys and values of the new tokens are read, the output and their K/V in the pages are written; of the
    pages, what any new token of the sequence sees is read.
    """
    rows = visible = scores = 0
    for before, count in zip(past, new, strict=True):
        if not count:
            continue
        first = max(0, before - window + 1) if window else 0
        rows += count
        visible += before + count - first
        seen = range(before + 1, before + count + 1)
        scores += sum(min(length, window) if window else length for length in seen)
    tokens = rows * head_dim * (2 * num_heads + 2 * num_kv_heads) * query_bytes
    pages = (visible + rows) * head_dim * 2 * num_kv_heads * cache_bytes
    return Work(tokens + pages, scores * num_heads * head_dim * 2 * FLOPS_PER_PRODUCT)


def linear_work(
    rows: int,
    out_features: int,
    in_features: int,
    *,
    weight_bits: int,
    activation_bytes: int,
    scale_bytes: int = 0,
) -> Work:
    """`[rows, in] @ [out, in]^T`; `scale_bytes`: all that is stored of the weight beside its elements."""
    weight = out_features * in_features * weight_bits // 8 + scale_bytes
    activations = rows * (in_features + out_features) * activation_bytes
    return Work(weight + activations, rows * out_features * in_features * FLOPS_PER_PRODUCT)


def int4_scale_bytes(out_features: int, in_features: int, group_size: int, *, has_zeros: bool) -> int:
    """float16 scales and int8 zero points of `int4_linear`'s groups."""
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    return groups * out_features * (2 + has_zeros)


def experts_work(
    num_tokens: int,
    top_k: int,
    num_busy_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    weight_bits: int,
    element_bytes: int,
    scale_bytes: int = 0,
) -> Work:
    """`moe_experts`: the weights of experts that have a row are read once, tokens read and written once.

    `scale_bytes`: all that is stored of one expert's weights beside their elements.
    """
    weight = 3 * hidden_size * intermediate_size * weight_bits // 8 + scale_bytes
    weights = num_busy_experts * weight
    tokens = (
        2 * num_tokens * hidden_size * element_bytes + num_tokens * top_k * 8
    )  # router weights and expert ids
    flops = num_tokens * top_k * 3 * hidden_size * intermediate_size * FLOPS_PER_PRODUCT
    return Work(weights + tokens, flops)


def rooflines(timings: Iterable[Timing], ceilings: Ceilings | None) -> list[dict[str, Any]]:
    """Per case, as JSON: the floor, Pelton's best and default tactic, what others took, and each tactic's time.

    A fraction is the floor over the time: 1 is the roofline. Results that are wrong do not count as best.
    """
    cases: dict[str, list[Timing]] = {}
    for timing in timings:
        cases.setdefault(timing.case, []).append(timing)
    return [_roofline(case, group, ceilings) for case, group in cases.items()]


def _roofline(case: str, timings: Sequence[Timing], ceilings: Ceilings | None) -> dict[str, Any]:
    first = timings[0]
    floor = None
    if ceilings is not None:
        floor = ceilings.floor(Work(first.num_bytes, first.flops), first.products)
    ours = [timing for timing in timings if timing.tactic is not None]
    right = [timing for timing in ours if timing.passed]
    best = min(right, key=lambda timing: timing.seconds, default=None)
    default = next((timing for timing in ours if timing.is_default), None)
    return {
        "case": case,
        "num_bytes": first.num_bytes,
        "flops": first.flops,
        "floor_us": None if floor is None else floor * 1e6,
        "best": None if best is None else _reached(best, floor),
        "default": None if default is None else _reached(default, floor),
        "others": {t.implementation: _reached(t, floor) for t in timings if t.tactic is None},
        "tactics_us": {str(t.tactic): t.seconds * 1e6 for t in sorted(ours, key=lambda t: t.seconds)},
    }


def _reached(timing: Timing, floor: float | None) -> dict[str, Any]:
    return {
        "tactic": timing.tactic,
        "us": timing.seconds * 1e6,
        "gb_per_s": timing.num_bytes / timing.seconds / 1e9,
        "tflop_per_s": timing.flops / timing.seconds / 1e12,
        "fraction": None if floor is None else floor / timing.seconds,
    }
