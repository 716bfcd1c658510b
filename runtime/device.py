"""What an executor needs of an accelerator: memory, copies and work in stream order, events and captured graphs.

Handles are plain values; the device owns what they stand for. Work on a stream runs in the order in which it was
enqueued and, unless a method says otherwise, after the method has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np

Event = NewType("Event", int)
Graph = NewType("Graph", int)


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Memory of the device, aligned to 256 bytes."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PinnedBuffer:
    """Page-locked memory of the host, which the device copies from and to by itself."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """`handle` is a cudaStream_t; never the default stream."""

    handle: int


class Device(Protocol):
    """Raises `EngineError` when the device reports a fault, `MemoryError` when an allocation does not fit."""

    @property
    def compute_capability(self) -> str:
        """Such as `8.9`."""
        ...

    def free_bytes(self) -> int: ...

    def allocate(self, num_bytes: int) -> DeviceBuffer: ...

    def allocate_pinned(self, num_bytes: int) -> PinnedBuffer: ...

    def view(self, buffer: PinnedBuffer) -> np.ndarray:
        """The bytes as uint8. Take a new view for each use: no copy from or to the buffer may be in flight."""
        ...

    def tensor(self, buffer: DeviceBuffer, dtype: str, shape: tuple[int, ...]) -> Any:
        """A torch.Tensor on the first bytes of `buffer`. Only `run`'s work may look into it."""
        ...

    def create_stream(self) -> Stream: ...

    def reserve(self, num_bytes: int, stream: Stream) -> None:
        """Take this much memory for what torch allocates in `run` on `stream`."""
        ...

    def run(self, work: Callable[..., None], buffers: Seq[DeviceBuffer], stream: Stream) -> None:
        """Enqueue what torch does in `work`, which is called with all bytes of each of `buffers` as a uint8 tensor.

        `work` must not wait for the device, and use no other buffers.
        """
        ...

    def read(self, source: DeviceBuffer, num_bytes: int, stream: Stream) -> np.ndarray:
        """The first `num_bytes` as uint8 in ordinary memory. Blocks until all that is on `stream` now is done."""
        ...

    def copy_to_device(
        self, source: PinnedBuffer, destination: DeviceBuffer, num_bytes: int, stream: Stream
    ) -> None:
        """Enqueue a copy of the first `num_bytes`."""
        ...

    def copy_to_host(
        self, source: DeviceBuffer, destination: PinnedBuffer, num_bytes: int, stream: Stream
    ) -> None:
        """Enqueue a copy of the first `num_bytes`."""
        ...

    def copy_within(
        self, buffer: DeviceBuffer, source: int, destination: int, num_bytes: int, stream: Stream
    ) -> None:
        """Enqueue a copy of `num_bytes` from offset `source` to offset `destination`, which do not overlap."""
        ...

    def create_event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None:
        """Let `event` stand for everything that is on `stream` now."""
        ...

    def wait(self, event: Event) -> None:
        """Block until what `event` stands for is done."""
        ...

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """Record what `enqueue` puts on `stream` without running it. Raises what `enqueue` raises."""
        ...

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Enqueue the captured work, with the addresses of the capture."""
        ...

    def destroy(self, graph: Graph) -> None: ...

    def close(self) -> None:
        """Wait for all work, then give back graphs, events, streams and memory that are left. May be called twice."""
        ...
