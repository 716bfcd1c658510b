"""A plan packed into the flat, padding-free arrays that the compiled graph takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan import PlanItem, StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step of B sequences and T tokens, N of whose rows need logits.

    Sequences stand in the plan's order and their tokens are concatenated:

        sequence        0       1           2
        input_ids    [a a a | b | c c c c c c c]        T = 11
        query_start_loc   0, 3, 4, 11                   [B + 1]

    `block_table` is padded with 0 beyond a sequence's blocks; those entries are never read.
    """

    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    block_table: np.ndarray  # [B, M] int32
    seq_lens: np.ndarray  # [B] int32, tokens in the cache after this step
    query_start_loc: np.ndarray  # [B + 1] int32
    logits_rows: np.ndarray  # [N] int64
    block_copies: np.ndarray  # [C, 2] int64, (source, destination), run before the step


def pack(plan: StepPlan) -> StepInputs:
    """Pack a non-empty `plan`.

    Logits are asked for the last known row of each item that samples and for those of its draft, and for all of an
    item's rows when its request wants prompt log-probabilities of positions it covers, in row order.
    """
    items = plan.items
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    rows: list[int] = []
    for item in items:
        sequence = item.sequence
        ids.extend(sequence.token_ids[item.start : item.known_end])
        ids.extend(item.draft.token_ids)
        positions.extend(range(item.start, item.end))
        rows.extend(starts[-1] + offset for offset in logits_offsets(item))
        starts.append(len(ids))
    width = max(len(item.sequence.block_ids) for item in items)
    table = np.zeros((len(items), width), np.int32)
    for row, item in enumerate(items):
        blocks = item.sequence.block_ids
        table[row, : len(blocks)] = blocks
    return StepInputs(
        input_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        block_table=table,
        seq_lens=np.array([item.end for item in items], np.int32),
        query_start_loc=np.array(starts, np.int32),
        logits_rows=np.array(rows, np.int64),
        block_copies=np.array(plan.block_copies, np.int64).reshape(-1, 2),
    )


def logits_offsets(item: PlanItem) -> range:
    """Offsets, among the item's own rows, of those whose logits are wanted.

    Prompt row p predicts token p + 1, so a request with `prompt_logprobs` needs every row from its
    first not yet scored prompt position on; the other rows are needed only where sampling happens: behind the
    last known token, and behind each drafted one.
    """
    sequence = item.sequence
    if sequence.request.params.prompt_logprobs is not None and item.start < sequence.num_prompt_tokens:
        return range(item.num_tokens)
    return range(item.num_tokens - 1 - len(item.draft), item.num_tokens) if item.is_sampling else range(0)
