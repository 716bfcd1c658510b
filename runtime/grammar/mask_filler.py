"""The masks of a step, filled in worker threads while the model runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from ...errors import EngineError
from ..speculate.draft import Draft
from ..structured import FormErrors, Matcher, allows
from .matcher import LlguidanceMatcher
from .vocabulary import num_words

_MAX_NUM_THREADS = 16


@dataclass(frozen=True, slots=True, eq=False)
class MaskRows:
    """The `Masks` of one matcher, whole: `rows[j]` is what may follow `j` tokens of its draft.

    `rows` `[R, W]` int32, one more than the draft tokens that the grammar accepts; fewer where following the draft
    failed. `error` is why there are none.
    """

    rows: np.ndarray
    error: EngineError | None = None

    def allows(self, place: int, token_id: int) -> bool:
        return allows(self.row(place), token_id)

    def within(self, draft: Draft) -> Draft:
        """The beginning of `draft`, which they are for, that they suffice for.

        Of a drawn draft a token that its mask refuses stays, as the last: it is redrawn from the leftover.
        """
        num_tokens = len(self.rows) - 1
        is_drawn = draft.probs is not None and num_tokens < len(draft)
        if is_drawn and not self.allows(num_tokens, draft.token_ids[num_tokens]):
            num_tokens += 1
        return draft.cut(num_tokens)

    def row(self, place: int) -> np.ndarray:
        if self.error is not None:
            raise self.error
        if place >= len(self.rows):
            raise EngineError(f"token {place} of the draft follows what the form of the output refuses")
        row: np.ndarray = self.rows[place]
        return row


class MaskFiller:
    """Fills masks in threads of its own, `num_threads` (None: as many as there are CPUs, 16 at most). Close it."""

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        self._num_words = num_words(vocab_size)
        threads = num_threads or min(_MAX_NUM_THREADS, os.cpu_count() or 1)
        self._executor = LLExecutor(threads)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pelton-masks")

    def submit(self, asks: Sequence[tuple[Matcher, Sequence[int]]]) -> Future[list[MaskRows]]:
        """Start filling, for each (matcher, draft), the mask before each token of the draft and the one behind it.

        The matchers, all different, are the threads' own until the future is done, and then stand where they stood.
        """
        return self._thread.submit(self._fill, list(asks))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _fill(self, asks: list[tuple[Matcher, Sequence[int]]]) -> list[MaskRows]:
        masks = np.empty((sum(len(draft) + 1 for _, draft in asks), self._num_words), np.int32)
        rows: list[np.ndarray] = []
        raws: list[LLMatcher | None] = []
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        start = 0
        for matcher, draft in asks:
            rows.append(masks[start : start + len(draft) + 1])
            raw = matcher.raw_for(draft) if isinstance(matcher, LlguidanceMatcher) else None
            if raw is not None and draft:
                # Errors stay with a matcher, and a draft that outgrows the limits is no text of its sequence.
                raw = raw.deep_copy()
                drafted.append((raw, start, list(draft)))
            elif raw is not None:
                plain.append((raw, start))
            raws.append(raw)
            start += len(rows[-1])
        is_filled = self._execute(plain, drafted, masks)
        return [
            _fill_rows(matcher, draft, own)
            if raw is None
            else _without_refused(draft, own)
            if is_filled and not raw.is_error()
            else _fill_rows(matcher, (), own)
            for (matcher, draft), raw, own in zip(asks, raws, rows, strict=True)
        ]

    def _execute(
        self,
        plain: list[tuple[LLMatcher, int]],
        drafted: list[tuple[LLMatcher, int, list[int]]],
        masks: np.ndarray,
    ) -> bool:
        """Whether llguidance filled `masks`; what fails for one matcher fails for all, which then go one by one."""
        size = masks.strides[0] if len(masks) else 0
        try:
            if plain:
                self._executor.unsafe_compute_mask_ptr(plain, masks.ctypes.data, size, len(masks))
            if drafted:
                self._executor.unsafe_compute_mask_ptr_with_draft_token(
                    drafted, masks.ctypes.data, size, len(masks)
                )
        except Exception:  # of whatever kind: the sequences that are not at fault go on
            return False
        return True


def _without_refused(draft: Sequence[int], rows: np.ndarray) -> MaskRows:
    """Without the rows behind a token that the row before it leaves out."""
    num_accepted = 0
    while num_accepted < len(rows) - 1 and allows(rows[num_accepted], draft[num_accepted]):
        num_accepted += 1
    return MaskRows(rows[: num_accepted + 1])


def _fill_rows(matcher: Matcher, draft: Sequence[int], rows: np.ndarray) -> MaskRows:
    """One matcher, by its own methods."""
    try:
        with FormErrors():
            matcher.fill(rows[0])
    except EngineError as error:  # of this sequence alone
        return MaskRows(rows[:0], error)
    num_filled = 1
    try:
        ahead = matcher.copy() if draft else matcher
        for token_id in draft:
            if not 0 <= token_id < 32 * rows.shape[1] or not allows(rows[num_filled - 1], token_id):
                break
            if not ahead.accept(token_id):
                break
            ahead.fill(rows[num_filled])
            num_filled += 1
    except Exception:  # of this draft alone
        pass
    return MaskRows(rows[:num_filled])
