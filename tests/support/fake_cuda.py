"""A `Device` without a GPU that runs everything at once and complains about what a GPU would punish at random.

Who has seen what is tracked with vector clocks (Fidge 1988, Mattern 1989): the host and each stream count what they
do, a stream knows what the host knew when it enqueued, and the host learns what a stream did by waiting for an event.
An access to memory that another party wrote, or a write to memory that another party used, without knowing of it is a
race.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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
        self._known: dict[int, Counter[int]] = {_HOST: Counter()}
        self._events: list[Counter[int] | None] = []
        self._graphs: dict[int, list[_Work]] = {}
        self._capture: tuple[Stream, list[_Work]] | None = None

    @property
    def allocated_bytes(self) -> int:
        return sum(len(m.content) for m in self._memory if not (m.is_freed or m.is_pinned))

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
        self._known[_HOST] |= seen

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
        for stream, known in self._known.items():
            if stream != _HOST:
                self._known[_HOST] |= known
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
        work.run()

    def _check_idle(self, memory: Memory, what: str) -> None:
        for party, count in memory.uses.items():
            if self._known[_HOST][party] < count:
                raise Violation(f"memory at {memory.address:#x} is {what} while stream {party:#x} uses it")

    def _not_in_capture(self, what: str) -> None:
        if self._capture is not None:
            raise Violation(f"{what} while a stream is captured")
