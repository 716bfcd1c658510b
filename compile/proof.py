"""The proof that a compiled form computes what the model computes, on steps as a server makes them.

One trace of four steps over four sequences: a ragged prefill, then decodes mixed with a chunk and a new prompt, then
a chunk in the middle of decodes, then a step of few tokens each. On a target that attends in tiles (of 128 tokens, for
more than 8 of a sequence) these are tiles alone, rows beside tiles and rows alone. Every row's logits are compared with
the original model run on each whole sequence.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..errors import BuildError
from .export import KVGeometry
from .hidden_states import head_inputs, only_head_input

# (sequence, number of tokens) of each step.
_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 150), (1, 9), (2, 34)),  # tiles alone, one of them full, two in each group, padded
    ((3, 5), (0, 1), (2, 9), (1, 1)),  # rows of a new prompt beside a tile
    ((1, 1), (0, 13), (3, 1), (2, 1)),
    ((2, 1), (3, 2), (0, 1), (1, 4)),  # rows alone
)
# A window is exercised by a longer first prompt, up to here (longer ones cost minutes of eager reference).
MAX_PROVED_WINDOW = 512
# Root mean square of the difference over that of the logits: float32 differs by the order of summation alone.
_FLOAT32_TOLERANCE = 1e-4
# In reduced precision, error is measured against the model in float32 and compared with the original model's own.
_MAX_NOISE_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class FlatStep:
    """Arguments of one step of the flat layout, as numpy arrays; logits are wanted of every row."""

    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    block_table: np.ndarray  # [B, M] int32
    seq_lens: np.ndarray  # [B] int32
    query_start_loc: np.ndarray  # [B + 1] int32
    logits_rows: np.ndarray  # [T] int64


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits` `[T, vocab]`; `hidden` `[T, hidden_size]`, None of a form that does not give them."""

    logits: Tensor
    hidden: Tensor | None = None


StepFunction = Callable[[FlatStep], StepResult]


@dataclass(frozen=True, slots=True)
class ProofResult:
    """Against the original model in float32: `relative_error` is rms(difference) / rms(logits), `top1_agreement` the
    share of rows with the same argmax, `kl_divergence` the mean over rows, in nats, of the divergence of the form's
    distribution from the model's. `tolerance` is the largest relative error that is let through. `hidden_error` is the
    relative error of the hidden states, None where there are none.
    """

    subject: str
    num_rows: int
    relative_error: float
    max_error: float
    top1_agreement: float
    kl_divergence: float
    longest_sequence: int
    tolerance: float
    hidden_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Trace:
    """The steps of a proof and the logits of each sequence by the model in float32, `[length, vocab]`.

    `tolerance` is the relative error that a compiled form may have: 1e-4 in float32, else 1.5 times what the original
    model has in the build's own dtype. `hidden` and `hidden_tolerance` are those of the hidden states, where they are
    compared as well.
    """

    steps: tuple[tuple[tuple[int, int], ...], ...]
    token_ids: tuple[np.ndarray, ...]
    reference: tuple[Tensor, ...]
    block_size: int
    tolerance: float
    hidden: tuple[Tensor, ...] = ()
    hidden_tolerance: float = _FLOAT32_TOLERANCE

    @property
    def num_blocks(self) -> int:
        return sum(-(-len(ids) // self.block_size) for ids in self.token_ids)


def record(
    model: nn.Module,
    *,
    windows: Sequence[int],
    block_size: int,
    text: np.ndarray | None = None,
    with_hidden: bool = False,
) -> Trace:
    """Run the original `model` (its own attention and experts, in eager form) on the sequences of the trace.

    Their tokens are drawn from the whole vocabulary, or are those of `text`, over and over. `with_hidden`: hidden
    states are to be compared too. In reduced precision this
    holds a float32 copy of the model for the time of the call; integers are shared.
    """
    extra = max((w for w in windows if w <= MAX_PROVED_WINDOW), default=0)
    steps = (((0, max(_STEPS[0][0][1], 21 + extra)), *_STEPS[0][1:]), *_STEPS[1:])
    lengths = [sum(n for step in steps for s, n in step if s == i) for i in range(4)]
    config: Any = model.config
    random = np.random.default_rng(20260101)
    if text is None:
        token_ids = tuple(random.integers(0, config.vocab_size, length) for length in lengths)
    else:
        token_ids = tuple(np.split(np.resize(text, sum(lengths)), np.cumsum(lengths)[:-1]))
    reference = _eager(model if _is_float32(model) else _in_float32(model), token_ids, with_hidden)
    tolerance = hidden_tolerance = _FLOAT32_TOLERANCE
    if not _is_float32(model):
        own = _eager(model, token_ids, with_hidden)
        tolerance = _MAX_NOISE_RATIO * _relative_error([r.logits for r in own], [r.logits for r in reference])
        if with_hidden:
            hidden_tolerance = _MAX_NOISE_RATIO * _relative_error(_hidden(own), _hidden(reference))
    hidden = tuple(_hidden(reference)) if with_hidden else ()
    logits = tuple(result.logits for result in reference)
    return Trace(steps, token_ids, logits, block_size, tolerance, hidden, hidden_tolerance)


def eager_logits(model: nn.Module, token_ids: Sequence[np.ndarray]) -> list[Tensor]:
    """Logits `[tokens, vocab]` float32 of each sequence, by the model's own attention and experts in eager form."""
    return [result.logits for result in _eager(model, token_ids, with_hidden=False)]


def _eager(model: nn.Module, token_ids: Sequence[np.ndarray], with_hidden: bool) -> list[StepResult]:
    """Results in float32 of each sequence, by the model's own attention and experts in eager form."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    model.set_experts_implementation("eager")  # type: ignore[operator]
    results = []
    with torch.no_grad():
        for ids in token_ids:
            with head_inputs(model, are_wanted=with_hidden) as captured:
                logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float()
            hidden = only_head_input(model, captured).float() if with_hidden else None
            results.append(StepResult(logits, hidden))
    return results


def _hidden(results: Sequence[StepResult]) -> list[Tensor]:
    return [result.hidden for result in results if result.hidden is not None]


def _in_float32(model: nn.Module) -> nn.Module:
    """A copy. Buffers need none: the conversion replaces them where it changes them."""
    shared = {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, shared).float()


def _is_float32(model: nn.Module) -> bool:
    return next(model.parameters()).dtype == torch.float32


def _rms(tensor: Tensor) -> float:
    return float(tensor.pow(2).mean().sqrt())


def _relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """rms(difference) / rms(expected), over the rows of all."""
    rows = torch.cat(list(expected))
    return _rms(torch.cat(list(actual)) - rows) / _rms(rows)


def compare(
    trace: Trace, run: StepFunction, subject: str, *, tolerance: float | None = None, remedy: str = ""
) -> ProofResult:
    """Drive `run` through the trace; `tolerance` (None: the trace's) is the largest relative error of the logits.

    Raises `BuildError`, which ends with `remedy`, when `run` does not reproduce the original model, hidden states
    included where the trace has them.
    """
    limit = trace.tolerance if tolerance is None else tolerance
    results = [run(step) for step in flat_steps(trace)]
    actual = torch.cat([result.logits.float() for result in results])
    expected = torch.cat([trace.reference[s][a:b] for spans in _spans(trace) for s, a, b in spans])
    difference = actual - expected
    error = _rms(difference) / _rms(expected)
    result = ProofResult(
        subject=subject,
        num_rows=len(expected),
        relative_error=error,
        max_error=float(difference.abs().max()),
        top1_agreement=float((actual.argmax(-1) == expected.argmax(-1)).float().mean()),
        kl_divergence=kl_divergence(expected, actual),
        longest_sequence=max(len(ids) for ids in trace.token_ids),
        tolerance=limit,
        hidden_error=_hidden_error(trace, results) if trace.hidden else None,
    )
    checks = [("logits", error, limit)]
    if result.hidden_error is not None:
        # What loses more on purpose (quantised pages) does so in the hidden states as well.
        hidden_limit = trace.hidden_tolerance * limit / trace.tolerance
        checks.append(("hidden states", result.hidden_error, hidden_limit))
    for name, found, allowed in checks:
        if not found <= allowed:  # also when it is NaN
            raise BuildError(
                f"the {subject} does not reproduce the original model: relative error {found:.2e} of the {name}, "
                f"at most {allowed:.2e} is allowed; nothing was written{remedy and '; '}{remedy}"
            )
    return result


def _hidden_error(trace: Trace, results: Sequence[StepResult]) -> float:
    """Relative error; NaN of a form that gives no hidden states."""
    hidden = [result.hidden.float() for result in results if result.hidden is not None]
    if len(hidden) < len(results):
        return math.nan
    return _relative_error(hidden, [trace.hidden[s][a:b] for spans in _spans(trace) for s, a, b in spans])


def kl_divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean over rows of KL(expected || actual), of logits [rows, vocab]; a few rows at a time."""
    total = 0.0
    for start in range(0, len(expected), 64):
        log_p, log_q = (x[start : start + 64].log_softmax(-1) for x in (expected, actual))
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / len(expected)


class ExportedStep:
    """`program` run eagerly, with the operator's PyTorch reference, keeping its own pages of `dtype`.

    Pages may be of another dtype than the program was exported with: the reference takes them as they are.
    """

    def __init__(
        self, program: ExportedProgram, geometry: Sequence[KVGeometry], trace: Trace, dtype: torch.dtype
    ) -> None:
        self._module = program.module()
        shapes = [(trace.num_blocks, trace.block_size, g.num_heads, g.head_dim) for g in geometry]
        self.k_caches = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        self.v_caches = [torch.zeros(shape, dtype=dtype) for shape in shapes]

    def __call__(self, step: FlatStep) -> StepResult:
        arrays = (step.block_table, step.seq_lens, step.query_start_loc, step.logits_rows)
        flat = (torch.from_numpy(a) for a in arrays)
        ids, positions = torch.from_numpy(step.input_ids)[None], torch.from_numpy(step.positions)[None]
        with torch.no_grad():
            logits, self.k_caches, self.v_caches, *hidden = self._module(
                ids, positions, *flat, self.k_caches, self.v_caches
            )
        return StepResult(logits, *hidden)


def exported_step(
    program: ExportedProgram, geometry: Sequence[KVGeometry], trace: Trace, dtype: torch.dtype
) -> ExportedStep:
    """The exported graph as a function of a step."""
    return ExportedStep(program, geometry, trace, dtype)


def _block_tables(trace: Trace) -> list[np.ndarray]:
    """Pages of each sequence, scattered over the pool."""
    pages = np.random.default_rng(7).permutation(trace.num_blocks)
    counts = [-(-len(ids) // trace.block_size) for ids in trace.token_ids]
    return [part.astype(np.int32) for part in np.split(pages, np.cumsum(counts)[:-1])]


def _spans(trace: Trace) -> Iterator[list[tuple[int, int, int]]]:
    """For each step the sequences in it, each with its first position and the one after its last."""
    done = [0] * len(trace.token_ids)
    for step in trace.steps:
        yield [(s, done[s], done[s] + n) for s, n in step]
        for s, n in step:
            done[s] += n


def flat_steps(trace: Trace) -> Iterator[FlatStep]:
    """The steps of a trace as an engine takes them."""
    tables = _block_tables(trace)
    for spans in _spans(trace):
        width = max(len(tables[s]) for s, _, _ in spans)
        starts = np.cumsum([0] + [b - a for _, a, b in spans]).astype(np.int32)
        yield FlatStep(
            input_ids=np.concatenate([trace.token_ids[s][a:b] for s, a, b in spans]),
            positions=np.concatenate([np.arange(a, b) for _, a, b in spans]),
            block_table=np.stack([np.pad(tables[s], (0, width - len(tables[s]))) for s, _, _ in spans]),
            seq_lens=np.array([b for _, _, b in spans], np.int32),
            query_start_loc=starts,
            logits_rows=np.arange(starts[-1], dtype=np.int64),
        )
