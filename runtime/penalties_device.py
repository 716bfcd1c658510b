"""`penalties.py` on a device: a row of counts, as wide as the vocabulary, for each sequence that has penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .sequence import Sequence

# A count's bit that says that the prompt has the token; the others say how often the output has it.
_IN_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class CountUpdate:
    """What brings the counts of some sequences up to date.

    `slots[i]` is the row of sequence i; rows in `fresh` hold another's counts and are cleared first. Then
    `increments` are added at `places`, flat indices of the table. All int32.
    """

    slots: np.ndarray
    fresh: np.ndarray
    places: np.ndarray
    increments: np.ndarray


class CountSlots:
    """Which sequence has which row of a table `[num_slots, vocab_size]`, and how many of its tokens are counted there.

    Knows no device. When rows run out, those unused for longest are given to others.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.num_slots, self._vocab_size = num_slots, vocab_size
        self._slots: dict[Sequence, int] = {}  # least recently used first
        self._num_counted: dict[Sequence, int] = {}
        self._free = list(range(num_slots))[::-1]

    def __len__(self) -> int:
        return len(self._slots)

    def max_increments(self, sequence: Sequence) -> int:
        """How many increments `update` has for `sequence` at most, unless another call takes its row away before."""
        counted = self._counted(sequence)
        if counted is not None:
            return sequence.num_tokens - counted
        return min(sequence.num_prompt_tokens, self._vocab_size) + min(
            sequence.num_output_tokens, self._vocab_size
        )

    def update(self, sequences: Seq[Sequence]) -> CountUpdate:
        """Give each of at most `num_slots` sequences a row; its counts are from now on taken for up to date."""
        # Before rows are taken from others, so that none of these loses its own.
        for sequence in sequences:
            if sequence in self._slots:
                self._slots[sequence] = self._slots.pop(sequence)
        fresh: list[int] = []
        places: list[int] = []
        increments: list[int] = []
        for sequence in sequences:
            counted = self._counted(sequence)
            slot = self._slots[sequence] if sequence in self._slots else self._take_slot(sequence)
            start = slot * self._vocab_size
            if counted is None:
                fresh.append(slot)
                prompt, output = set(sequence.request.prompt_token_ids), Counter(sequence.output_token_ids)
                places.extend(start + token_id for token_id in (*prompt, *output))
                increments.extend([_IN_PROMPT] * len(prompt))
                increments.extend(output.values())
            else:
                places.extend(start + token_id for token_id in sequence.token_ids[counted:])
                increments.extend([1] * (sequence.num_tokens - counted))
            self._num_counted[sequence] = sequence.num_tokens
        slots = [self._slots[sequence] for sequence in sequences]
        return CountUpdate(*(np.array(values, np.int32) for values in (slots, fresh, places, increments)))

    def forget(self, sequence: Sequence) -> None:
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            del self._num_counted[sequence]
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all: an update may not have reached the device."""
        for sequence in list(self._slots):
            self.forget(sequence)

    def _counted(self, sequence: Sequence) -> int | None:
        """How many tokens of `sequence` are counted. None: all are to be counted again, which bounds the work."""
        counted = self._num_counted.get(sequence)
        return None if counted is None or sequence.num_tokens - counted > self._vocab_size else counted

    def _take_slot(self, sequence: Sequence) -> int:
        if not self._free:
            self.forget(next(iter(self._slots)))
        slot = self._slots[sequence] = self._free.pop()
        return slot


def add_counts(table: Tensor, fresh: Tensor, places: Tensor, increments: Tensor) -> None:
    """Bring `table` `[num_slots, vocab_size]` int32 up to date, as `CountUpdate` says."""
    table.index_fill_(0, fresh.long(), 0)
    table.view(-1).index_add_(0, places.long(), increments)


def penalise(
    logits: Tensor, at: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Penalise the rows `at` `[P]` of `logits` in place, for `counts` `[P, V]`; penalties `[P]` float32.

    The same operations in the same order as `TokenCounts.apply`, so the same bits.
    """
    values = logits.index_select(0, at)
    repetition, frequency, presence = repetition[:, None], frequency[:, None], presence[:, None]
    values = torch.where(
        counts != 0, torch.where(values > 0, values / repetition, values * repetition), values
    )
    in_output = (counts & (_IN_PROMPT - 1)).float()
    values -= frequency * in_output
    values -= presence * (in_output > 0)
    logits.index_copy_(0, at, values)
