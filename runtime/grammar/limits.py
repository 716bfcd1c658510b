"""How much a form of output may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on one compilation, and on what is kept of them.

    `max_bytes` of all texts of a `StructuredOutput`, `max_depth` levels of nesting, `deadline_seconds` from the
    request on, waiting for others included: a form that waited all the time is not at fault. `num_kept` compiled
    forms of `max_kept_chars` together stay in memory, the latest used.
    """

    max_bytes: int = 256 << 10
    max_depth: int = 64
    deadline_seconds: float = 5.0
    num_kept: int = 128
    max_kept_chars: int = 8 << 20
    num_threads: int = 2
