"""Steps of a small TensorRT engine, and the logits that the fake's model has for them."""

from __future__ import annotations

import numpy as np

from pelton.runtime.inputs import StepInputs

from .scripted import digest
from .trt_bundle import VOCAB_SIZE, Fakes

BLOCK = 4


def step(
    *sequences: tuple[list[int], int, list[int]], rows: list[int] | None = None, copies: tuple[int, ...] = ()
) -> StepInputs:
    """A step of sequences given as (new tokens, tokens before them, blocks); logits of each last row, or of `rows`."""
    ids = [token for tokens, _, _ in sequences for token in tokens]
    starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in sequences)])
    width = max(len(blocks) for _, _, blocks in sequences)
    return StepInputs(
        input_ids=np.array(ids, np.int64),
        positions=np.array([p for tokens, past, _ in sequences for p in range(past, past + len(tokens))], np.int64),
        block_table=np.array([blocks + [0] * (width - len(blocks)) for _, _, blocks in sequences], np.int32),
        seq_lens=np.array([past + len(tokens) for tokens, past, _ in sequences], np.int32),
        query_start_loc=starts.astype(np.int32),
        logits_rows=np.array(starts[1:] - 1 if rows is None else rows, np.int64),
        block_copies=np.array(copies, np.int64).reshape(-1, 2),
    )  # fmt: skip


def prompt(num_tokens: int, block: int = 0, first: int = 1) -> tuple[list[int], int, list[int]]:
    """A whole prompt in blocks from `block` on."""
    return list(range(first, first + num_tokens)), 0, list(range(block, block - (-num_tokens // BLOCK)))


def decodes(count: int, past: int = 2) -> StepInputs:
    """Sequence i has `past` tokens in block i and gets one more."""
    return step(*(([100 + i], past, [i]) for i in range(count)))


def prefill(fakes: Fakes, count: int, num_tokens: int = 2) -> None:
    for i in range(count):
        fakes.executor.execute(step(prompt(num_tokens, i, first=10 * i + 1)))


def expected(context: list[int]) -> np.ndarray:
    row = np.zeros(VOCAB_SIZE, np.float32)
    row[digest(VOCAB_SIZE)(context)] = 10.0
    return row
