"""What the checks of matrix products share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """A case on a device: what is computed by whom.

    `compute` takes a tactic, or None for the default one, and writes into `out` by Pelton's kernels. `reference` is the
    operator's in float64, on the CPU; `expected` torch's on the device, for sizes that the reference takes long for.
    `others` are timed beside Pelton's.
    """

    out: Tensor
    compute: Callable[[Any], Tensor]
    reference: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    others: dict[str, Callable[[], Tensor]]


def default_first(default: Any, others: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys([default, *others]))


def on_cpu(arguments: Sequence[Any]) -> list[Any]:
    return [argument.cpu() if isinstance(argument, Tensor) else argument for argument in arguments]
