"""The second half of a matrix product whose inner dimension was split over programs: add the parts up.

    parts [SPLIT_K, M, N] float32  ->  out[m, n] = bias[n] + parts[0, m, n] + parts[1, m, n] + ...

The parts are added in their order, so that equal inputs give equal bits (atomics would not).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from .triton_compile import KernelVariant

BLOCK = 256


@triton.jit
def add_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, num_outputs, out_features,
    HAS_BIAS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per `BLOCK` of the `num_outputs` = M * N outputs."""
    output = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = output < num_outputs
    total = tl.full([BLOCK], 0.0, tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(parts_ptr + part * num_outputs + output, mask=valid, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output % out_features, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty), mask=valid)


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of `parts` `[SPLIT_K, M, N]` and the bias into the contiguous `out` of M * N elements."""
    split_k, _, out_features = parts.shape
    num_outputs = out.numel()
    add_parts_kernel[triton.cdiv(num_outputs, BLOCK),](
        parts, bias, out, num_outputs, out_features, HAS_BIAS=bias is not None, SPLIT_K=split_k, BLOCK=BLOCK
    )


def kernel_variant(split_k: int, dtype: str, *, has_bias: bool) -> KernelVariant:
    """`add_parts_kernel` for an output of `dtype` (`fp16`, `bf16` or `fp32`); the pointers are multiples of 16."""
    pointers = {"parts_ptr": "*fp32:16", "bias_ptr": f"*{dtype}:16", "out_ptr": f"*{dtype}:16"}
    constants: dict[str, object] = {"HAS_BIAS": has_bias, "SPLIT_K": split_k, "BLOCK": BLOCK}
    if not has_bias:
        del pointers["bias_ptr"]
        constants["bias_ptr"] = None
    signature = pointers | {"num_outputs": "i32", "out_features": "i32"}
    name = f"split_k add_parts {dtype} split {split_k}{' bias' if has_bias else ''}"
    return KernelVariant(name, add_parts_kernel, signature, constants, 4, 3)


def report_variants() -> Iterator[KernelVariant]:
    for has_bias in (False, True):
        yield kernel_variant(8, "bf16", has_bias=has_bias)
