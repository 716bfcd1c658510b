"""Sampling where the logits are: nothing but the tokens, and log-probabilities where they are asked for, comes back.

The order of processing and the draws are those of `sampler.py`. A row's result is the same, to the bit, whatever rows
stand beside it: operations that work on each number by itself, maxima, sorting and integer sums are (see
`truncation_device.py`), and nothing else is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import EngineError
from ..plugins_trt.sampling_memory import (
    BIAS_PARAMETERS,
    COUNT_PARAMETERS,
    DRAFTED_PARAMETERS,
    FORM_WORD_PARAMETERS,
    MASK_PARAMETERS,
    ROW_PARAMETERS,
    SCORED_LOGIT,
    SamplerSizes,
    sampler_sizes,
)
from .logprobs_device import read_scores, score, score_width
from .outputs import TokenEvent, TokenLogprob
from .penalties import has_penalties
from .penalties_device import CountSlots
from .request import SamplingParams
from .sampler import (
    GREEDY_BELOW,
    NOTHING_LEFT,
    POISONED,
    HostSampler,
    Verification,
    check_vocabulary,
    ids_within,
    no_token,
)
from .sampler_pass import IS_POISONED, Parameters, RowTask, SamplingPass, bring
from .sequence import Sequence

Work = Callable[[Tensor, Tensor], None]


class Transfer(Protocol):
    """How a sampler gets at its device."""

    @property
    def device(self) -> torch.device: ...

    def run(self, parameters: np.ndarray, num_results: int, work: Work) -> np.ndarray:
        """Bring `parameters` (uint8) to the device, let `work(parameters, results)` fill `results` `[num_results]`
        int64 there, and return them when they are there: the one wait.

        `work` is not for the host to see through: it may run later, up to the wait.
        """
        ...


class TorchTransfer:
    """`Transfer` on torch's current stream of `device`.

    Each run happens within `guard()`, which may refuse it and says what torch's errors become.
    """

    def __init__(
        self, device: torch.device, guard: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._device, self._guard = device, guard
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._uploaded: torch.cuda.Event | None = None  # after the last copy from `_staging`

    @property
    def device(self) -> torch.device:
        return self._device

    def run(self, parameters: np.ndarray, num_results: int, work: Work) -> np.ndarray:
        with self._guard():
            results = torch.empty(num_results, dtype=torch.int64, device=self._device)
            work(self._upload(torch.from_numpy(parameters)), results)
            on_host: np.ndarray = results.cpu().numpy()
            return on_host

    def release(self) -> None:
        """Give back the staging memory; a later `run` takes it again."""
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _upload(self, parameters: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return parameters
        # Where `work` failed, nobody has waited for the results, and the copy before this one may not be done.
        if self._uploaded is None:
            self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._uploaded.synchronize()
        if len(self._staging) < len(parameters):
            self._staging = torch.empty(len(parameters), dtype=torch.uint8, pin_memory=True)
        staged = self._staging[: len(parameters)].copy_(parameters)
        uploaded = staged.to(self._device, non_blocking=True)
        self._uploaded.record(torch.cuda.current_stream(self._device))
        return uploaded


class DeviceSampler:
    """`Sampler` in torch, for a model whose logits are `vocab_size` wide and whose turns end with `eos_token_ids`.

    Works on the device of `transfer` (None: that of the first logits, on torch's current stream); logits that are
    elsewhere are brought there row by row. It takes the memory that `sizes` says, beside `transfer`'s buffers.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        transfer: Transfer | None = None,
        sizes: SamplerSizes | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = ids_within(vocab_size, eos_token_ids)
        self._host = HostSampler(vocab_size, self._eos_token_ids)
        self._transfer = transfer
        self._sizes = sizes or sampler_sizes(vocab_size, 256)
        self._counts = CountSlots(self._sizes.num_count_slots, vocab_size)
        self._table: Tensor | None = None  # [num_count_slots, vocab_size] int32, from the first penalty on

    @property
    def reads_whole_masks(self) -> bool:
        return True

    def validate(self, params: SamplingParams) -> None:
        check_vocabulary(params, self._vocab_size)

    def verify(
        self, logits: np.ndarray | Tensor, verifications: Seq[Verification]
    ) -> list[list[TokenEvent | EngineError]]:
        if logits.shape[1:] != (self._vocab_size,):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for a vocabulary of {self._vocab_size}")
        tasks: list[RowTask] = []
        for one in verifications:
            if _needs_host(one):
                continue
            for place in range(len(one.draft) + 1):
                mask = None if one.masks is None else one.masks.row(place)
                tasks.append(
                    RowTask(len(tasks), one.row + place, one.sequence, one.draft.token_ids[:place], mask)
                )
        events = iter(self._choose(logits, tasks))
        return [
            self._verify_on_host(logits, one)
            if _needs_host(one)
            else _accepted([next(events) for _ in range(len(one.draft) + 1)], one.draft.token_ids)
            for one in verifications
        ]

    def prompt_logprobs(
        self, logits: np.ndarray | Tensor, token_ids: Seq[int], num_top: int
    ) -> list[TokenLogprob]:
        transfer = self._transfer_for(logits)
        size = self._sizes.max_rows
        scores: list[TokenLogprob] = []
        for start in range(0, len(token_ids), size):
            wanted = token_ids[start : start + size]
            scores += self._score(logits[start : start + len(wanted)], wanted, num_top, transfer)
        return scores

    def forget(self, sequence: Sequence) -> None:
        self._counts.forget(sequence)
        self._host.forget(sequence)

    def release(self) -> None:
        """Give back the memory for counts; it is taken and filled again when it is needed."""
        self._table = None
        self._counts.clear()

    def _transfer_for(self, logits: np.ndarray | Tensor) -> Transfer:
        if self._transfer is None:
            self._transfer = TorchTransfer(
                logits.device if isinstance(logits, Tensor) else torch.device("cpu")
            )
        return self._transfer

    def _verify_on_host(
        self, logits: np.ndarray | Tensor, one: Verification
    ) -> list[TokenEvent | EngineError]:
        rows = logits[one.row : one.row + len(one.draft) + 1]
        on_host = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
        return self._host.verify(on_host, [replace(one, row=0)])[0]

    def _choose(self, logits: np.ndarray | Tensor, tasks: Seq[RowTask]) -> list[TokenEvent | EngineError]:
        if not tasks:
            return []
        rows = [task.row for task in tasks]
        if not 0 <= min(rows) <= max(rows) < len(logits):
            raise ValueError(f"rows {min(rows)} to {max(rows)} of {len(logits)}")
        transfer = self._transfer_for(logits)
        if self._may_scan(logits, len(rows), transfer.device) and all(map(_is_plain, tasks)):
            return self._take_largest(logits, tasks, transfer)
        events: dict[int, TokenEvent | EngineError] = {}
        left = list(tasks)[::-1]
        while left:
            events |= self._run_pass(logits, self._next_tasks(left), transfer)
        return [events[task.place] for task in tasks]

    def _may_scan(self, logits: np.ndarray | Tensor, num_rows: int, device: torch.device) -> bool:
        """Whether all rows may be looked at for `num_rows` of them."""
        is_there = isinstance(logits, Tensor) and logits.device == device
        return is_there and len(logits) <= min(2 * num_rows, self._sizes.max_rows)

    def _take_largest(
        self, logits: np.ndarray | Tensor, tasks: Seq[RowTask], transfer: Transfer
    ) -> list[TokenEvent | EngineError]:
        """Greedy requests and nothing else: no parameters, no copy of the logits."""

        @torch.inference_mode()
        def work(_: Tensor, results: Tensor) -> None:
            # Of equal ones the first; NaN is above all else.
            largest, chosen = bring(logits, results.device).max(1)
            results.copy_(torch.where(torch.isfinite(largest), chosen, IS_POISONED))

        tokens = transfer.run(np.zeros(0, np.uint8), len(logits), work).tolist()
        return [_event(tokens[task.row], task) for task in tasks]

    def _next_tasks(self, left: list[RowTask]) -> list[RowTask]:
        """Take from the end of `left` as many as a pass holds."""
        sizes, tasks = self._sizes, [left.pop()]
        num_bytes = self._parameter_bytes(tasks[0])
        counted = {task.sequence for task in tasks if has_penalties(task.params)}
        while left and len(tasks) < sizes.max_rows:
            task = left[-1]
            num_bytes += self._parameter_bytes(task)
            if has_penalties(task.params):
                counted.add(task.sequence)
            if num_bytes > sizes.parameter_bytes or len(counted) > sizes.num_count_slots:
                break
            tasks.append(left.pop())
        return tasks

    def _parameter_bytes(self, task: RowTask) -> int:
        """What a row adds to a pass's parameters at most."""
        params = task.params
        num_bytes = ROW_PARAMETERS + BIAS_PARAMETERS * len(params.logit_bias)
        if task.mask is not None:
            num_bytes += FORM_WORD_PARAMETERS * len(task.mask)
        if task.is_short:
            num_bytes += MASK_PARAMETERS * len({*self._eos_token_ids, *params.stop_token_ids})
        if has_penalties(params):
            num_bytes += COUNT_PARAMETERS * self._counts.max_increments(task.sequence)
            num_bytes += DRAFTED_PARAMETERS * len(task.drafted)
        return num_bytes

    def _run_pass(
        self, logits: np.ndarray | Tensor, tasks: Seq[RowTask], transfer: Transfer
    ) -> dict[int, TokenEvent | EngineError]:
        """The events of `tasks` by their places."""
        try:
            once = SamplingPass(tasks, self._vocab_size, self._eos_token_ids, self._sizes, self._counts)

            def work(parameters: Tensor, results: Tensor) -> None:
                table = self._counts_on(results.device) if once.is_counting else None
                once.run(logits, table, parameters, results)

            results = transfer.run(once.parameters, once.num_results, work)
        except BaseException:
            self._counts.clear()  # nobody knows how far it came
            raise
        task_at = {task.place: task for task in tasks}
        tokens = results[: len(once.order)].tolist()
        wanted = [task_at[once.order[i]].params.logprobs or 0 for i in once.scored]
        scores = results[len(tokens) :].reshape(-1, score_width(once.num_top))
        logprobs = read_scores(scores, [tokens[i] for i in once.scored], wanted, self._vocab_size)
        logprob_at = dict(zip(once.scored, logprobs, strict=True))
        return {
            place: _event(token, task_at[place], logprob_at.get(i))
            for i, (place, token) in enumerate(zip(once.order, tokens, strict=True))
        }

    @torch.inference_mode()
    def _counts_on(self, device: torch.device) -> Tensor:
        if self._table is None:
            shape = (self._sizes.num_count_slots, self._vocab_size)
            self._table = torch.empty(shape, dtype=torch.int32, device=device)  # rows are cleared when taken
        return self._table

    def _score(
        self, logits: np.ndarray | Tensor, token_ids: Seq[int], num_top: int, transfer: Transfer
    ) -> list[TokenLogprob]:
        parameters = Parameters()
        section = parameters.add(token_ids, "int32")
        width, size = score_width(num_top), self._sizes.rows_at_once(self._vocab_size, SCORED_LOGIT)

        @torch.inference_mode()
        def work(parameters: Tensor, results: Tensor) -> None:
            chosen, rows = section.of(parameters).long(), results.view(-1, width)
            for start in range(0, len(chosen), size):
                own = slice(start, start + size)
                rows[own] = score(bring(logits[own], results.device), chosen[own], num_top)

        scores = transfer.run(parameters.pack(), len(token_ids) * width, work).reshape(-1, width)
        logprobs = read_scores(scores, token_ids, [num_top] * len(token_ids), self._vocab_size)
        if None in logprobs:
            raise EngineError(POISONED)
        return [logprob for logprob in logprobs if logprob is not None]


def _event(token: int, task: RowTask, logprob: TokenLogprob | None = None) -> TokenEvent | EngineError:
    if token < 0:
        cause = POISONED if token == IS_POISONED else NOTHING_LEFT
        return no_token(task.sequence, cause, len(task.drafted))
    return TokenEvent(token, logprob)


def _accepted(
    events: list[TokenEvent | EngineError], drafted: tuple[int, ...]
) -> list[TokenEvent | EngineError]:
    """Those of `events` that count: up to the first that is not the drafted token."""
    for count, (event, token_id) in enumerate(zip(events, drafted, strict=False), 1):
        if isinstance(event, EngineError) or event.token_id != token_id:
            return events[:count]
    return events


def _needs_host(one: Verification) -> bool:
    """Logit processors are the user's Python; leftover distributions are as wide as the vocabulary."""
    return bool(one.sequence.request.params.logits_processors) or one.draft.probs is not None


def _is_plain(task: RowTask) -> bool:
    """Whether the largest of the model's own logits is all that is asked for."""
    params = task.params
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and task.mask is None
        and not (params.logit_bias or task.is_short or has_penalties(params))
    )
