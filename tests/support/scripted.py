"""An executor without a model: the next token is a function of the tokens in the cache.

It keeps real pages of token ids, written and read through the block table as an engine would, so a wrong block
table, a page freed too early or a stale prefix hit shows up as wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pelton.runtime.executor import ExecutorLimits, StepOutput
from pelton.runtime.inputs import StepInputs
from pelton.runtime.sampler import HostSampler

NextToken = Callable[[Sequence[int]], int]
LogitsOf = Callable[[Sequence[int]], np.ndarray]


def successor(vocab_size: int) -> NextToken:
    """Next token = last token + 1, wrapping around."""
    return lambda context: (context[-1] + 1) % vocab_size


def digest(vocab_size: int) -> NextToken:
    """Next token depends on every token of the context and on their order."""

    def next_token(context: Sequence[int]) -> int:
        value = 17
        for token in context:
            value = (value * 1000003 + token + 1) % 2147483647
        return value % vocab_size

    return next_token


def noise(vocab_size: int, seed: int = 0, scale: float = 3.0) -> LogitsOf:
    """Logits that depend on the last three tokens: every draw, penalty and mask matters, and text repeats itself."""

    def logits_of(context: Sequence[int]) -> np.ndarray:
        rng = np.random.default_rng((seed, *context[-3:]))
        return rng.normal(0.0, scale, vocab_size).astype(np.float32)

    return logits_of


class _WholeMasksSampler(HostSampler):
    """Gets masks as a sampler on a GPU does."""

    @property
    def reads_whole_masks(self) -> bool:
        return True


class ScriptedExecutor:
    """Implements `pelton.runtime.executor.Executor` on numpy pages that hold token ids (-1: never written).

    `before_step(step_number, inputs)` may raise or block, `after_step(step_number, logits)` may poison logits:
    the fault hooks of tests. `logits_of` gives whole rows of logits in place of `next_token`.
    """

    def __init__(
        self,
        next_token: NextToken,
        limits: ExecutorLimits,
        *,
        logits_of: LogitsOf | None = None,
        before_step: Callable[[int, StepInputs], None] | None = None,
        after_step: Callable[[int, np.ndarray], None] | None = None,
        reads_whole_masks: bool = False,
    ) -> None:
        self._next_token = next_token
        self._reads_whole_masks = reads_whole_masks
        self._logits_of = logits_of
        self._limits = limits
        self._pages = np.full((limits.num_blocks, limits.block_size), -1, np.int64)
        self._before_step = before_step
        self._after_step = after_step
        self.num_steps = 0
        self.num_computed_tokens = 0

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def execute(self, inputs: StepInputs) -> StepOutput:
        self.num_steps += 1
        if self._before_step is not None:
            self._before_step(self.num_steps, inputs)
        size = self._limits.block_size
        for source, destination in inputs.block_copies:
            self._pages[destination] = self._pages[source]
        wanted = set(inputs.logits_rows.tolist())
        rows: dict[int, list[int]] = {}
        for index, seq_len in enumerate(inputs.seq_lens.tolist()):
            start, end = inputs.query_start_loc[index : index + 2].tolist()
            table = inputs.block_table[index]
            positions = inputs.positions[start:end]
            assert positions.tolist() == list(range(seq_len - (end - start), seq_len))
            self._pages[table[positions // size], positions % size] = inputs.input_ids[start:end]
            num_pages = -(-seq_len // size)
            context = self._pages[table[:num_pages]].reshape(-1)[:seq_len].tolist()
            assert -1 not in context, "read a position that was never written"
            for row in range(start, end):
                if row in wanted:
                    rows[row] = context[: int(inputs.positions[row]) + 1]
        self.num_computed_tokens += len(inputs.input_ids)
        logits = np.zeros((len(inputs.logits_rows), self._limits.vocab_size), np.float32)
        for i, row in enumerate(inputs.logits_rows.tolist()):
            if self._logits_of is not None:
                logits[i] = self._logits_of(rows[row])
            else:
                logits[i, self._next_token(rows[row])] = 10.0
        if self._after_step is not None:
            self._after_step(self.num_steps, logits)
        return StepOutput(logits)

    def make_sampler(self, eos_token_ids: Iterable[int]) -> HostSampler:
        make = _WholeMasksSampler if self._reads_whole_masks else HostSampler
        return make(self._limits.vocab_size, eos_token_ids)

    def close(self) -> None:
        pass
