"""Sequences in the order of their arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from .prefix_cache import TokenChain
from .sequence import Sequence


@dataclass(eq=False, slots=True)
class Record:
    """What the scheduler knows of a sequence. `order` is its place among all arrivals."""

    sequence: Sequence
    order: tuple[int, int]
    token_limit: int
    chain: TokenChain | None
    is_running: bool = False
    was_admitted: bool = False


def _order(record: Record) -> tuple[int, int]:
    return record.order


class ArrivalQueue:
    """Records in arrival order; a new arrival, the first and the last are at hand, any other is bisected."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def add(self, record: Record) -> None:
        insort(self._records, record, key=_order)

    def remove(self, record: Record) -> None:
        del self._records[bisect_left(self._records, record.order, key=_order)]
