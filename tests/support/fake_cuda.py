"""A `Device` without a GPU that complains about what a GPU would punish at random.

What is enqueued runs when the host waits for it, and not before: who reads earlier finds what memory held.

Who has seen what is tracked with vector clocks (Fidge 1988, Mattern 1989): the host and each stream count what they
do, a stream knows what the host knew when it enqueued, and the host learns what a stream did by waiting for an event.
An access to memory that another party wrote, or a write to memory that another party used, without knowing of it is a
race.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pelton.runtime.device import DeviceBuffer, Event, Graph, PinnedBuffer, Stream

_HOST = 0
_GAP = 4096  # between buffers, so that an address past the end belongs to none
UNWRITTEN = 0xFF  # what fresh memory holds


class Violation(AssertionError):
    """Something that is undefined, or refused, on a real device."""


@dataclass
class Memory:
    """One allocation. `uses` are the latest counts of the parties that read or wrote it, `writer` the last writer."""

    address: int
    content: np.ndarray
    is_pinned: bool
    is_freed: bool = False
    writer: tuple[int, int] = (_HOST, 0)
    uses: Counter[int] = field(default_factory=Counter)


@dataclass
class _Work:
    """Something on a stream: what it reads and writes, and what it does."""

    name: str
    reads: list[Memory]
    writes: list[Memory]
    run: Callable[[], None]


class FakeDevice:
    """`log` names what was enqueued, in order; `num_waits` counts how often the host waited."""

    def __init__(self, capacity: int = 1 << 30, compute_capability: str = "8.9") -> None:
        self.capacity = capacity
        self.compute_capability = compute_capability
        self.log: list[str] = []
        self.num_waits = 0
        self.can_capture = True
        self.on_free: list[Callable[[Memory], None]] = []
        self._memory: list[Memory] = []
        self._num_reserved = 0
        self._pending: list[tuple[int, int, Callable[[], None]]] = []  # stream, its count, what it does
        self._known: dict[int, Counter[int]] = {_HOST: Counter()}
        self._events: list[Counter[int] | None] = []
        self._graphs: dict[int, list[_Work]] = {}
        self._capture: tuple[Stream, list[_Work]] | None = None

    @property
    def allocated_bytes(self) -> int:
        """What stands in buffers, and what is reserved."""
        held = sum(len(m.content) for m in self._memory if not (m.is_freed or m.is_pinned))
        return held + self._num_reserved

    @property
    def pinned_bytes(self) -> int:
        return sum(len(m.content) for m in self._memory if m.is_pinned and not m.is_freed)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def free_bytes(self) -> int:
        return self.capacity - self.allocated_bytes

    def allocate(self, num_bytes: int) -> DeviceBuffer:
        if num_bytes > self.free_bytes():
            raise MemoryError(f"{num_bytes} bytes")
        return DeviceBuffer(self._allocate(num_bytes, is_pinned=False), num_bytes)

    def allocate_pinned(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(self._allocate(num_bytes, is_pinned=True), num_bytes)

    def free(self, buffer: DeviceBuffer | PinnedBuffer) -> None:
        """No method of `Device`, which gives everything back at its end: what `close` does, and mistakes may do."""
        self._not_in_capture("free")
        memory = self.memory_at(buffer.address)
        self._check_idle(memory, "freed")
        for notify in self.on_free:
            notify(memory)
        memory.is_freed = True

    def view(self, buffer: PinnedBuffer) -> np.ndarray:
        """Counts as a write of the host: nothing on a stream may still use the buffer."""
        self._not_in_capture("view")
        memory = self.memory_at(buffer.address)
        self._check_idle(memory, "touched by the host")
        self._known[_HOST][_HOST] += 1
        memory.writer = (_HOST, self._known[_HOST][_HOST])
        return memory.content

    def create_stream(self) -> Stream:
        stream = Stream(0x5000 + len(self._known))
        self._known[stream.handle] = Counter()
        return stream

    def tensor(self, buffer: DeviceBuffer, dtype: str, shape: tuple[int, ...]) -> Any:
        """An array: tests that need torch have `fake_torch.py`."""
        num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
        memory = self.memory_at(buffer.address, max(num_bytes, 1))
        return memory.content[:num_bytes].view(dtype).reshape(shape)

    def reserve(self, num_bytes: int, stream: Stream) -> None:
        self._not_in_capture("reserve")
        if num_bytes > self.free_bytes():
            raise MemoryError(f"{num_bytes} bytes")
        self._num_reserved += num_bytes

    def run(self, work: Callable[..., None], buffers: Seq[DeviceBuffer], stream: Stream) -> None:
        """Takes each of `buffers` for read and written."""
        memories = [self.memory_at(buffer.address) for buffer in buffers]
        tensors = [self.tensor(buffer, "uint8", (buffer.num_bytes,)) for buffer in buffers]
        self.submit("torch", stream, memories, memories, lambda: work(*tensors))

    def read(self, source: DeviceBuffer, num_bytes: int, stream: Stream) -> np.ndarray:
        self._not_in_capture("read")
        memory = self.memory_at(source.address, num_bytes)
        self.submit("read", stream, [memory], [], lambda: None)
        self._learn(self._known[stream.handle])
        return memory.content[:num_bytes].copy()

    def synchronize(self) -> None:
        """No method of `Device`: lets a test look at memory after all that was enqueued."""
        for stream in list(self._known):
            self._learn(self._known[stream])

    def copy_to_device(
        self, source: PinnedBuffer, destination: DeviceBuffer, num_bytes: int, stream: Stream
    ) -> None:
        self._copy("copy_to_device", source, destination, num_bytes, stream)

    def copy_to_host(
        self, source: DeviceBuffer, destination: PinnedBuffer, num_bytes: int, stream: Stream
    ) -> None:
        self._copy("copy_to_host", source, destination, num_bytes, stream)

    def copy_within(
        self, buffer: DeviceBuffer, source: int, destination: int, num_bytes: int, stream: Stream
    ) -> None:
        memory = self.memory_at(buffer.address, max(source, destination) + num_bytes)
        if abs(source - destination) < num_bytes:
            raise Violation("source and destination of a copy overlap")

        def run() -> None:
            memory.content[destination : destination + num_bytes] = memory.content[
                source : source + num_bytes
            ]

        self.submit("copy_within", stream, [memory], [memory], run)

    def create_event(self) -> Event:
        self._events.append(None)
        return Event(len(self._events) - 1)

    def record(self, event: Event, stream: Stream) -> None:
        self._not_in_capture("record")
        self._events[event] = Counter(self._known[stream.handle])

    def wait(self, event: Event) -> None:
        self._not_in_capture("wait")
        seen = self._events[event]
        if seen is None:
            raise Violation("waited for an event that was never recorded")
        self.num_waits += 1
        self._learn(seen)

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        self._not_in_capture("capture")
        works: list[_Work] = []
        self._capture = (stream, works)
        try:
            enqueue()
        finally:
            self._capture = None
        if not works:
            raise Violation("captured a graph with nothing in it")
        self._graphs[len(self.log) + 1] = works
        self.log.append("capture")
        return Graph(len(self.log))

    def launch(self, graph: Graph, stream: Stream) -> None:
        works = self._graphs.get(graph)
        if works is None:
            raise Violation("launched a graph that was destroyed")
        self.log.append("launch")
        for work in works:
            self.submit(work.name, stream, work.reads, work.writes, work.run)

    def destroy(self, graph: Graph) -> None:
        del self._graphs[graph]

    def close(self) -> None:
        self.synchronize()
        self._num_reserved = 0
        for memory in self._memory:
            if not memory.is_freed:
                self.free(DeviceBuffer(memory.address, len(memory.content)))
        self._graphs.clear()

    def submit(
        self,
        name: str,
        stream: Stream,
        reads: Iterable[Memory],
        writes: Iterable[Memory],
        run: Callable[[], None],
    ) -> None:
        """Enqueue, or record while `stream` is captured."""
        work = _Work(name, list(reads), list(writes), run)
        if self._capture is not None and self._capture[0] == stream:
            self._capture[1].append(work)
            return
        self._execute(work, stream)

    @property
    def is_capturing(self) -> bool:
        return self._capture is not None

    def memory_at(self, address: int, num_bytes: int = 1) -> Memory:
        """The allocation that holds `num_bytes` from `address` on; freed ones are found too, to be refused."""
        for memory in reversed(self._memory):
            if memory.address <= address and address + num_bytes <= memory.address + len(memory.content):
                if memory.is_freed:
                    raise Violation(f"memory at {address:#x} was freed")
                return memory
        raise Violation(f"no allocation holds {num_bytes} bytes at {address:#x}")

    def _allocate(self, num_bytes: int, *, is_pinned: bool) -> int:
        self._not_in_capture("allocate")
        last = self._memory[-1] if self._memory else None
        end = last.address + len(last.content) if last is not None else 0
        address = (end // _GAP + 2) * _GAP
        content = np.full(max(num_bytes, 1), UNWRITTEN, np.uint8)
        self._memory.append(Memory(address, content, is_pinned))
        return address

    def _copy(
        self,
        name: str,
        source: DeviceBuffer | PinnedBuffer,
        destination: DeviceBuffer | PinnedBuffer,
        num_bytes: int,
        stream: Stream,
    ) -> None:
        origin, target = (self.memory_at(b.address, num_bytes) for b in (source, destination))
        if origin.is_pinned == target.is_pinned:
            raise Violation(f"{name} between two buffers of one kind")

        def run() -> None:
            target.content[:num_bytes] = origin.content[:num_bytes]

        self.submit(name, stream, [origin], [target], run)

    def _execute(self, work: _Work, stream: Stream) -> None:
        known = self._known[stream.handle]
        known |= self._known[_HOST]
        for memory in (*work.reads, *work.writes):
            if memory.is_freed:
                raise Violation(f"{work.name} uses memory at {memory.address:#x} that was freed while bound")
            party, count = memory.writer
            if party != stream.handle and known[party] < count:
                raise Violation(f"{work.name} races with the write of stream {party:#x}")
        for memory in work.writes:
            for party, count in memory.uses.items():
                if party != stream.handle and known[party] < count:
                    raise Violation(f"{work.name} overwrites what stream {party:#x} still uses")
        known[stream.handle] += 1
        for memory in (*work.reads, *work.writes):
            memory.uses[stream.handle] = known[stream.handle]
        for memory in work.writes:
            memory.writer = (stream.handle, known[stream.handle])
        self._known[stream.handle] = known
        self.log.append(work.name)
        self._pending.append((stream.handle, known[stream.handle], work.run))

    def _learn(self, seen: Counter[int]) -> None:
        """The host knows `seen` now, so that has run: what is enqueued on a stream, in order."""
        self._known[_HOST] |= seen
        due = [run for stream, count, run in self._pending if count <= self._known[_HOST][stream]]
        self._pending = [item for item in self._pending if item[1] > self._known[_HOST][item[0]]]
        for run in due:
            run()

    def _check_idle(self, memory: Memory, what: str) -> None:
        for party, count in memory.uses.items():
            if self._known[_HOST][party] < count:
                raise Violation(f"memory at {memory.address:#x} is {what} while stream {party:#x} uses it")

    def _not_in_capture(self, what: str) -> None:
        if self._capture is not None:
            raise Violation(f"{what} while a stream is captured")
