"""`Device` on a CUDA GPU, through torch; no tensor arithmetic is done here.

Nothing here runs in the tests, which have no GPU: `tests/support/fake_cuda.py` stands in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..errors import EngineError
from .device import DeviceBuffer, Event, Graph, PinnedBuffer, Stream


def has_cuda() -> bool:
    """Whether there is a GPU that torch can use: a driver, a device, and a torch that was built for CUDA."""
    return torch.cuda.is_available()


class CudaDevice:
    """GPU `index`. Buffers are found by their address, which is how TensorRT knows them too."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        self._tensors: dict[int, Tensor] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._events: list[torch.cuda.Event] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._num_captures = 0
        # Captured graphs run one at a time, so they share the memory for what they compute on the way.
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def compute_capability(self) -> str:
        major, minor = torch.cuda.get_device_capability(self._device)
        return f"{major}.{minor}"

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def allocate(self, num_bytes: int) -> DeviceBuffer:
        tensor = self._allocate(
            lambda: torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self._device)
        )
        return DeviceBuffer(tensor.data_ptr(), num_bytes)

    def allocate_pinned(self, num_bytes: int) -> PinnedBuffer:
        tensor = self._allocate(lambda: torch.empty(max(num_bytes, 1), dtype=torch.uint8, pin_memory=True))
        return PinnedBuffer(tensor.data_ptr(), num_bytes)

    def view(self, buffer: PinnedBuffer) -> np.ndarray:
        return self._tensors[buffer.address].numpy()

    def create_stream(self) -> Stream:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._streams[stream.cuda_stream] = stream
        return Stream(stream.cuda_stream)

    def tensor(self, buffer: DeviceBuffer, dtype: str, shape: tuple[int, ...]) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        num_bytes = kind.itemsize * math.prod(shape)
        return self._tensors[buffer.address][:num_bytes].view(kind).view(shape)

    def reserve(self, num_bytes: int, stream: Stream) -> None:
        # What is given back here torch keeps for this stream, and splits when it allocates there again.
        with torch.cuda.stream(self._streams[stream.handle]):
            address = self.allocate(num_bytes).address
            del self._tensors[address]

    def run(self, work: Callable[..., None], buffers: Seq[DeviceBuffer], stream: Stream) -> None:
        try:
            with _faults(), torch.cuda.stream(self._streams[stream.handle]):
                work(*(self._tensors[buffer.address] for buffer in buffers))
        except torch.cuda.OutOfMemoryError as error:
            raise EngineError(f"the GPU has no memory left for sampling: {_first_line(error)}") from error

    def read(self, source: DeviceBuffer, num_bytes: int, stream: Stream) -> np.ndarray:
        with _faults(), torch.cuda.stream(self._streams[stream.handle]):
            content: np.ndarray = self._tensors[source.address][:num_bytes].cpu().numpy()
        return content

    def copy_to_device(
        self, source: PinnedBuffer, destination: DeviceBuffer, num_bytes: int, stream: Stream
    ) -> None:
        self._copy(source.address, 0, destination.address, 0, num_bytes, stream)

    def copy_to_host(
        self, source: DeviceBuffer, destination: PinnedBuffer, num_bytes: int, stream: Stream
    ) -> None:
        self._copy(source.address, 0, destination.address, 0, num_bytes, stream)

    def copy_within(
        self, buffer: DeviceBuffer, source: int, destination: int, num_bytes: int, stream: Stream
    ) -> None:
        self._copy(buffer.address, source, buffer.address, destination, num_bytes, stream)

    def create_event(self) -> Event:
        self._events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        return Event(len(self._events) - 1)

    def record(self, event: Event, stream: Stream) -> None:
        with _faults():
            self._events[event].record(self._streams[stream.handle])

    def wait(self, event: Event) -> None:
        with _faults():
            self._events[event].synchronize()

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with _faults(), torch.cuda.stream(self._streams[stream.handle]):
            # Not torch.cuda.graph: it synchronises the device and empties the allocator's cache. Other threads may
            # go on using CUDA: only this one is held to what a capture forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
        self._num_captures += 1
        self._graphs[self._num_captures] = graph
        return Graph(self._num_captures)

    def launch(self, graph: Graph, stream: Stream) -> None:
        with _faults(), torch.cuda.stream(self._streams[stream.handle]):
            self._graphs[graph].replay()

    def destroy(self, graph: Graph) -> None:
        del self._graphs[graph]

    def close(self) -> None:
        try:
            with _faults():
                for stream in self._streams.values():
                    stream.synchronize()
        finally:
            self._graphs.clear()
            self._events.clear()
            self._streams.clear()
            self._tensors.clear()
            torch.cuda.empty_cache()

    def _allocate(self, make: Callable[[], Tensor]) -> Tensor:
        try:
            with _faults():
                tensor = make()
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(_first_line(error)) from error
        self._tensors[tensor.data_ptr()] = tensor
        return tensor

    def _copy(
        self, source: int, start: int, destination: int, where: int, num_bytes: int, stream: Stream
    ) -> None:
        origin, target = self._tensors[source], self._tensors[destination]
        with _faults(), torch.cuda.stream(self._streams[stream.handle]):
            target[where : where + num_bytes].copy_(origin[start : start + num_bytes], non_blocking=True)


@contextmanager
def _faults() -> Iterator[None]:
    """torch's errors about the device as `EngineError`, all but a failed allocation."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise EngineError(f"the GPU failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
