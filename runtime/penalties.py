"""Repetition, frequency and presence penalties, with counts kept up to date token by token."""

from __future__ import annotations

import numpy as np

from .request import SamplingParams
from .sequence import Sequence


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )


class TokenCounts:
    """Which tokens a sequence holds, and how often each stands in its output.

    A function of the sequence's tokens alone: dropped and built again at any time, it is the same.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._num_tokens = sequence.num_prompt_tokens
        prompt = np.array(sequence.token_ids[: self._num_tokens], np.int64)
        self._token_ids = np.unique(prompt)
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._size = self._num_prompt_ids = len(self._token_ids)
        self._slot_of = {token_id: slot for slot, token_id in enumerate(self._token_ids.tolist())}

    def update(self, sequence: Sequence) -> None:
        """Count the tokens that joined the output since the last call."""
        for token_id in sequence.token_ids[self._num_tokens :]:
            self._count(token_id)
        self._num_tokens = sequence.num_tokens

    def push(self, token_id: int) -> None:
        """Count a drafted token; `pop` takes it back, the last one first."""
        self._count(token_id)

    def pop(self, token_id: int) -> None:
        slot = self._slot_of[token_id]
        self._counts[slot] -= 1
        if slot >= self._num_prompt_ids and self._counts[slot] == 0:
            # Nothing that was counted after it is left, so its slot is the last one.
            self._size -= 1
            del self._slot_of[token_id]

    def apply(self, logits: np.ndarray, params: SamplingParams) -> None:
        """Penalise one row in place.

        Repetition counts tokens of the prompt and of the output and divides positive logits, multiplies
        negative ones. Frequency (per occurrence) and presence (once) are subtracted, for output tokens only.
        """
        ids, counts = self._token_ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values

    def _count(self, token_id: int) -> None:
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = self._slot_of[token_id] = self._size
            if slot == len(self._token_ids):
                room = np.zeros(max(64, slot), np.int64)
                self._token_ids = np.concatenate([self._token_ids, room])
                self._counts = np.concatenate([self._counts, room.astype(np.float32)])
            self._token_ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1
