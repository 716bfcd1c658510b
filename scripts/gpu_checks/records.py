"""What a check finds: one frozen dataclass per kind of finding, and its form in JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Fact:
    """Something about the machine or a build, such as a version or a measured ceiling; `value` is JSON."""

    name: str
    value: Any

    @property
    def passed(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A kernel's result against the operator's float64 reference.

    `error`: the largest deviation within a row of the output, over the row's largest magnitude; NaN if anything is.
    `is_state_equal`: whether what is written in place equals the reference bit by bit; None where nothing is.
    """

    name: str
    error: float
    bound: float
    is_state_equal: bool | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.bound and self.is_state_equal is not False


@dataclass(frozen=True, slots=True)
class Timing:
    """One implementation of a case, timed: the median of several runs.

    `tactic` names the tiles of Pelton's kernels, None for others' implementations. `num_bytes` and `flops` are the
    least that the case needs whoever computes it (`roofline.py`); `products` the dtype that is multiplied, whose
    ceiling applies. `error` is of the result that was timed, as in `Accuracy`.
    """

    case: str
    implementation: str
    tactic: str | None
    is_default: bool
    seconds: float
    num_bytes: int
    flops: int
    products: str
    error: float
    bound: float

    @property
    def name(self) -> str:
        return f"{self.case}, {self.implementation}{f' {self.tactic}' if self.tactic else ''}"

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy tokens of the same prompts, computed in two ways.

    `num_agreed_tokens` counts those before each prompt's first divergence. `gaps` has, for each prompt that diverges,
    how much likelier the expected token was than the other one, as a difference of logits; infinity if it is not known.
    A gap within `bound` is a tie in the dtype's arithmetic.
    """

    name: str
    num_prompts: int
    num_equal_prompts: int
    num_tokens: int
    num_agreed_tokens: int
    gaps: tuple[float, ...]
    bound: float

    @property
    def passed(self) -> bool:
        return all(gap <= self.bound for gap in self.gaps)


@dataclass(frozen=True, slots=True)
class Speed:
    """Serving a model: medians of several runs. TTFT of one prompt, time per output token of one sequence, and output
    tokens per second of many."""

    name: str
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float

    @property
    def passed(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that did not come to a result."""

    name: str
    error: str

    @property
    def passed(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Skip:
    """A part that was not run; says why."""

    name: str
    reason: str

    @property
    def passed(self) -> bool:
        return True


Record = Fact | Accuracy | Timing | Agreement | Speed | Failure | Skip
_KINDS: dict[str, type[Record]] = {
    "fact": Fact,
    "accuracy": Accuracy,
    "timing": Timing,
    "agreement": Agreement,
    "speed": Speed,
    "failure": Failure,
    "skip": Skip,
}


def as_json(record: Record) -> dict[str, Any]:
    """The fields, with `kind` before and `passed` behind them. Floats may be NaN or infinite."""
    kind = next(name for name, type in _KINDS.items() if isinstance(record, type))
    return {"kind": kind, **asdict(record), "passed": record.passed}


def from_json(values: dict[str, Any]) -> Record:
    """Inverse of `as_json`."""
    fields = {name: value for name, value in values.items() if name not in ("kind", "passed")}
    record = _KINDS[values["kind"]](**fields)
    return replace(record, gaps=tuple(record.gaps)) if isinstance(record, Agreement) else record
