"""A smaller model of the same vocabulary drafts (Leviathan et al. 2023; Chen et al. 2023).

It has pages of its own under the target's block ids: block b of the pool is a page of the target and a page of the
draft model, so one pool counts the memory of both and a block table serves both. Only this file writes the draft's
pages. They may lag behind the target's: what is missing is computed when a draft is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError
from ..executor import Executor, ExecutorLimits
from ..inputs import StepInputs
from ..sampler import DRAFT, GREEDY_BELOW, uniform_at
from ..sequence import Sequence
from ..tokenizer import Tokenizer
from ..truncation import draw, processed_weights
from .draft import Draft, DraftAsk

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Progress:
    """`block_ids` as they were when the first `num_computed` tokens had K/V of the draft model in them.

    Those were the sequence's first `num_known` tokens, then `drafted`. `keys[i]` names the tokens up to the end of full
    block i.
    """

    num_computed: int = 0
    num_known: int = 0
    drafted: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    """One sequence while a draft is made: `tokens` are its own, then drafted ones."""

    ask: DraftAsk
    progress: _Progress
    tokens: list[int]
    probs: list[np.ndarray] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        return len(self.tokens) - self.ask.sequence.num_tokens

    @property
    def is_drawn(self) -> bool:
        return self.ask.may_draw and self.ask.sequence.request.params.temperature >= GREEDY_BELOW


class DraftModelDrafter:
    """Drafts with `executor`, whose engine has as many blocks of the same size as the target has.

    Tokens are drawn from the draft model's distribution where the ask allows it, else the likeliest is chosen. Raises
    `ConfigError` where the draft engine's limits are below the `target`'s, or its vocabulary is another.
    """

    def __init__(self, executor: Executor, target: ExecutorLimits) -> None:
        limits = executor.limits
        for name in ("max_batch_size", "max_model_len", "num_blocks"):
            own, needed = getattr(limits, name), getattr(target, name)
            if own < needed:
                raise ConfigError(
                    f"draft_bundle: its {name} is {own}, below the {needed} of the model; build it with the "
                    "model's limits"
                )
        if limits.block_size != target.block_size:
            raise ConfigError(
                f"draft_bundle: its blocks hold {limits.block_size} tokens, the model's {target.block_size}; build it "
                "with the model's block size"
            )
        self._executor = executor
        self._max_step_tokens = limits.max_step_tokens
        self._block_size = limits.block_size
        self._vocab_size = target.vocab_size
        self._progress: dict[Sequence, _Progress] = {}
        self._content: dict[int, bytes] = {}  # by block: the key of what its page of the draft holds in full
        self._writers: dict[int, Sequence] = {}  # by block: who wrote into that page last

    @property
    def is_lookup(self) -> bool:
        return False

    def propose(self, asks: Seq[DraftAsk]) -> list[Draft]:
        turns = [_Turn(ask, self._resume(ask.sequence), list(ask.sequence.token_ids)) for ask in asks]
        self._catch_up(turns)
        left: Seq[_Turn] = turns
        while left := [turn for turn in left if turn.num_drafted < turn.ask.num_tokens]:
            logits = self._execute([(turn, len(turn.tokens)) for turn in left], wants_logits=True)
            left = [turn for turn, row in zip(left, logits, strict=True) if self._choose(turn, row)]
        for turn in turns:
            turn.progress.num_known = turn.ask.sequence.num_tokens
            turn.progress.drafted = turn.tokens[turn.progress.num_known :]
        return [
            Draft(
                tuple(turn.tokens[turn.ask.sequence.num_tokens :]),
                np.array(turn.probs) if turn.probs else None,
            )
            for turn in turns
        ]

    def observe(self, hidden: np.ndarray | torch.Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
        """Needs no states."""

    def end(self, sequence: Sequence) -> None:
        progress = self._progress.pop(sequence, None)
        for block in progress.block_ids if progress is not None else ():
            if self._writers.get(block) is sequence:
                del self._writers[block]

    def close(self) -> None:
        self._executor.close()

    def _resume(self, sequence: Sequence) -> _Progress:
        """What of `sequence` the draft's pages hold, after whatever the scheduler has done with its blocks."""
        progress = self._progress.setdefault(sequence, _Progress())
        size, blocks = self._block_size, sequence.block_ids
        same = 0
        for old, new in zip(progress.block_ids, blocks, strict=False):
            if old != new or not self._is_left_alone(progress, sequence, same):
                break
            same += 1
        num_right = progress.num_known
        for drafted, token_id in zip(progress.drafted, sequence.token_ids[num_right:], strict=False):
            if drafted != token_id:
                break
            num_right += 1
        progress.num_computed = min(progress.num_computed, same * size, num_right, sequence.num_tokens - 1)
        progress.block_ids = list(blocks)
        # Blocks that another sequence, or this one before a preemption, has filled with the same tokens.
        while progress.num_computed % size == 0 and progress.num_computed + size < sequence.num_tokens:
            index = progress.num_computed // size
            if self._content.get(blocks[index]) != self._key(progress, sequence.token_ids, index):
                break
            progress.num_computed += size
        return progress

    def _is_left_alone(self, progress: _Progress, sequence: Sequence, index: int) -> bool:
        """Whether nobody has written into the draft's page of block `index` since `sequence` last saw it.

        A block can be given away and come back.
        """
        block = progress.block_ids[index]
        if self._writers.get(block) is sequence:
            return True
        is_full = (index + 1) * self._block_size <= sequence.num_tokens
        return is_full and self._content.get(block) == self._key(progress, sequence.token_ids, index)

    def _key(self, progress: _Progress, token_ids: list[int], index: int) -> bytes:
        """Of the tokens up to the end of full block `index`."""
        size, keys = self._block_size, progress.keys
        while len(keys) <= index:
            start = len(keys) * size
            content = array("q", token_ids[start : start + size]).tobytes()
            keys.append(blake2b((keys[-1] if keys else b"") + content, digest_size=16).digest())
        return keys[index]

    def _catch_up(self, turns: Seq[_Turn]) -> None:
        """Compute all tokens but the last of each, in steps as wide as the draft engine takes."""
        while True:
            room = self._max_step_tokens
            batch = []
            for turn in turns:
                num_tokens = min(len(turn.tokens) - 1 - turn.progress.num_computed, room)
                if num_tokens > 0:
                    batch.append((turn, turn.progress.num_computed + num_tokens))
                    room -= num_tokens
            if not batch:
                return
            self._execute(batch, wants_logits=False)

    def _execute(self, batch: Seq[tuple[_Turn, int]], *, wants_logits: bool) -> np.ndarray:
        """Compute the tokens of each turn up to a position; the logits `[len(batch), V]` behind the last ones."""
        ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        for turn, end in batch:
            start = turn.progress.num_computed
            ids.extend(turn.tokens[start:end])
            positions.extend(range(start, end))
            starts.append(len(ids))
        table = np.zeros((len(batch), max(len(turn.progress.block_ids) for turn, _ in batch)), np.int32)
        for row, (turn, end) in enumerate(batch):
            blocks = turn.progress.block_ids
            table[row, : len(blocks)] = blocks
            for index in range(turn.progress.num_computed // self._block_size, -(-end // self._block_size)):
                self._content.pop(blocks[index], None)
                self._writers[blocks[index]] = turn.ask.sequence
        output = self._executor.execute(
            StepInputs(
                input_ids=np.array(ids, np.int64),
                positions=np.array(positions, np.int64),
                block_table=table,
                seq_lens=np.array([end for _, end in batch], np.int32),
                query_start_loc=np.array(starts, np.int32),
                logits_rows=np.array(starts[1:] if wants_logits else [], np.int64) - 1,
                block_copies=np.zeros((0, 2), np.int64),
            )
        )
        for turn, end in batch:
            self._set_computed(turn, end)
        logits = output.logits
        return logits if isinstance(logits, np.ndarray) else logits.cpu().numpy()

    def _set_computed(self, turn: _Turn, end: int) -> None:
        """Blocks that hold drafted tokens, which may turn out wrong, are named by nobody."""
        progress, sequence = turn.progress, turn.ask.sequence
        start, known_end = progress.num_computed, min(end, sequence.num_tokens)
        for index in range(start // self._block_size, known_end // self._block_size):
            self._content[progress.block_ids[index]] = self._key(progress, sequence.token_ids, index)
        progress.num_computed = end

    def _choose(self, turn: _Turn, row: np.ndarray) -> bool:
        """Add a token to the draft; False where the draft model's logits give none."""
        sequence = turn.ask.sequence
        row = row[: self._vocab_size]
        best = int(row.argmax())  # NaN is above all else
        if not np.isfinite(row[best]):
            return False
        params = sequence.request.params
        if not turn.is_drawn or params.seed is None:
            turn.tokens.append(best)
            return True
        weights = processed_weights(row, params)
        start = sequence.num_output_tokens
        uniform = uniform_at(params.seed, sequence.index, start + turn.num_drafted, DRAFT, start)
        turn.tokens.append(draw(weights, uniform))
        probs = np.zeros(self._vocab_size, np.float32)
        probs[: len(weights)] = weights / weights.sum(dtype=np.float64)
        turn.probs.append(probs)
        return True


def check_same_tokens(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise `ConfigError` naming the first id that is another token in `draft`."""
    for token_id in range(max(target.vocab_size, draft.vocab_size)):
        tokens = [one.token_bytes(token_id) if token_id < one.vocab_size else None for one in (target, draft)]
        if tokens[0] != tokens[1]:
            raise ConfigError(
                f"draft_bundle: token {token_id} is {_shown(tokens[0])} in the model's tokenizer, but "
                f"{_shown(tokens[1])} in the draft model's: they must have the same vocabulary"
            )


def _shown(token: bytes | None) -> str:
    return "missing" if token is None else repr(token.decode("utf-8", "backslashreplace"))
