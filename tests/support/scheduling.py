"""Drives a scheduler and a scripted executor as the engine does, and checks both at every step.

The scripted next token depends on every token that the KV pages hold for a sequence, so equal tokens prove
that its pages were right: a foreign, stale or unwritten page shows at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.inputs import logits_offsets, pack
from pelton.runtime.plan import StepPlan
from pelton.runtime.prefix_cache import HashFunction
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.scheduler import Scheduler, SchedulerConfig
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import NO_DRAFT, Draft

from .scripted import ScriptedExecutor, digest

VOCAB_SIZE = 997


def make_config(**changes: int | bool | None) -> SchedulerConfig:
    """A small engine: block 4, 32 blocks, 4 sequences and 16 tokens a step."""
    settings: dict[str, int | bool | None] = {
        "max_model_len": 256,
        "max_batch_size": 4,
        "max_step_tokens": 16,
        "block_size": 4,
        "num_blocks": 32,
        **changes,
    }
    return SchedulerConfig(**settings)  # type: ignore[arg-type]


def make_sequence(
    tokens: Iterable[int],
    max_tokens: int | None = 8,
    *,
    n: int = 1,
    salt: str = "",
    prompt_logprobs: int | None = None,
) -> Sequence:
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0, prompt_logprobs=prompt_logprobs)
    return Sequence(Request("r", tuple(tokens), params, cache_salt=salt))


def generate(tokens: Iterable[int], num_tokens: int, index: int = 0) -> list[int]:
    """The output that choice `index` must have, computed without any cache."""
    next_token = digest(VOCAB_SIZE)
    context = list(tokens)
    for _ in range(num_tokens):
        context.append((next_token(context) + index) % VOCAB_SIZE)
    return context[len(context) - num_tokens :]


class StepDriver:
    """A minimal engine: greedy, choice i of a request takes the scripted token + i so that choices differ.

    `on_commit` runs between the executor's step and the commit. `outputs` are the sequences that ran to their
    end. With `drafting` sequences get drafts of random lengths, right up to a random token.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        hash_function: HashFunction | None = None,
        drafting: random.Random | None = None,
    ) -> None:
        self.config = config
        self._drafting = drafting
        self.num_accepted = 0
        self.num_rejected = 0
        self.scheduler = Scheduler(config, hash_function=hash_function)
        limits = ExecutorLimits(
            max_model_len=config.max_model_len,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            vocab_size=VOCAB_SIZE,
        )
        self._next_token = digest(VOCAB_SIZE)
        self.executor = ScriptedExecutor(self._next_token, limits)
        self.live: list[Sequence] = []  # in arrival order, choices behind one another
        self.outputs: list[Sequence] = []
        self.num_steps = 0
        self.num_copies = 0

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence)
        self.live.append(sequence)
        return sequence

    def run(self, *sequences: Sequence, max_steps: int = 10_000) -> list[list[int]]:
        """Add the sequences, step until nothing is left, and return their outputs."""
        for sequence in sequences:
            self.add(sequence)
        for _ in range(max_steps):
            if not self.live:
                self.check_idle()
                return [sequence.output_token_ids for sequence in sequences]
            assert self.step().items, "nothing is planned although sequences are left"
        raise AssertionError(f"{len(self.live)} sequences are left after {max_steps} steps")

    def step(self, *, fails: bool = False, on_commit: Callable[[], None] | None = None) -> StepPlan:
        """One step. With `fails` the executor never ran it: no copies, no commit, no tokens."""
        plan = self.plan()
        if not plan.items:
            self.scheduler.commit(plan)
            return plan
        if fails:
            return plan
        logits = self.executor.execute(pack(plan)).logits
        if on_commit is not None:
            on_commit()
        self.scheduler.commit(plan)
        self.scheduler.check_invariants()
        self._take_tokens(plan, logits.argmax(axis=1).tolist())
        self.scheduler.check_invariants()
        return plan

    def plan(self) -> StepPlan:
        """Plan a step and check it against the documented bounds."""
        self.num_steps += 1
        running = [(s, s.num_preemptions) for s in self.live if s.block_ids]
        plan = self.scheduler.plan()
        self.num_copies += len(plan.block_copies)
        self.scheduler.check_invariants()
        self._check_bounds(plan, running)
        if self._drafting is not None:
            plan = self._draft(plan, self._drafting)
        self._check_hazards(plan)
        return plan

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        if sequence in self.live:
            self.live.remove(sequence)

    def check_idle(self) -> None:
        """Nothing runs and every block is given back."""
        scheduler = self.scheduler
        scheduler.check_invariants()
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_used_blocks) == (0, 0, 0)
        assert scheduler.num_free_blocks + scheduler.num_cached_blocks == self.config.num_blocks

    def _draft(self, plan: StepPlan, rng: random.Random) -> StepPlan:
        config, preemptions = self.config, self.scheduler.num_preemptions
        # Before its first token a sequence may still fork.
        drafting = [item.sequence for item in plan.items if item.sequence.num_output_tokens]
        wanted = {sequence: rng.choice((0, 1, 2, 5, 9)) for sequence in drafting if rng.random() < 0.7}
        granted = self.scheduler.reserve(plan, wanted)
        self.scheduler.check_invariants()
        assert self.scheduler.num_preemptions == preemptions, "somebody was preempted for a draft"
        sampling = {item.sequence for item in plan.items if item.is_sampling}
        assert all(s in sampling and 1 <= n <= wanted[s] for s, n in granted.items())
        assert plan.num_tokens + sum(granted.values()) <= config.max_step_tokens
        num_rows = sum(len(logits_offsets(item)) for item in plan.items)
        if granted and config.max_logits_rows is not None:
            assert num_rows + sum(granted.values()) <= config.max_logits_rows, "a draft cost another run"
        drafts = {}
        for sequence, num_tokens in granted.items():
            assert sequence.num_tokens + num_tokens < self.scheduler.token_limit(sequence.request)
            context, num_right = list(sequence.token_ids), rng.randint(0, num_tokens)
            for i in range(rng.randint(0, num_tokens)):
                context.append((self._next_token(context) + sequence.index + (i >= num_right)) % VOCAB_SIZE)
            drafts[sequence] = Draft(tuple(context[sequence.num_tokens :]))
        plan = self.scheduler.attach(plan, drafts)
        assert all(
            item.draft == drafts.get(item.sequence, NO_DRAFT) for item in plan.items if len(item.draft)
        )
        return plan

    def _take_tokens(self, plan: StepPlan, tokens: list[int]) -> None:
        rows = iter(tokens)
        for item in plan.items:
            sequence, token = item.sequence, -1
            is_taking = item.is_sampling and not sequence.is_finished
            known = [*sequence.token_ids[: item.known_end], *item.draft.token_ids]
            chosen = []
            for offset in logits_offsets(item):
                token = next(rows)
                end = item.start + offset + 1
                assert token == self._next_token(known[:end]), "the KV pages of a sequence are wrong"
                if end >= item.known_end:
                    chosen.append(token)
            if not is_taking:
                continue
            token = self._take_accepted(sequence, item.draft, chosen)
            for choice in (sequence, *self._fork(sequence)):
                if choice.num_tokens < self.scheduler.token_limit(choice.request):
                    self.scheduler.append(choice, (token + choice.index) % VOCAB_SIZE)
                if choice.num_tokens >= self.scheduler.token_limit(choice.request):
                    self._complete(choice)
        assert next(rows, None) is None

    def _take_accepted(self, sequence: Sequence, draft: Draft, chosen: list[int]) -> int:
        """Append the drafted tokens that are right; returns what was chosen behind them."""
        for drafted, token in zip(draft.token_ids, chosen, strict=False):
            if drafted != (token + sequence.index) % VOCAB_SIZE:
                self.num_rejected += 1
                return token
            self.scheduler.append(sequence, drafted, is_computed=True)
            self.scheduler.check_invariants()
            self.num_accepted += 1
        return chosen[len(draft)]

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        if sequence.index or sequence.num_output_tokens or not sequence.request.params.max_tokens:
            return []
        choices = [Sequence(sequence.request, index) for index in range(1, sequence.request.params.n)]
        for choice in choices:
            self.scheduler.fork(sequence, choice)
            self.scheduler.check_invariants()
        place = self.live.index(sequence) + 1
        self.live[place:place] = choices
        return choices

    def _complete(self, sequence: Sequence) -> None:
        assert sequence.output_token_ids == generate(
            sequence.request.prompt_token_ids, sequence.num_output_tokens, sequence.index
        )
        self.outputs.append(sequence)
        self.scheduler.finish(sequence)
        self.live.remove(sequence)

    def _check_bounds(self, plan: StepPlan, running: list[tuple[Sequence, int]]) -> None:
        config = self.config
        planned = {item.sequence: item.num_tokens for item in plan.items}
        assert len(planned) == len(plan.items) <= config.max_batch_size
        assert plan.num_tokens <= config.max_step_tokens
        chunk = config.max_chunk_tokens or config.max_step_tokens
        assert all(0 < item.num_tokens <= chunk for item in plan.items)
        assert all(item.end <= item.sequence.num_tokens for item in plan.items)
        stayed = [s for s, num_preemptions in running if s.num_preemptions == num_preemptions]
        assert stayed == [s for s, _ in running][: len(stayed)], "another than the latest was preempted"
        if running:
            assert running[0][0] in planned, "the oldest sequence stands still"
        elif self.live:
            assert self.live[0] in planned, "nothing runs and the first in the queue is not started"
        decodes = [s for s in stayed if s.num_uncomputed_tokens == 1]
        assert all(planned.get(s) == 1 for s in decodes), "a decode was left out"
        prompts = [s for s in stayed if s.num_uncomputed_tokens > 1]
        if prompts:
            progress = sum(planned.get(s, 0) for s in prompts)
            possible = sum(min(s.num_uncomputed_tokens, chunk) for s in prompts)
            assert progress >= min(config.prefill_reserve, possible), "prompts were starved by decodes"

    def _check_hazards(self, plan: StepPlan) -> None:
        """No block that one item writes is read or written by another, in whatever order they run."""
        size = self.config.block_size
        writers: dict[int, Sequence] = {}
        for item in plan.items:
            for block in item.sequence.block_ids[item.start // size : -(-item.end // size)]:
                assert block not in writers, "a block has two writers"
                writers[block] = item.sequence
        for item in plan.items:
            for block in item.sequence.block_ids[: -(-item.end // size)]:
                assert writers.get(block, item.sequence) is item.sequence, "a block is read while written"
        sources = {source for source, _ in plan.block_copies}
        destinations = [destination for _, destination in plan.block_copies]
        assert len(set(destinations)) == len(destinations), "two copies have one destination"
        assert sources.isdisjoint(destinations), "the order of the copies would matter"
        assert set(destinations) <= set(writers), "a copy that nobody asked for"
