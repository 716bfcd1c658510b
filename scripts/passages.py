"""Real English text at hand on every machine: the language reference that comes with Python."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics


def passages(encode: Callable[[str], list[int]], lengths: list[int]) -> list[list[int]]:
    """One passage of each of `lengths` tokens, from different topics."""
    names = sorted(name for name, text in topics.items() if len(text) > 1500)
    prompts: list[list[int]] = []
    position = 0
    for length in lengths:
        ids: list[int] = []
        while len(ids) < length:
            ids += encode(topics[names[position % len(names)]])
            position += 1
        prompts.append(ids[:length])
    return prompts
