"""Finding repeated strings among any number of them in bounded memory."""

from __future__ import annotations

import heapq
import tempfile
from hashlib import blake2b
from typing import IO

import numpy as np

_NUM_BUCKETS = 128
_BUCKET_BYTES_IN_MEMORY = 64 << 10
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])


class RepeatFinder:
    """Takes numbered strings and tells which repeat an earlier one.

    Keeps 24 bytes a string: its 16-byte digest and number, in buckets by digest that move to temporary files
    when they pass 64 KiB. So memory is 8 MiB for small inputs, and 1/128 of the records (sorted one bucket at
    a time) for huge ones: about 15 MiB at 20 million lines. Strings are compared by digest alone: BLAKE2b at
    128 bits, so no file makes two different ids equal.
    """

    def __init__(self) -> None:
        self._buckets: list[IO[bytes]] = [
            tempfile.SpooledTemporaryFile(max_size=_BUCKET_BYTES_IN_MEMORY)  # noqa: SIM115 - close() does
            for _ in range(_NUM_BUCKETS)
        ]

    def add(self, number: int, text: str) -> None:
        """`number` must grow from call to call."""
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._buckets[digest[0] % _NUM_BUCKETS].write(digest + number.to_bytes(8, "little"))

    def repeats(self, limit: int) -> tuple[int, list[tuple[int, int]]]:
        """How many strings repeat an earlier one, and the first `limit` as (number, first number)."""
        count = 0
        firsts: list[tuple[int, int]] = []
        for bucket in self._buckets:
            bucket.seek(0)
            pairs = _repeats_of(np.frombuffer(bucket.read(), _RECORD))
            count += len(pairs)
            firsts = heapq.nsmallest(limit, firsts + [(int(n), int(first)) for n, first in pairs[:limit]])
        return count, firsts

    def close(self) -> None:
        for bucket in self._buckets:
            bucket.close()


def _repeats_of(records: np.ndarray) -> np.ndarray:
    """`[R, 2]` (number, number of the first equal one), by rising number."""
    order = np.lexsort((records["low"], records["high"]))  # stable: equal digests stay in order of number
    high, low, number = (records[name][order] for name in ("high", "low", "number"))
    is_repeat = np.zeros(len(records), bool)
    is_repeat[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    first = number[np.maximum.accumulate(np.where(is_repeat, 0, np.arange(len(records))))]
    pairs = np.stack([number[is_repeat], first[is_repeat]], axis=1)
    return pairs[np.argsort(pairs[:, 0])]
