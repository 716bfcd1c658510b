"""Running an engine to its end."""

from __future__ import annotations

from pelton.runtime.engine import Engine
from pelton.runtime.outputs import Delta


def drain(engine: Engine) -> dict[tuple[str, int], list[Delta]]:
    """Run to the end; deltas by request and choice."""
    results: dict[tuple[str, int], list[Delta]] = {}
    for _ in range(20_000):
        if not engine.has_work:
            return results
        for delta in engine.step():
            results.setdefault((delta.request_id, delta.index), []).append(delta)
    raise AssertionError("the engine does not come to an end")
