"""Who computes how many tokens in the next step, and in which blocks.

There are no phases. A sequence has tokens, the first of which are computed; a plan says how many more each
sequence computes. A function of its own state: no clock, no tensors, no engine.

Order is arrival order everywhere. Running sequences are planned oldest first; when blocks run out the latest
running sequence is preempted: it gives all blocks back and waits in front of everything that arrived after
it, to be recomputed (from the prefix cache where its blocks survive). Waiting sequences start in order; one
that does not fit yet is not overtaken.

Bounds, per step:

- Decodes are never starved: every running sequence that has one token to compute is in the step, unless it is
  preempted in it. Prompts share what is left, so a prompt of any length delays a decode by no more than one
  step of `max_step_tokens`.
- Prompts are never starved: while prompts are in progress they get together at least
  `SchedulerConfig.prefill_reserve` = `max_step_tokens - max_batch_size + 1` tokens of each step (or all they
  have left, or `max_chunk_tokens` each), however many sequences decode.
- Drafts come last: they get tokens of the step, rows of logits, and blocks that nobody owns, when all else is planned.
  Blocks of what was not accepted are given back before the next plan, so the others are planned as if nothing had been
  drafted (but for cached blocks that were used least recently: drafts may take their place).
- The oldest running sequence always progresses: it may take the blocks of all others, and admission has made
  sure that the whole pool suffices for it. Hence no deadlock and no livelock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .blocks import BlockPool
from .inputs import logits_offsets
from .plan import PlanItem, StepPlan
from .prefix_cache import CachedBlock, HashFunction, PrefixCache, TokenChain
from .request import Request
from .scheduler_config import SchedulerConfig
from .scheduler_queue import ArrivalQueue, Record
from .sequence import Sequence
from .speculate.draft import NO_DRAFT, Draft

__all__ = ["Scheduler", "SchedulerConfig"]


@dataclass(slots=True)
class _Sketch:
    """A plan in the making. `spare_tokens` are those of the step that no decode has a claim on."""

    spare_tokens: int
    items: list[PlanItem] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Plans steps for sequences, owning their blocks from `add` to `finish`.

    A step is `plan()`, where there is something to draft `reserve` and `attach`, the executor's run, `commit(plan)`,
    then `append` (and `fork`) for what was sampled. `finish` may come at any moment. A plan that is not committed is
    void: its step failed, the next `plan()` computes the same tokens again. Misuse (an unknown sequence, a second
    commit) raises `RuntimeError`.
    """

    def __init__(self, config: SchedulerConfig, *, hash_function: HashFunction | None = None) -> None:
        self._config = config
        self._pool = BlockPool(config.num_blocks, config.block_size)
        self._cache = PrefixCache(self._pool, hash_function=hash_function)
        self._records: dict[Sequence, Record] = {}
        self._running = ArrivalQueue()
        self._waiting = ArrivalQueue()
        self._in_flight: StepPlan | None = None
        self._drafting: list[Record] = []  # those that got blocks for drafts since the last plan
        self._num_arrivals = 0
        self.num_preemptions = 0
        # Prefix cache counters of sequences that may read it, counted when they first start.
        self.num_prefix_queried_tokens = 0
        self.num_prefix_hit_tokens = 0

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences own."""
        return self._pool.num_owned

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody owns but the prefix cache keeps; they are given up when blocks are needed."""
        return self._pool.num_cached

    def token_limit(self, request: Request) -> int:
        """Prompt plus output tokens at which a sequence of `request` must be finished."""
        return self._config.token_limit(request)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises `RequestError` if it could never run to its end."""
        if sequence in self._records or sequence.is_finished:
            raise RuntimeError(f"sequence of {sequence.request.request_id} is added twice")
        request = sequence.request
        self._config.check_admissible(request)
        chain = None
        if self._config.enable_prefix_caching:
            # Prompt log-probabilities need the logits of every prompt position, so all must be computed.
            chain = TokenChain((request.cache_salt, ""), is_reading=request.params.prompt_logprobs is None)
        self._num_arrivals += 1
        order = (self._num_arrivals, 0)
        record = Record(sequence, order, self._config.token_limit(request), chain)
        self._records[sequence] = record
        self._waiting.add(record)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Queue `child`, a further choice of `parent`'s request with equal tokens, right behind its parent.

        It shares the parent's computed blocks, the last partial one included; whoever writes next into a
        shared block copies it first. With no place in the batch it waits, to be computed later. Only
        between steps: not between `plan` and `commit`.
        """
        record = self._record(parent)
        if self._in_flight is not None:
            raise RuntimeError("fork between plan and commit")
        if child in self._records or child.is_finished or child.token_ids != parent.token_ids:
            raise RuntimeError("fork needs a new child with the tokens of its parent")
        self._num_arrivals += 1
        order = (record.order[0], self._num_arrivals)
        chain = record.chain.fork() if record.chain is not None else None
        twin = Record(child, order, record.token_limit, chain, was_admitted=record.was_admitted)
        self._records[child] = twin
        child.num_cached_tokens = parent.num_cached_tokens
        if record.is_running and len(self._running) < self._config.max_batch_size:
            child.num_computed_tokens = parent.num_computed_tokens
            child.block_ids = parent.block_ids[: self._pool.num_blocks_for(parent.num_computed_tokens)]
            for block in child.block_ids:
                self._pool.share(block)
            twin.is_running = True
            self._running.add(twin)
        else:
            if chain is not None:
                chain.nodes = []
            self._waiting.add(twin)

    def plan(self) -> StepPlan:
        """The next step; empty only if no sequence can compute anything.

        The copies are disjoint (no block is written by one and read or written by another), so they may run
        in any order. Pack the plan before finishing any of its sequences: that releases their blocks.
        """
        self._void_in_flight()
        self._give_back_drafted()
        num_decodes = sum(record.sequence.num_uncomputed_tokens == 1 for record in self._running)
        sketch = _Sketch(self._config.max_step_tokens - num_decodes)
        self._plan_running(sketch)
        self._plan_waiting(sketch)
        # Sources kept an owner until here, so that none could become the destination of another copy.
        self._cache.release([source for source, _ in sketch.copies])
        self._in_flight = StepPlan(tuple(sketch.items), tuple(sketch.copies))
        return self._in_flight

    def reserve(self, plan: StepPlan, wanted: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """How many drafted tokens each sequence of the last plan may add to it: at most `wanted`, 1 or more.

        Only those that sample in it, never beyond their token limit; the blocks for them are taken from what is left.
        Each adds a row of logits, of which the step keeps within `max_logits_rows`. Earlier sequences come first.
        """
        if plan is not self._in_flight:
            raise RuntimeError("reserve takes the last plan")
        num_left = self._config.max_step_tokens - plan.num_tokens
        if self._config.max_logits_rows is not None:
            num_rows = sum(len(logits_offsets(item)) for item in plan.items)
            num_left = min(num_left, self._config.max_logits_rows - num_rows)
        granted: dict[Sequence, int] = {}
        for item in plan.items:
            sequence = item.sequence
            num_tokens = min(wanted.get(sequence, 0), num_left)
            if num_tokens < 1 or not item.is_sampling:
                continue
            # The token after the last drafted one is sampled as well.
            num_tokens = min(num_tokens, self._record(sequence).token_limit - sequence.num_tokens - 1)
            num_blocks = len(sequence.block_ids)
            num_tokens = self._extend_blocks(item, num_tokens, num_spare=len(plan.items))
            if len(sequence.block_ids) > num_blocks:
                self._drafting.append(self._record(sequence))
            if num_tokens > 0:
                granted[sequence] = num_tokens
                num_left -= num_tokens
        return granted

    def attach(self, plan: StepPlan, drafts: Mapping[Sequence, Draft]) -> StepPlan:
        """The last plan with drafts no longer than `reserve` has granted; it takes the place of `plan`."""
        if plan is not self._in_flight:
            raise RuntimeError("attach takes the last plan")
        items = []
        for item in plan.items:
            draft = drafts.get(item.sequence, NO_DRAFT)
            if len(draft):
                item = replace(item, num_tokens=item.num_tokens + len(draft), draft=draft)
                if item.end > len(item.sequence.block_ids) * self._config.block_size:
                    raise RuntimeError("a draft is longer than its blocks")
            items.append(item)
        self._in_flight = replace(plan, items=tuple(items))
        return self._in_flight

    def commit(self, plan: StepPlan) -> None:
        """The step of the last plan has run: its known tokens are computed, full blocks go to the prefix cache."""
        if plan is not self._in_flight:
            raise RuntimeError("commit takes the last plan, once")
        self._in_flight = None
        for item in plan.items:
            record = self._records.get(item.sequence)
            if record is not None:
                self._set_computed(record, item.known_end)

    def append(self, sequence: Sequence, token_id: int, *, is_computed: bool = False) -> None:
        """A sampled token joins `sequence`, which must be finished when it reaches its token limit.

        `is_computed`: it was drafted, and accepted, so the last step has computed it; all tokens before it are too.
        """
        record = self._record(sequence)
        if sequence.num_tokens >= record.token_limit:
            raise RuntimeError(
                f"sequence of {sequence.request.request_id} is at its limit of {record.token_limit} tokens"
            )
        sequence.token_ids.append(token_id)
        if is_computed:
            self._set_computed(record, sequence.num_tokens)

    def finish(self, sequence: Sequence) -> None:
        """Release whatever `sequence` holds, in any state and any number of times: the only way out."""
        sequence.is_finished = True
        record = self._records.pop(sequence, None)
        if record is None:
            return
        if record.is_running:
            self._running.remove(record)
            self._release_blocks(record)
        else:
            self._waiting.remove(record)

    def _record(self, sequence: Sequence) -> Record:
        record = self._records.get(sequence)
        if record is None:
            raise RuntimeError(f"sequence of {sequence.request.request_id} is not scheduled here")
        return record

    def _set_computed(self, record: Record, num_tokens: int) -> None:
        sequence, chain = record.sequence, record.chain
        sequence.num_computed_tokens = num_tokens
        if chain is not None and num_tokens // self._config.block_size > len(chain.nodes):
            self._cache.publish(chain, sequence.token_ids, num_tokens, sequence.block_ids)

    def _extend_blocks(self, item: PlanItem, num_tokens: int, num_spare: int) -> int:
        """Blocks for up to `num_tokens` more tokens behind `item`, leaving `num_spare` available.

        Returns for how many tokens there are blocks now.
        """
        block_ids, size = item.sequence.block_ids, self._config.block_size
        num_wanted = self._pool.num_blocks_for(item.end + num_tokens) - len(block_ids)
        num_grown = min(num_wanted, self._cache.num_available - num_spare)
        block_ids.extend(self._cache.allocate() for _ in range(num_grown))
        return min(num_tokens, len(block_ids) * size - item.end)

    def _give_back_drafted(self) -> None:
        """Sequences keep of the blocks for their drafts only those with accepted tokens in them."""
        for record in self._drafting:
            if record.is_running and not record.sequence.is_finished:
                sequence = record.sequence
                num_blocks = self._pool.num_blocks_for(sequence.num_computed_tokens)
                self._cache.release(sequence.block_ids[num_blocks:])
                del sequence.block_ids[num_blocks:]
        self._drafting = []

    def _void_in_flight(self) -> None:
        """Forget a plan whose step did not succeed.

        Its copies may not have run, so the sequences they were for compute the copied positions again.
        """
        plan, self._in_flight = self._in_flight, None
        if plan is None or not plan.block_copies:
            return
        destinations = {destination for _, destination in plan.block_copies}
        block_size = self._config.block_size
        for item in plan.items:
            sequence = item.sequence
            if sequence in self._records and sequence.block_ids[item.start // block_size] in destinations:
                sequence.num_computed_tokens -= item.start % block_size

    def _plan_running(self, sketch: _Sketch) -> None:
        config, running = self._config, self._running
        max_chunk = config.max_chunk_tokens or config.max_step_tokens
        position = 0
        while position < len(running):  # preemption shortens it from the end
            record = running[position]
            position += 1
            sequence = record.sequence
            num_tokens = sequence.num_uncomputed_tokens
            if num_tokens != 1:
                num_tokens = min(num_tokens, max_chunk, sketch.spare_tokens)
                sketch.spare_tokens -= num_tokens
            if num_tokens and self._reserve_blocks(record, num_tokens, sketch):
                sketch.items.append(PlanItem(sequence, sequence.num_computed_tokens, num_tokens))

    def _plan_waiting(self, sketch: _Sketch) -> None:
        """Start waiting sequences while places, tokens and blocks last.

        A sequence gets the blocks of all its tokens at once, so that no prompt is preempted half-way by its
        own growth. One block per planned sequence stays spare: each of them grows into a new block soon,
        and would otherwise preempt the newcomer.
        """
        config, waiting = self._config, self._waiting
        max_chunk = config.max_chunk_tokens or config.max_step_tokens
        while waiting and sketch.spare_tokens and len(self._running) < config.max_batch_size:
            num_spare = len(sketch.items)
            if self._cache.num_available <= num_spare:
                break
            record = waiting[0]
            sequence = record.sequence
            hits: list[CachedBlock] = []
            if record.chain is not None:
                # At least one token is left to compute: its logits choose the next one.
                max_hits = (sequence.num_tokens - 1) // config.block_size
                hits = self._cache.match(record.chain, sequence.token_ids, max_hits)
            num_new = self._pool.num_blocks_for(sequence.num_tokens) - len(hits)
            if num_new + self._cache.num_unowned(hits) + num_spare > self._cache.num_available:
                break
            self._start(record, hits, num_new)
            num_tokens = min(sequence.num_uncomputed_tokens, max_chunk, sketch.spare_tokens)
            sketch.spare_tokens -= num_tokens
            sketch.items.append(PlanItem(sequence, sequence.num_computed_tokens, num_tokens))

    def _start(self, record: Record, hits: list[CachedBlock], num_new_blocks: int) -> None:
        sequence, chain = record.sequence, record.chain
        self._waiting.remove(record)
        if chain is not None:
            sequence.block_ids = self._cache.acquire(chain, hits)
        sequence.num_computed_tokens = len(hits) * self._config.block_size
        sequence.block_ids.extend(self._cache.allocate() for _ in range(num_new_blocks))
        if not record.was_admitted:
            record.was_admitted = True
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if chain is not None and chain.is_reading:
                self.num_prefix_queried_tokens += sequence.num_tokens
                self.num_prefix_hit_tokens += sequence.num_cached_tokens
        record.is_running = True
        self._running.add(record)

    def _reserve_blocks(self, record: Record, num_tokens: int, sketch: _Sketch) -> bool:
        """Give a running sequence exclusive blocks for its next tokens, preempting later ones if need be.

        Returns False if the sequence itself was the latest and had to go.
        """
        sequence, block_size = record.sequence, self._config.block_size
        start, block_ids = sequence.num_computed_tokens, sequence.block_ids
        first = start // block_size
        num_grown = self._pool.num_blocks_for(start + num_tokens) - len(block_ids)
        # Only the block with computed tokens in it can be shared: those behind it were never forked.
        is_partial = start % block_size != 0
        while True:
            is_shared = is_partial and self._is_shared(block_ids[first], sketch)
            if num_grown <= 0 and not is_shared:
                return True
            if max(num_grown, 0) + is_shared <= self._cache.num_available:
                break
            latest = self._running[-1]
            self._preempt(latest)
            if latest is record:
                return False
        if is_shared:
            copy = self._cache.allocate()
            sketch.copies.append((block_ids[first], copy))
            block_ids[first] = copy
        block_ids.extend(self._cache.allocate() for _ in range(num_grown))
        return True

    def _is_shared(self, block: int, sketch: _Sketch) -> bool:
        """Whether another sequence owns `block` too, not counting the owners that copied it in this plan."""
        num_owners = self._pool.num_owners(block)
        return num_owners > 1 and num_owners - sum(source == block for source, _ in sketch.copies) > 1

    def _preempt(self, record: Record) -> None:
        sequence = record.sequence
        self._running.remove(record)
        self._release_blocks(record)
        record.is_running = False
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(record)

    def _release_blocks(self, record: Record) -> None:
        self._cache.release(record.sequence.block_ids, record.chain)
        record.sequence.block_ids = []

    def check_invariants(self) -> None:
        """Raise `AssertionError` with what is wrong. O(blocks), for tests and idle moments."""
        self._pool.check_invariants()
        self._cache.check_invariants()
        num_owners = [0] * self._config.num_blocks
        for record in self._running:
            self._check_running(record)
            for block in record.sequence.block_ids:
                num_owners[block] += 1
        for block, expected in enumerate(num_owners):
            actual = self._pool.num_owners(block)
            assert actual == expected, f"block {block} counts {actual} owners, {expected} sequences hold it"
        for record in self._waiting:
            sequence = record.sequence
            assert not record.is_running, "a waiting sequence is marked as running"
            assert not sequence.is_finished, "a waiting sequence is finished"
            assert not sequence.block_ids, "a waiting sequence holds blocks"
            assert sequence.num_computed_tokens == 0, "a waiting sequence has computed tokens"
            assert record.chain is None or not record.chain.nodes, "a waiting sequence holds cached blocks"
        queued = [record.sequence for queue in (self._running, self._waiting) for record in queue]
        assert len(queued) == len(set(queued)) == len(self._records), "queues and records disagree"
        assert len(self._running) <= self._config.max_batch_size, "the batch is too large"
        for queue in (self._running, self._waiting):
            orders = [record.order for record in queue]
            assert orders == sorted(orders), "a queue is out of arrival order"
        for item in self._in_flight.items if self._in_flight is not None else ():
            if item.sequence in self._records:
                self._check_written(item)

    def _check_running(self, record: Record) -> None:
        sequence, blocks = record.sequence, record.sequence.block_ids
        assert record.is_running, "a running sequence is marked as waiting"
        assert not sequence.is_finished, "a running sequence is finished"
        assert sequence.num_computed_tokens <= sequence.num_tokens, "more tokens are computed than known"
        capacity = len(blocks) * self._config.block_size
        assert capacity >= sequence.num_computed_tokens, "a computed token has no block"
        assert len(blocks) == len(set(blocks)), "a sequence holds a block twice"
        nodes = record.chain.nodes if record.chain is not None else []
        published = [node.block_id for node in nodes]
        assert published == blocks[: len(nodes)], "the published blocks are not the sequence's first ones"
        num_full = sequence.num_computed_tokens // self._config.block_size
        assert len(nodes) <= num_full, "a block is published before it is computed"

    def _check_written(self, item: PlanItem) -> None:
        size = self._config.block_size
        for block in item.sequence.block_ids[item.start // size : self._pool.num_blocks_for(item.end)]:
            assert self._pool.num_owners(block) == 1, f"block {block} is written but shared"
            assert not self._cache.is_cached(block), f"block {block} is written but published"
