"""The contract between the scheduler's world (counts and blocks) and a target's engine (tensors)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .inputs import StepInputs
from .sampler import Sampler

if TYPE_CHECKING:  # torch is loaded by the executors that need it
    import torch


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What the engine was built for and what this process allocated.

    `num_blocks` counts the usable blocks of `block_size` tokens. `max_step_tokens` is the number of tokens
    of all sequences in one step, `max_batch_size` the number of sequences, `max_model_len` prompt + output.
    `max_logits_rows` is how many rows of logits a step returns in one run, `max_batch_size` or more (None: as many as
    it has tokens); one that wants more is run again for the others.
    """

    max_model_len: int
    max_batch_size: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    vocab_size: int
    max_logits_rows: int | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`logits` `[N, vocab_size]` float32, row i belongs to `StepInputs.logits_rows[i]`. Valid until the next step.

    A tensor stays on its device, where work on it may still be under way: the executor's own sampler reads it. `hidden`
    `[N, hidden_size]` are the states that the logits were made from, where the engine was built to give them; they are
    new memory in every step and may be kept.
    """

    logits: np.ndarray | torch.Tensor
    hidden: np.ndarray | torch.Tensor | None = None


class Executor(Protocol):
    """Runs one step. Owns the KV pages; blocks are numbered `[0, num_blocks)`."""

    @property
    def limits(self) -> ExecutorLimits: ...

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Write the step's K/V into its pages and return the logits of `logits_rows`."""
        ...

    def make_sampler(self, eos_token_ids: Iterable[int]) -> Sampler:
        """Samples this executor's logits where they are, for a model whose turns end with `eos_token_ids`."""
        ...

    def close(self) -> None: ...
