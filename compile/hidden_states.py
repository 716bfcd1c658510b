"""The hidden states of a model: what its head reads to make the logits, after the final norm.

They are taken where the head is called, so they are known for every family whose head is a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import BuildError


@contextmanager
def head_inputs(model: nn.Module, *, are_wanted: bool = True) -> Iterator[list[Tensor]]:
    """A list of what the head of `model` (a causal LM) is called with while the block runs, `[1, rows, hidden]` each.
    It stays empty unless they `are_wanted`.

    Raises `BuildError` when the model has no module for its head.
    """
    if not are_wanted:
        yield []
        return
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise BuildError(
            f"drafter: {type(model).__name__} has no head of its own to take hidden states from: not supported; build "
            "without --drafter"
        )
    captured: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, arguments: captured.append(arguments[0]))
    try:
        yield captured
    finally:
        handle.remove()


def only_head_input(model: nn.Module, captured: list[Tensor]) -> Tensor:
    """`[rows, hidden]` of a block in which `model` ran once. Raises `BuildError` unless its head did too."""
    if len(captured) != 1:
        raise BuildError(
            f"drafter: {type(model).__name__} calls its head {len(captured)} times for its logits, so its hidden "
            "states are not known: not supported; build without --drafter"
        )
    return captured[0][0]
