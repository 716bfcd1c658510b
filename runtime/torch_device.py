"""What an executor on torch tensors needs of a GPU besides tensors: pinned memory, a copy to wait for, captured graphs.

`TorchGpu` is all of the `cuda` target that only a GPU can run; tests put the CPU in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ..errors import EngineError


class TorchDevice(Protocol):
    """Work runs in the order in which it was enqueued, on torch's current stream."""

    @property
    def device(self) -> torch.device: ...

    def free_bytes(self) -> int: ...

    def allocate_staging(self, num_bytes: int) -> Tensor:
        """uint8 `[num_bytes]` in host memory, from which the device copies by itself."""
        ...

    def upload(self, staging: Tensor, destination: Tensor) -> None:
        """Enqueue a copy of `staging`, which must not be written until `wait_for_upload` has returned."""
        ...

    def wait_for_upload(self) -> None:
        """Block until the last upload is done, not for what was enqueued after it."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Record what `enqueue` enqueues, without running it; the result enqueues it again, on the same tensors.

        `enqueue` has run once before, so that nothing is loaded or compiled in it any more. Raises `EngineError` when
        it cannot be captured.
        """
        ...

    def faults(self) -> AbstractContextManager[None]:
        """Torch's errors about the device within it become `EngineError`."""
        ...

    def synchronize(self) -> None:
        """Block until all work is done. Raises `EngineError` when some of it failed."""
        ...

    def close(self) -> None:
        """Wait for all work and give back unused memory. May be called again."""
        ...


class TorchGpu:
    """`TorchDevice` on NVIDIA GPU `index`."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Captured graphs run one at a time, so they share the memory for what they compute on the way.
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: cuBLAS keeps a workspace for each stream that it has seen.
        self._capturing = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return self._device

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def allocate_staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, staging: Tensor, destination: Tensor) -> None:
        destination.copy_(staging, non_blocking=True)
        self._uploaded.record()

    def wait_for_upload(self) -> None:
        self._uploaded.synchronize()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), self._capturing
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.faults(), torch.cuda.stream(stream):
            # Not torch.cuda.graph: it synchronises the device and empties the allocator's cache. Other threads may
            # go on using CUDA: only this one is held to what a capture forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph.replay

    def faults(self) -> AbstractContextManager[None]:
        return typed_faults()

    def synchronize(self) -> None:
        with self.faults():
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        with self.faults():
            try:
                torch.cuda.synchronize(self._device)
            finally:
                torch.cuda.empty_cache()


@contextmanager
def typed_faults() -> Iterator[None]:
    """`TorchDevice.faults`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"the GPU has too little memory for this step ({_first_line(error)}); lower kv_cache_memory"
        ) from error
    except RuntimeError as error:
        raise EngineError(f"the GPU failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
