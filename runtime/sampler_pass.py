"""One pass of a `DeviceSampler`: the numbers that go up in one copy, the work on them, the tokens that come down.

rows of the batch, sorted by what is done with them
  greedy   drawn     sorted            each in chunks that the scratch memory holds
| chunk | chunk   | chunk | chunk |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..plugins_trt.sampling_memory import DRAWN_LOGIT, GREEDY_LOGIT, SCORED_LOGIT, SORTED_LOGIT, SamplerSizes
from .logprobs_device import score, score_width
from .penalties import has_penalties
from .penalties_device import CountSlots, add_counts, penalise
from .request import SamplingParams
from .sampler import GREEDY_BELOW, uniform_at
from .sequence import Sequence
from .truncation_device import costs, draw, truncate, weights_of

# In place of a token.
IS_POISONED = -1
HAS_NOTHING_LEFT = -2

_ALIGNMENT = 8


class Kind(enum.IntEnum):
    """How a row's token is chosen: the largest logit, a draw, or a draw after top_k or top_p, which sort."""

    GREEDY, DRAWN, SORTED = range(3)

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Kind:
        if params.temperature < GREEDY_BELOW:
            return cls.GREEDY
        return cls.SORTED if 0 < params.top_k < vocab_size or params.top_p < 1.0 else cls.DRAWN


_LOGIT_BYTES = {Kind.GREEDY: GREEDY_LOGIT, Kind.DRAWN: DRAWN_LOGIT, Kind.SORTED: SORTED_LOGIT}


@dataclass(frozen=True, slots=True, eq=False)
class RowTask:
    """Choose the token of `sequence` behind `drafted` from row `row` of the logits; `place` is in the caller's list.

    `mask` `[ceil(vocab_size / 32)]` int32: the tokens that may follow (None: all).
    """

    place: int
    row: int
    sequence: Sequence
    drafted: tuple[int, ...] = ()
    mask: np.ndarray | None = None

    @property
    def params(self) -> SamplingParams:
        return self.sequence.request.params

    @property
    def position(self) -> int:
        """Of the token in the output."""
        return self.sequence.num_output_tokens + len(self.drafted)

    @property
    def is_short(self) -> bool:
        """Whether EOS and stop ids are not to be chosen yet."""
        return self.position < self.params.min_tokens


class Section(NamedTuple):
    """Where an array stands in a pass's parameters."""

    start: int
    length: int
    dtype: torch.dtype

    def of(self, parameters: Tensor) -> Tensor:
        return parameters[self.start : self.start + self.length * self.dtype.itemsize].view(self.dtype)


class Parameters:
    """Arrays in one run of bytes, so that one copy carries them all."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, np.ndarray]] = []
        self._num_bytes = 0

    def add(self, values: np.ndarray | Seq[int], dtype: str) -> Section:
        array = np.asarray(values, dtype).reshape(-1)
        start = self._num_bytes
        self._arrays.append((start, array))
        self._num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return Section(start, array.size, getattr(torch, dtype))

    def pack(self) -> np.ndarray:
        """All of them as uint8."""
        packed = np.zeros(self._num_bytes, np.uint8)
        for start, array in self._arrays:
            packed[start : start + array.nbytes] = array.view(np.uint8)
        return packed


class _Row(NamedTuple):
    task: RowTask
    kind: Kind


@dataclass(slots=True)
class _Chunk:
    """Rows `[start, stop)` of a pass, worked on together; flat indices are those of its own `[stop - start, V]`."""

    start: int
    stop: int
    kind: Kind
    formed: Section  # rows of the chunk, int32
    forms: Section  # bits of the tokens that these allow, ceil(V / 32) int32 words each
    masks: Section  # flat int32
    biased: Section  # flat int32
    biases: Section  # float32
    penalised: Section  # rows of the chunk, int32
    slots: Section  # of their counts, int32
    drafted: Section  # what to count beside, flat int32 of [penalised, V]
    has_min_p: bool

    @property
    def is_processed(self) -> bool:
        parts = (self.formed, self.masks, self.biased, self.penalised)
        return any(part.length for part in parts)


# Rows of the float64 matrix of parameters.
_TEMPERATURE, _MIN_P, _TOP_P, _UNIFORM, _REPETITION = range(5)  # frequency and presence follow


class SamplingPass:
    """Chooses a token for each of `tasks`.

    `counts` is brought up to date on the way. Results `[num_results]` int64: a token, or what is in its place, for each
    of `order`, then the scores of those of `scored`, `score_width(num_top)` each. `is_counting`: there are penalties.
    """

    def __init__(
        self,
        tasks: Seq[RowTask],
        vocab_size: int,
        eos_token_ids: Seq[int],
        sizes: SamplerSizes,
        counts: CountSlots,
    ) -> None:
        self._vocab_size, self._sizes = vocab_size, sizes
        rows = [_Row(task, Kind.of(task.params, vocab_size)) for task in tasks]
        rows.sort(key=lambda row: row.kind)
        tasks = [row.task for row in rows]
        self.order = [task.place for task in tasks]
        self._rows = [task.row for task in tasks]
        parameters = Parameters()
        self._numbers = parameters.add(_numbers(rows), "float64")
        self._row_ids = parameters.add(self._rows, "int32")
        self._top_k = parameters.add([_top_k(task.params, vocab_size) for task in tasks], "int32")
        penalised = list({task.sequence: None for task in tasks if has_penalties(task.params)})
        update = counts.update(penalised)
        self._counts = [
            parameters.add(values, "int32") for values in (update.fresh, update.places, update.increments)
        ]
        self.is_counting = bool(penalised)
        slots = dict(zip(penalised, update.slots.tolist(), strict=True))
        self._chunks = [
            _chunk(parameters, rows[start:stop], start, eos_token_ids, vocab_size, slots)
            for start, stop in self._spans(rows)
        ]
        self.scored = [i for i, task in enumerate(tasks) if task.params.logprobs is not None]
        self.num_top = max((tasks[i].params.logprobs or 0 for i in self.scored), default=0)
        self._scored_ids = parameters.add(self.scored, "int32")
        self.parameters = parameters.pack()

    @property
    def num_results(self) -> int:
        return len(self.order) + len(self.scored) * score_width(self.num_top)

    def _spans(self, rows: Seq[_Row]) -> list[tuple[int, int]]:
        spans, start = [], 0
        for kind, alike in groupby(rows, lambda row: row.kind):
            end = start + len(list(alike))
            size = self._sizes.rows_at_once(self._vocab_size, _LOGIT_BYTES[kind])
            spans += [(i, min(i + size, end)) for i in range(start, end, size)]
            start = end
        return spans

    @torch.inference_mode()
    def run(
        self, logits: np.ndarray | Tensor, table: Tensor | None, parameters: Tensor, results: Tensor
    ) -> None:
        """Fill `results` on the device of `parameters`, uint8. `table` holds the counts, if `is_counting`."""
        num_rows = len(self.order)
        numbers = self._numbers.of(parameters).view(-1, num_rows)
        row_ids, top_k = self._row_ids.of(parameters), self._top_k.of(parameters)
        if table is not None and self.is_counting:
            fresh, places, increments = (section.of(parameters) for section in self._counts)
            add_counts(table, fresh, places, increments)
        for chunk in self._chunks:
            own = slice(chunk.start, chunk.stop)
            rows = gather_rows(logits, self._rows[own], row_ids[own])
            results[own] = _choose(rows, chunk, numbers[:, own], top_k[own], table, parameters)
        if self.scored:
            scores = results[num_rows:].view(-1, score_width(self.num_top))
            self._score(logits, row_ids, results[:num_rows], scores, self._scored_ids.of(parameters))

    def _score(
        self, logits: np.ndarray | Tensor, row_ids: Tensor, tokens: Tensor, scores: Tensor, scored: Tensor
    ) -> None:
        size = self._sizes.rows_at_once(self._vocab_size, SCORED_LOGIT)
        for start in range(0, len(self.scored), size):
            places = scored[start : start + size].long()
            on_host = [self._rows[i] for i in self.scored[start : start + size]]
            rows = gather_rows(logits, on_host, row_ids.index_select(0, places))
            chosen = tokens.index_select(0, places).clamp_(min=0)
            scores[start : start + size] = score(rows, chosen, self.num_top)


def gather_rows(logits: np.ndarray | Tensor, rows: Seq[int], row_ids: Tensor) -> Tensor:
    """A copy of `rows` of `logits` on the device of `row_ids` `[C]`, which holds them too."""
    if isinstance(logits, Tensor) and logits.device == row_ids.device:
        return logits.index_select(0, row_ids)
    return bring(logits[list(rows)], row_ids.device)


def bring(logits: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """`logits` on `device`: themselves if they are there."""
    return (logits if isinstance(logits, Tensor) else torch.from_numpy(np.array(logits))).to(device)


def _choose(
    logits: Tensor, chunk: _Chunk, numbers: Tensor, top_k: Tensor, table: Tensor | None, parameters: Tensor
) -> Tensor:
    """Tokens `[C]` int64 of `logits` `[C, V]`, which are overwritten."""
    largest, chosen = logits.max(1)  # of equal ones the first; NaN above all else
    is_sound = torch.isfinite(largest)
    singles = numbers.float()
    if chunk.is_processed:
        _process(logits, chunk, singles, table, parameters)
        largest, chosen = logits.max(1)
    if chunk.kind is not Kind.GREEDY:
        cost = costs(logits, largest, singles[_TEMPERATURE])
        min_p = singles[_MIN_P] if chunk.has_min_p else None
        if chunk.kind is Kind.SORTED:
            weights = weights_of(cost.clone(), min_p)
            truncate(weights, cost, top_k.long(), numbers[_TOP_P])
        else:
            weights = weights_of(cost, min_p)
        chosen = draw(weights, numbers[_UNIFORM])
    chosen = torch.where(torch.isfinite(largest), chosen, HAS_NOTHING_LEFT)
    return torch.where(is_sound, chosen, IS_POISONED)


def _process(
    logits: Tensor, chunk: _Chunk, singles: Tensor, table: Tensor | None, parameters: Tensor
) -> None:
    """What stands before the choice: forms, masks, biases, penalties, in place."""
    flat = logits.view(-1)
    if chunk.formed.length:
        at = chunk.formed.of(parameters).long()
        words = chunk.forms.of(parameters).view(len(at), -1)
        logits.index_copy_(0, at, _masked(logits.index_select(0, at), words))
    if chunk.masks.length:
        flat.index_fill_(0, chunk.masks.of(parameters).long(), -torch.inf)
    if chunk.biased.length:
        places = chunk.biased.of(parameters).long()  # no two alike
        flat.index_copy_(0, places, flat.index_select(0, places) + chunk.biases.of(parameters))
    if chunk.penalised.length and table is not None:
        at = chunk.penalised.of(parameters).long()
        counts = table.index_select(0, chunk.slots.of(parameters))
        if chunk.drafted.length:
            places = chunk.drafted.of(parameters).long()
            counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        penalties = singles[_REPETITION:].index_select(1, at)
        penalise(logits, at, counts, *penalties)


def _masked(logits: Tensor, words: Tensor) -> Tensor:
    """`logits` `[C, V]`, -inf where the bit of `words` `[C, ceil(V / 32)]` int32 is not set."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    is_allowed = ((words[:, :, None] >> bits) & 1).view(len(words), -1)[:, : logits.shape[1]]
    return logits.masked_fill(is_allowed == 0, -torch.inf)


def _numbers(rows: Seq[_Row]) -> np.ndarray:
    """`[7, rows]` float64. Raises `ValueError` for a row that draws without a seed."""
    numbers = np.zeros((7, len(rows)))
    for i, (task, kind) in enumerate(rows):
        params, sequence = task.params, task.sequence
        uniform = 0.0
        if kind is not Kind.GREEDY:
            if params.seed is None:
                raise ValueError(f"request {sequence.request.request_id} samples without a seed")
            uniform = uniform_at(params.seed, sequence.index, task.position)
        numbers[:, i] = (
            params.temperature,
            params.min_p,
            params.top_p,
            uniform,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
    return numbers


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _chunk(
    parameters: Parameters,
    rows: Seq[_Row],
    start: int,
    eos_token_ids: Seq[int],
    vocab_size: int,
    slots: dict[Sequence, int],
) -> _Chunk:
    masks: list[int] = []
    biased: list[int] = []
    biases: list[float] = []
    penalised: list[int] = []
    drafted: list[int] = []
    forms = {i: row.task.mask for i, row in enumerate(rows) if row.task.mask is not None}
    for i, (task, _) in enumerate(rows):
        params, first = task.params, i * vocab_size
        if task.is_short:
            masks.extend(first + token_id for token_id in {*eos_token_ids, *params.stop_token_ids})
        biased.extend(first + token_id for token_id in params.logit_bias)
        biases.extend(params.logit_bias.values())
        if task.sequence in slots:
            drafted.extend(len(penalised) * vocab_size + token_id for token_id in task.drafted)
            penalised.append(i)
    return _Chunk(
        start=start,
        stop=start + len(rows),
        kind=rows[0].kind,
        formed=parameters.add(list(forms), "int32"),
        forms=parameters.add(np.concatenate([*forms.values(), np.zeros(0, np.int32)]), "int32"),
        masks=parameters.add(masks, "int32"),
        biased=parameters.add(biased, "int32"),
        biases=parameters.add(np.array(biases), "float32"),
        penalised=parameters.add(penalised, "int32"),
        slots=parameters.add([slots[rows[i].task.sequence] for i in penalised], "int32"),
        drafted=parameters.add(drafted, "int32"),
        has_min_p=any(row.task.params.min_p > 0.0 for row in rows),
    )
