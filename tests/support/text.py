"""Real English text: what `scripts/passages.py` finds on every machine."""

from __future__ import annotations

from pelton.scripts.passages import passages

__all__ = ["passages"]
