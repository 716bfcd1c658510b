"""How long a step takes by its number of tokens, learned from the steps themselves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

_EXACT = 12  # numbers of tokens up to here are told apart, larger ones in ratios of _RATIO
_RATIO = 1.08
_SAMPLES = 15  # the latest of a range
_QUANTILE = (
    0.25  # of them that counts: what disturbs a step only ever makes it slower, and mostly several in a row
)
_FEWEST = 3  # fewer measure nothing: a first step of a shape often pays for more than itself
_MAX_AGE = 512  # records after which a range that saw none of them is forgotten


@dataclass(slots=True)
class _Range:
    """Measurements of similar numbers of tokens."""

    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    newest: int = 0  # number of the record that came last
    _point: tuple[float, float] | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        self.samples.append((num_tokens, seconds))
        self._point = None

    @property
    def point(self) -> tuple[float, float]:
        """Typical number of tokens and seconds."""
        if self._point is None:
            size = sum(n for n, _ in self.samples) / len(self.samples)
            times = sorted(seconds for _, seconds in self.samples)
            self._point = size, times[int(_QUANTILE * len(times))]
        return self._point


class StepCosts:
    """Seconds as a function of tokens that never falls, through the lower quartiles of recent measurements.

    Below the measurements it is level, or falls to 0 at no tokens (`is_free_at_zero`). Above them it goes on as
    steeply as between the last two, never more steeply than in proportion to the tokens, and level behind a single
    one: an estimate that errs towards trying, upon which it is measured. Ranges that were not seen for long are
    forgotten, since batches and contexts change what a token costs.
    """

    def __init__(self, *, is_free_at_zero: bool = False) -> None:
        self._is_free_at_zero = is_free_at_zero
        self._ranges: dict[int, _Range] = {}
        self._num_records = 0
        self._curve: tuple[np.ndarray, np.ndarray] | None = None

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` (1 or more) took `seconds`."""
        self._num_records += 1
        measured = self._ranges.setdefault(_range_of(num_tokens), _Range())
        if self._is_old(measured):
            measured.samples.clear()
        measured.add(num_tokens, seconds)
        measured.newest = self._num_records
        self._curve = None

    @property
    def is_known(self) -> bool:
        """Whether any number of tokens was measured."""
        return any(len(r.samples) >= _FEWEST for r in self._ranges.values())

    @property
    def largest(self) -> int:
        """Most tokens that the curve rests upon, 0 if nothing is known."""
        sizes, _ = self._known()
        return int(sizes[-1]) if len(sizes) else 0

    def knows(self, num_tokens: int) -> bool:
        """Whether about `num_tokens` were measured."""
        measured = self._ranges.get(_range_of(num_tokens))
        return measured is not None and len(measured.samples) >= _FEWEST and not self._is_old(measured)

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """Estimates, float64 of the shape of `num_tokens`; 0 while nothing is known."""
        sizes, seconds = self._known()
        if not len(sizes):
            return np.zeros(num_tokens.shape)
        slope = 0.0
        if len(sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            slope = min(slope, seconds[-1] / sizes[-1])
        beyond: np.ndarray = np.interp(num_tokens, sizes, seconds) + slope * np.maximum(
            num_tokens - sizes[-1], 0.0
        )
        return beyond

    def _is_old(self, measured: _Range) -> bool:
        return self._num_records - measured.newest > _MAX_AGE

    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        if self._curve is None:
            self._curve = self._fit()
        return self._curve

    def _fit(self) -> tuple[np.ndarray, np.ndarray]:
        known = [r for r in self._ranges.values() if len(r.samples) >= _FEWEST]
        recent = [r for r in known if not self._is_old(r)] or known
        points = sorted(r.point for r in recent)
        if points and self._is_free_at_zero:
            points.insert(0, (0.0, 0.0))
        sizes = np.array([size for size, _ in points])
        return sizes, _non_decreasing([seconds for _, seconds in points])


def _range_of(num_tokens: int) -> int:
    if num_tokens <= _EXACT:
        return num_tokens
    return _EXACT + 1 + int(math.log(num_tokens / (_EXACT + 1)) / math.log(_RATIO))


def _non_decreasing(values: list[float]) -> np.ndarray:
    """The non-decreasing values that are nearest in squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # sum and number of values that became one
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = (pools[-1][0] + total, pools[-1][1] + count)
    return np.array([total / count for total, count in pools for _ in range(count)])
