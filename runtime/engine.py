"""The engine: admits requests, runs steps, turns sampled tokens into deltas. Not thread-safe; one owner drives it."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..errors import EngineError, PeltonError, RequestError
from .detokenizer import Detokenizer
from .engine_config import EngineConfig, EngineStats, within
from .executor import Executor, ExecutorLimits, StepOutput
from .grammar.compiler import GrammarCompiler
from .grammar.mask_filler import MaskFiller, MaskRows
from .grammar.vocabulary import num_words
from .inputs import logits_offsets, pack
from .outputs import Delta, TokenEvent
from .plan import PlanItem, StepPlan
from .prompt_scores import PromptScores
from .request import Request
from .sampler import Verification
from .scheduler import Scheduler, SchedulerConfig
from .sequence import Sequence
from .speculate.speculator import DraftTerms, Speculator
from .structured import Masks, MasksOnDemand, Matcher
from .tokenizer import Tokenizer

__all__ = ["Engine", "EngineConfig", "EngineStats"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Choice:
    """One choice of an active request, from its first token (index 0: from admission) to its end."""

    sequence: Sequence
    detokenizer: Detokenizer
    matcher: Matcher | None = None


@dataclass(slots=True)
class _Active:
    """An admitted request. Choices other than the first appear when the prompt is computed (`Scheduler.fork`)."""

    request: Request
    prompt_scores: PromptScores
    has_own_seed: bool = True
    choices: dict[int, _Choice] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


class Engine:
    """Runs `executor` for many requests at once.

    `speculator` drafts (None: only what a form forces). Raises `ConfigError` when `config` asks for more than the
    executor was built for. `admit` and `abort` only change state; everything that a client sees comes out of `step`, in
    order. Every ending of a choice goes through `_finish`.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        name: str = "model",
        speculator: Speculator | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.name = name
        self.tokenizer = tokenizer
        self._executor = executor
        limits = executor.limits
        self._limits = replace(
            limits,
            max_batch_size=within("max_batch_size", config.max_batch_size, limits.max_batch_size),
            max_step_tokens=within("max_step_tokens", config.max_step_tokens, limits.max_step_tokens),
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=limits.max_model_len,
                max_batch_size=self._limits.max_batch_size,
                max_step_tokens=self._limits.max_step_tokens,
                block_size=limits.block_size,
                num_blocks=limits.num_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
                max_chunk_tokens=config.max_chunk_tokens,
                max_logits_rows=limits.max_logits_rows,
            )
        )
        self._sampler = executor.make_sampler(tokenizer.eos_token_ids)
        self._speculator = speculator or Speculator(eos_token_ids=frozenset(tokenizer.eos_token_ids))
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size)
        self._mask_filler: MaskFiller | None = None  # from the first form on
        self._check_invariants = config.check_invariants
        self._active: dict[str, _Active] = {}
        self._num_deadlines = 0
        self._num_forms = 0
        self._pending: list[Delta] = []
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles `SamplingParams.structured_output` for `Request.grammar`, in whichever thread asks."""
        return self._grammars

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._pending)

    @property
    def num_requests(self) -> int:
        return len(self._active)

    def admit(self, request: Request) -> None:
        """Queue `request`. Raises `RequestError`, naming the field, if it can never be served."""
        if request.request_id in self._active:
            raise RequestError(f"request id {request.request_id!r} is in use", field="request_id")
        params = request.params
        self._sampler.validate(params)
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < self._limits.vocab_size:
                raise RequestError(
                    f"prompt: token id {token_id} is outside the vocabulary [0, {self._limits.vocab_size})",
                    field="prompt",
                )
        if (params.structured_output is None) != (request.grammar is None):
            raise RequestError(
                "structured_output must come with its compiled grammar", field="structured_output"
            )
        has_own_seed = params.seed is not None
        if params.seed is None:
            request = replace(request, params=replace(params, seed=secrets.randbits(63)))
        sequence = Sequence(request)
        active = _Active(request, PromptScores(request), has_own_seed)
        active.choices[0] = self._choice(sequence)
        self._scheduler.add(sequence)
        self._active[request.request_id] = active
        self._num_forms += request.grammar is not None
        self._num_deadlines += request.deadline is not None
        self._totals["prompt_tokens"] += request.num_prompt_tokens

    def abort(self, request_id: str) -> None:
        """End a request now; its last deltas come from the next `step`. Unknown ids are ignored."""
        self._end(request_id, "abort")

    def step(self) -> list[Delta]:
        """Run one step and return what it made, endings by abort, deadline and error included."""
        if self._num_deadlines:
            now = time.monotonic()
            for active in list(self._active.values()):
                deadline = active.request.deadline
                if deadline is not None and deadline <= now:
                    self._end(active.request.request_id, "deadline")
        plan = self._scheduler.plan()
        if plan.items:
            self._totals["steps"] += 1
            try:
                if self._speculator.has_drafter or self._num_forms:
                    plan = self._speculator.draft(plan, self._scheduler, self._terms)
                self._run(plan)
            except Exception as error:
                self._fail(plan, error)
        if self._check_invariants or not self._active:
            self.check_invariants()
        deltas, self._pending = self._pending, []
        return deltas

    def check_invariants(self) -> None:
        """Raise `AssertionError` if blocks, reference counts or queues do not add up."""
        self._scheduler.check_invariants()
        if not self._active:
            assert self._scheduler.num_used_blocks == 0, "idle, but blocks are in use"
            assert self._scheduler.num_running == self._scheduler.num_waiting == 0, (
                "idle, but sequences are queued"
            )

    def stats(self) -> EngineStats:
        scheduler, totals = self._scheduler, self._totals
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=self._limits.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            num_used_blocks=scheduler.num_used_blocks,
            num_cached_blocks=scheduler.num_cached_blocks,
            num_steps=totals["steps"],
            num_prompt_tokens=totals["prompt_tokens"],
            num_cached_tokens=totals["cached_tokens"],
            num_output_tokens=totals["output_tokens"],
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queried_tokens=scheduler.num_prefix_queried_tokens,
            num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            num_draft_tokens=totals["draft_tokens"],
            num_accepted_tokens=totals["accepted_tokens"],
            num_finished=dict(self._finished),
        )

    def close(self) -> None:
        """End everything that runs and let go of the executor."""
        for request_id in list(self._active):
            self.abort(request_id)
        self._grammars.close()
        if self._mask_filler is not None:
            self._mask_filler.close()
        self._speculator.close()
        self._executor.close()

    def _choice(self, sequence: Sequence) -> _Choice:
        grammar = sequence.request.grammar
        matcher = None if grammar is None else grammar.start()
        return _Choice(sequence, Detokenizer(self.tokenizer, sequence.request.params), matcher)

    def _choice_of(self, sequence: Sequence) -> _Choice:
        return self._active[sequence.request.request_id].choices[sequence.index]

    def _terms(self, sequence: Sequence) -> DraftTerms:
        active = self._active[sequence.request.request_id]
        may_draw = not (active.has_own_seed or active.request.params.is_greedy)
        return DraftTerms(active.choices[sequence.index].matcher, may_draw)

    def _run(self, plan: StepPlan) -> None:
        start = time.monotonic()
        masks = self._masks(plan)
        output = self._executor.execute(pack(plan))
        self._scheduler.commit(plan)
        self._advance(plan, output, masks())
        self._speculator.record_step(plan.num_tokens, time.monotonic() - start)

    def _masks(self, plan: StepPlan) -> Callable[[], Mapping[Sequence, Masks]]:
        """What the sequences that have a form and sample in this step may say, when it has run.

        A sampler that reads whole masks gets them filled beside the step. One on the host, whose cores the step itself
        takes, asks for what it needs.
        """
        formed: list[tuple[PlanItem, Matcher]] = []
        for item in plan.items if self._num_forms else ():
            if item.is_sampling and (matcher := self._choice_of(item.sequence).matcher) is not None:
                formed.append((item, matcher))
        if not formed:
            return dict
        if not self._sampler.reads_whole_masks:
            words = num_words(self._limits.vocab_size)
            return lambda: {i.sequence: MasksOnDemand(m, i.draft.token_ids, words) for i, m in formed}
        if self._mask_filler is None:
            self._mask_filler = MaskFiller(self._limits.vocab_size)
        future = self._mask_filler.submit([(matcher, item.draft.token_ids) for item, matcher in formed])
        return lambda: dict(zip((item.sequence for item, _ in formed), future.result(), strict=True))

    def _advance(self, plan: StepPlan, output: StepOutput, masks: Mapping[Sequence, Masks]) -> None:
        """Verify drafts and sample where the step reached the end of a sequence; score prompts that asked for it."""
        verifications: list[Verification] = []
        first_row = 0
        for item in plan.items:
            own_rows = range(first_row, first_row + len(logits_offsets(item)))
            if not item.sequence.is_finished:
                is_scored = self._score_prompt(item.sequence, item.start, output, own_rows)
                if is_scored and item.is_sampling:
                    row = own_rows.stop - 1 - len(item.draft)
                    verifications += self._verifications(item, row, masks.get(item.sequence))
            first_row = own_rows.stop
        # A form that fails may have ended other choices of its request.
        verifications = [one for one in verifications if not one.sequence.is_finished]
        if not verifications:
            return
        results = self._sampler.verify(output.logits, verifications)
        seen: list[Sequence] = []
        rows: list[int] = []
        for one, events in zip(verifications, results, strict=True):
            num_accepted = self._accept_all(one.sequence, events)
            if len(one.draft):
                self._totals["draft_tokens"] += len(one.draft)
                self._totals["accepted_tokens"] += num_accepted
                self._speculator.record(one.sequence, num_accepted)
            if not one.sequence.is_finished:
                seen.append(one.sequence)
                rows.append(one.row + len(events) - 1)
        if output.hidden is not None and seen:
            self._speculator.observe(output.hidden, seen, rows)

    def _verifications(self, item: PlanItem, row: int, masks: Masks | None) -> Iterator[Verification]:
        draft = item.draft
        if isinstance(masks, MaskRows):
            if masks.error is not None:
                self._end(item.sequence.request.request_id, "error", masks.error)
                return
            draft = masks.within(draft)
        for sequence in self._samplers_of(item.sequence):
            yield Verification(sequence, row, draft, masks)

    def _accept_all(self, sequence: Sequence, events: list[TokenEvent | EngineError]) -> int:
        """Take what was verified until something of it ends the choice: how many drafted tokens were accepted."""
        for count, event in enumerate(events):
            if isinstance(event, EngineError):
                self._finish(sequence, "error", error=event)
            else:
                self._accept(sequence, event, is_computed=count < len(events) - 1)
            if sequence.is_finished:
                return min(count + 1, len(events) - 1)
        return len(events) - 1

    def _samplers_of(self, sequence: Sequence) -> Iterator[Sequence]:
        """The sequences that take a token from `sequence`'s last row: itself, and at the prompt's end its siblings."""
        params = sequence.request.params
        if params.max_tokens == 0:
            for index in range(params.n):
                self._finish_index(self._active[sequence.request.request_id], index, "length")
            return
        yield sequence
        active = self._active[sequence.request.request_id]
        if sequence.index == 0 and len(active.choices) < params.n and sequence.num_output_tokens == 0:
            for index in range(1, params.n):
                child = Sequence(sequence.request, index)
                self._scheduler.fork(sequence, child)
                active.choices[index] = self._choice(child)
                yield child

    def _score_prompt(self, sequence: Sequence, start: int, output: StepOutput, rows: range) -> bool:
        """Score the prompt if its request asks for that: `rows[i]` of the logits predicts position `start + i + 1`.

        False if a row cannot be scored: that has ended the request, and only that.
        """
        scores = self._active[sequence.request.request_id].prompt_scores
        wanted = scores.wanted(start, len(rows))
        if not wanted:
            return True
        try:
            logits = output.logits[rows.start : rows.start + len(wanted)]
            scores.add(start, self._sampler.prompt_logprobs(logits, wanted, scores.num_top))
        except EngineError as error:
            request_id = sequence.request.request_id
            cause = EngineError(f"request {request_id}, prompt_logprobs: {error}")
            self._end(request_id, "error", cause)
            return False
        return True

    def _accept(self, sequence: Sequence, event: TokenEvent, *, is_computed: bool = False) -> None:
        """Append a sampled token, decide whether it ends the choice, and emit the delta.

        `is_computed`: it was drafted, so the step that verified it has computed it.
        """
        request, params, token_id = sequence.request, sequence.request.params, event.token_id
        choice = self._choice_of(sequence)
        if sequence.num_output_tokens == 0 and sequence.index == 0:
            self._totals["cached_tokens"] += sequence.num_cached_tokens
        self._scheduler.append(sequence, token_id, is_computed=is_computed)
        self._totals["output_tokens"] += 1
        reason: str | None = None
        stop: int | str | None = None
        text = ""
        is_stop_token = token_id in params.stop_token_ids
        if is_stop_token or (token_id in self.tokenizer.eos_token_ids and not params.ignore_eos):
            reason, stop = "stop", token_id if is_stop_token else None
        if reason is None or (is_stop_token and params.include_stop_str_in_output):
            step = choice.detokenizer.push([token_id])
            text = step.text
            if step.stop_reason is not None:
                reason, stop = "stop", step.stop_reason
        error: PeltonError | None = None
        if reason is None and choice.matcher is not None:
            try:
                reason = "stop" if _is_last_of_form(choice.matcher, token_id) else None
            except EngineError as cause:
                reason, error = "error", cause
        if reason is None and sequence.num_tokens >= self._scheduler.token_limit(request):
            reason = "length"
        if reason is not None:
            self._finish(sequence, reason, text=text, stop_reason=stop, event=event, error=error)
        else:
            self._emit(sequence, text, event)

    def _emit(
        self,
        sequence: Sequence,
        text: str,
        event: TokenEvent | None,
        *,
        reason: str | None = None,
        stop_reason: int | str | None = None,
        error: PeltonError | None = None,
    ) -> None:
        request = sequence.request
        scores = self._active[request.request_id].prompt_scores
        self._pending.append(
            Delta(
                request_id=request.request_id,
                index=sequence.index,
                text=text,
                token_ids=(event.token_id,) if event is not None else (),
                logprobs=(event.logprob,) if event is not None and event.logprob is not None else (),
                finish_reason=reason,
                stop_reason=stop_reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
                num_output_tokens=sequence.num_output_tokens,
                prompt_logprobs=scores.take() if sequence.index == 0 else None,
                error=error,
            )
        )

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        *,
        text: str = "",
        stop_reason: int | str | None = None,
        event: TokenEvent | None = None,
        error: PeltonError | None = None,
    ) -> None:
        """The one way out of a choice: release what it holds, emit its last delta, forget the request with its last."""
        active = self._active[sequence.request.request_id]
        choice = active.choices.get(sequence.index)
        if choice is not None and not isinstance(stop_reason, str):
            text += choice.detokenizer.finish()
        self._scheduler.finish(sequence)
        self._sampler.forget(sequence)
        self._speculator.end(sequence)
        self._finished[reason] += 1
        self._emit(sequence, text, event, reason=reason, stop_reason=stop_reason, error=error)
        active.finished.add(sequence.index)
        if len(active.finished) == active.request.params.n:
            del self._active[active.request.request_id]
            self._num_forms -= active.request.grammar is not None
            self._num_deadlines -= active.request.deadline is not None

    def _finish_index(
        self, active: _Active, index: int, reason: str, error: PeltonError | None = None
    ) -> None:
        """Finish choice `index`, also one that has not begun."""
        if index in active.finished:
            return
        choice = active.choices.get(index)
        sequence = choice.sequence if choice is not None else Sequence(active.request, index)
        self._finish(sequence, reason, error=error)

    def _end(self, request_id: str, reason: str, error: PeltonError | None = None) -> None:
        active = self._active.get(request_id)
        if active is not None:
            for index in range(active.request.params.n):
                self._finish_index(active, index, reason, error)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """A step failed: its requests end with an error, all others go on. Only the log says what failed: the
        cause may hold what is no client's business.
        """
        request_ids = {item.sequence.request.request_id: None for item in plan.items}
        log.error("step failed for requests %s", ", ".join(request_ids), exc_info=error)
        for request_id in request_ids:
            message = f"request {request_id}: the engine failed on this request; the log has the cause"
            self._end(request_id, "error", EngineError(message))


def _is_last_of_form(matcher: Matcher, token_id: int) -> bool:
    """Whether nothing may follow `token_id`, which the matcher takes. Raises `EngineError` as the matcher does."""
    if not matcher.accept(token_id):
        raise EngineError(f"token {token_id} was chosen although the form of the output refuses it")
    return matcher.is_finished
