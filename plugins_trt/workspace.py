"""Scratch memory of an operator: tensors that lie one after the other in one block.

What an operator needs is a mapping of names to (shape, dtype), a pure function of its problem and tactic. A plugin asks
TensorRT for `num_bytes` of it, so that memory plans count it, and the launcher cuts the block with `carve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

# Of every tensor within the block, so that kernels read whole cache lines. A multiple of every itemsize.
_ALIGNMENT = 256


def num_bytes(layout: Layout) -> int:
    """Bytes of the block, a multiple of 256."""
    return sum(_size(shape, dtype) for shape, dtype in layout.values())


def carve(layout: Layout, block: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """The tensors of `layout`, uninitialised: in the contiguous `block`, or allocated on `device` if it is None.

    Raises `ValueError` if the block is smaller than `num_bytes`.
    """
    if block is None:
        return {
            name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()
        }
    free = block.view(torch.uint8)
    if free.numel() < num_bytes(layout):
        raise ValueError(f"workspace: {free.numel()} bytes, {num_bytes(layout)} are needed")
    tensors, start = {}, 0
    for name, (shape, dtype) in layout.items():
        length = math.prod(shape) * dtype.itemsize
        tensors[name] = free[start : start + length].view(dtype).view(shape)
        start += _size(shape, dtype)
    return tensors


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
