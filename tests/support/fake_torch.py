"""The fake device for tests that have torch, and what torch does on it: an operation that a GPU would wait for, or that
reaches memory which nobody said it would use, is a `Violation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pelton.runtime.device import DeviceBuffer, Stream

from .fake_cuda import FakeDevice, Memory, Violation

# The host needs a number, or a size, that only the device has.
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "is_nonzero", "bincount", "repeat_interleave",
}  # fmt: skip


# A list or an array becomes a tensor, which is a copy of its own to a GPU.
_UPLOAD = "lift_fresh"


class TorchFakeDevice(FakeDevice):
    """With `may_upload`, work may bring values of the host with it."""

    def __init__(self, *, may_upload: bool = False) -> None:
        super().__init__()
        self._waiting = _WAITING if may_upload else {*_WAITING, _UPLOAD}

    def tensor(self, buffer: DeviceBuffer, dtype: str, shape: tuple[int, ...]) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        memory = self.memory_at(buffer.address)
        num_bytes = kind.itemsize * math.prod(shape)
        return torch.from_numpy(memory.content)[:num_bytes].view(kind).view(shape)

    def run(self, work: Callable[..., None], buffers: Seq[DeviceBuffer], stream: Stream) -> None:
        declared = [self.memory_at(buffer.address) for buffer in buffers]

        def watched(*tensors: Tensor) -> None:
            with _Watch(self._waiting, self._memory, declared):
                work(*tensors)

        super().run(watched, buffers, stream)


class _Watch(TorchDispatchMode):
    def __init__(self, waiting: set[str], memories: Iterable[Memory], declared: Iterable[Memory]) -> None:
        super().__init__()
        self._waiting = waiting
        allowed = {id(memory) for memory in declared}
        self._forbidden = [
            (memory.content.ctypes.data, memory.content.ctypes.data + len(memory.content))
            for memory in memories
            if id(memory) not in allowed
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Seq[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in self._waiting:
            raise Violation(f"{name} waits for the device")
        if name in ("index", "index_put", "index_put_") and any(
            operand.dtype in (torch.bool, torch.uint8) for operand in operands[1:]
        ):
            raise Violation(f"{name} by a mask waits for the device")
        for operand in operands:
            address = operand.untyped_storage().data_ptr()
            if any(start <= address < end for start, end in self._forbidden):
                raise Violation(f"{name} uses memory that it was not given")
        return func(*args, **(kwargs or {}))
