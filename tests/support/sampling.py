"""One token for each sequence, as most tests of samplers want it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from pelton.errors import EngineError
from pelton.runtime.outputs import TokenEvent
from pelton.runtime.sampler import Sampler, Verification
from pelton.runtime.sequence import Sequence


def sample_each(
    sampler: Sampler, logits: Any, sequences: Seq[Sequence], rows: Seq[int] | None = None
) -> list[TokenEvent | EngineError]:
    """The next token of `sequences[i]` from row `rows[i]` (None: row i)."""
    rows = range(len(sequences)) if rows is None else rows
    pairs = zip(sequences, rows, strict=True)
    results = sampler.verify(logits, [Verification(sequence, row) for sequence, row in pairs])
    assert all(len(events) == 1 for events in results)
    return [events[0] for events in results]
