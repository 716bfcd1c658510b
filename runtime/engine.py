"""The engine: admits requests, runs steps, turns sampled tokens into deltas. Not thread-safe; one owner drives it."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..errors import ConfigError, EngineError, PeltonError, RequestError
from .detokenizer import Detokenizer
from .executor import Executor, ExecutorLimits, StepOutput
from .grammar.compiler import GrammarCompiler
from .inputs import logits_offsets, pack
from .outputs import Delta, TokenEvent, TokenLogprob
from .plan import StepPlan
from .request import Request
from .scheduler import Scheduler, SchedulerConfig
from .sequence import Sequence
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What may be switched when a built engine is loaded; None takes the engine's own limit.

    `kv_cache_bytes` sizes the KV pages of this process. `check_invariants` verifies the bookkeeping after every
    step (tests); when idle it is always verified. Raises `ConfigError` naming a field of a wrong type or below 1.
    """

    enable_prefix_caching: bool = True
    max_batch_size: int | None = None
    max_step_tokens: int | None = None
    max_chunk_tokens: int | None = None
    kv_cache_bytes: int | None = None
    num_threads: int | None = None
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in ("enable_prefix_caching", "check_invariants"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in (
            "max_batch_size",
            "max_step_tokens",
            "max_chunk_tokens",
            "kv_cache_bytes",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                unit = " (bytes)" if name == "kv_cache_bytes" else ""
                raise ConfigError(
                    f"{name} must be an integer of at least 1{unit}, got {value!r}; leave it out for the engine's own"
                )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges now, and totals since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_finished: dict[str, int]  # choices, by finish reason


@dataclass(slots=True)
class _Choice:
    """One choice of an active request, from its first token (index 0: from admission) to its end."""

    sequence: Sequence
    detokenizer: Detokenizer


@dataclass(slots=True)
class _Active:
    """An admitted request. Choices other than the first appear when the prompt is computed (`Scheduler.fork`)."""

    request: Request
    choices: dict[int, _Choice] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    has_sent_prompt_logprobs: bool = False


def _within(name: str, wanted: int | None, built: int) -> int:
    if wanted is not None and wanted > built:
        raise ConfigError(
            f"{name}: {wanted} is above {built}, which the engine was built for; lower it or build again"
        )
    return built if wanted is None else wanted


class Engine:
    """Runs `executor` for many requests at once.

    Raises `ConfigError` when `config` asks for more than the executor was built for. `admit` and `abort` only change
    state; everything that a client sees comes out of `step`, in order. Every ending of a choice goes through `_finish`.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        name: str = "model",
    ) -> None:
        config = config or EngineConfig()
        self.name = name
        self.tokenizer = tokenizer
        self._executor = executor
        limits = executor.limits
        self._limits = replace(
            limits,
            max_batch_size=_within("max_batch_size", config.max_batch_size, limits.max_batch_size),
            max_step_tokens=_within("max_step_tokens", config.max_step_tokens, limits.max_step_tokens),
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
            )
        )
        self._sampler = executor.make_sampler(tokenizer.eos_token_ids)
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size)
        self._check_invariants = config.check_invariants
        self._active: dict[str, _Active] = {}
        self._num_deadlines = 0
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
        if params.seed is None:
            request = replace(request, params=replace(params, seed=secrets.randbits(63)))
        sequence = Sequence(request)
        self._scheduler.add(sequence)
        active = _Active(request)
        active.choices[0] = self._choice(sequence)
        self._active[request.request_id] = active
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
                output = self._executor.execute(pack(plan))
                self._scheduler.commit(plan)
                self._advance(plan, output)
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
            num_finished=dict(self._finished),
        )

    def close(self) -> None:
        """End everything that runs and let go of the executor."""
        for request_id in list(self._active):
            self.abort(request_id)
        self._grammars.close()
        self._executor.close()

    def _choice(self, sequence: Sequence) -> _Choice:
        return _Choice(sequence, Detokenizer(self.tokenizer, sequence.request.params))

    def _advance(self, plan: StepPlan, output: StepOutput) -> None:
        """Sample where the step reached the end of a sequence; score prompts that asked for it."""
        rows: list[int] = []
        sequences: list[Sequence] = []
        first_row = 0
        for item in plan.items:
            own_rows = range(first_row, first_row + len(logits_offsets(item)))
            sequence = item.sequence
            if not sequence.is_finished:
                is_scored = self._score_prompt(sequence, item.start, output, own_rows)
                if is_scored and item.is_sampling:
                    for sampled in self._samplers_of(sequence):
                        rows.append(own_rows[-1])
                        sequences.append(sampled)
            first_row = own_rows.stop
        if not sequences:
            return
        events = self._sampler.sample(output.logits, sequences, rows)
        for sequence, event in zip(sequences, events, strict=True):
            if isinstance(event, PeltonError):
                self._finish(sequence, "error", error=event)
            else:
                self._accept(sequence, event)

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
        request = sequence.request
        num_top = request.params.prompt_logprobs
        active = self._active[request.request_id]
        wanted = request.prompt_token_ids[start + 1 : start + 1 + len(rows)]
        # Once sent, the scores are final, though a preempted sequence computes its prompt again.
        if num_top is None or active.has_sent_prompt_logprobs or not wanted:
            return True
        try:
            logits = output.logits[rows.start : rows.start + len(wanted)]
            scores = self._sampler.prompt_logprobs(logits, wanted, num_top)
        except EngineError as error:
            cause = EngineError(f"request {request.request_id}, prompt_logprobs: {error}")
            self._end(request.request_id, "error", cause)
            return False
        active.prompt_logprobs.update(enumerate(scores, start + 1))
        return True

    def _accept(self, sequence: Sequence, event: TokenEvent) -> None:
        """Append a sampled token, decide whether it ends the choice, and emit the delta."""
        request, params, token_id = sequence.request, sequence.request.params, event.token_id
        choice = self._active[request.request_id].choices[sequence.index]
        if sequence.num_output_tokens == 0 and sequence.index == 0:
            self._totals["cached_tokens"] += sequence.num_cached_tokens
        self._scheduler.append(sequence, token_id)
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
        if reason is None and sequence.num_tokens >= self._scheduler.token_limit(request):
            reason = "length"
        if reason is not None:
            self._finish(sequence, reason, text=text, stop_reason=stop, event=event)
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
                prompt_logprobs=self._take_prompt_logprobs(sequence),
                error=error,
            )
        )

    def _take_prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
        active = self._active[sequence.request.request_id]
        num_tokens = sequence.num_prompt_tokens
        is_due = sequence.index == 0 and not active.has_sent_prompt_logprobs
        if sequence.request.params.prompt_logprobs is None or not is_due:
            return None
        scores = active.prompt_logprobs
        if len(scores) < num_tokens - 1:
            return None
        active.has_sent_prompt_logprobs = True
        return (None, *(scores[position] for position in range(1, num_tokens)))

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
        self._finished[reason] += 1
        self._emit(sequence, text, event, reason=reason, stop_reason=stop_reason, error=error)
        active.finished.add(sequence.index)
        if len(active.finished) == active.request.params.n:
            del self._active[active.request.request_id]
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
