"""Grammars and matchers (`runtime/structured.py`) on llguidance."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from ...errors import EngineError
from .vocabulary import Vocabulary


class LlguidanceGrammar:
    """A `Grammar`. `template` has accepted nothing and is never changed; copies of it share what it has computed."""

    def __init__(self, vocabulary: Vocabulary, template: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._outgrown = threading.Event()

    @property
    def is_outgrown(self) -> bool:
        """Whether an output reached the limits: copies share the lexer, so others may reach them at once."""
        return self._outgrown.is_set()

    def start(self, token_ids: Sequence[int] = ()) -> LlguidanceMatcher:
        """Raises `EngineError` if `token_ids` are none that this grammar allows."""
        matcher = LlguidanceMatcher(self._vocabulary, self._template.deep_copy(), self._outgrown)
        for position, token_id in enumerate(token_ids):
            if not matcher.accept(token_id):
                raise EngineError(f"token {position} of the output, {token_id}, is none that its form allows")
        return matcher


class LlguidanceMatcher:
    """A `Matcher`. Every method raises `EngineError` once the grammar has outgrown its limits."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, outgrown: threading.Event) -> None:
        self.vocabulary = vocabulary
        self._outgrown = outgrown
        self._raw = matcher
        self._num_ends = 0  # tokens that end a turn, accepted at the end

    @property
    def is_finished(self) -> bool:
        if self._num_ends:
            return True
        is_stopped = self._raw.is_stopped()
        if is_stopped:
            self.check()
        return is_stopped

    def fill(self, mask: np.ndarray) -> None:
        if (
            mask.shape != (self.vocabulary.num_words,)
            or mask.dtype != np.int32
            or not mask.flags.c_contiguous
        ):
            raise ValueError(f"a mask is {self.vocabulary.num_words} int32 words in a row")
        if self._num_ends:
            mask[:] = self.vocabulary.end_mask
            return
        self._raw.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()

    def allows(self, token_id: int) -> bool:
        is_allowed = self._allows(token_id)
        if not is_allowed:
            self.check()
        return is_allowed

    def _allows(self, token_id: int) -> bool:
        """False also once llguidance has given up."""
        if token_id in self.vocabulary.eos_token_ids:
            return self._num_ends > 0 or self._raw.is_accepting()
        if self._num_ends or not 0 <= token_id < self.vocabulary.vocab_size:
            return False
        if spelled := self._raw.compute_ff_tokens():
            return token_id == spelled[0]
        return self._raw.validate_tokens([token_id]) == 1

    def accept(self, token_id: int) -> bool:
        is_accepted = self._accept(token_id)
        if not is_accepted:
            self.check()
        return is_accepted

    def _accept(self, token_id: int) -> bool:
        """False also once llguidance has given up."""
        if token_id in self.vocabulary.eos_token_ids:
            is_accepted = self._num_ends > 0 or self._raw.is_accepting()
            self._num_ends += is_accepted
            return is_accepted
        if self._num_ends or not 0 <= token_id < self.vocabulary.vocab_size:
            return False
        return self._raw.try_consume_tokens([token_id]) == 1

    def forced(self, max_tokens: int) -> list[int]:
        if max_tokens < 1 or self.is_finished:
            return []
        # One call spells all the text that must follow; a mask before each token would spell it again.
        spelled = self._raw.compute_ff_tokens()[:max_tokens]
        self.check()
        tokens: list[int] = []
        ahead = self.copy() if spelled else self  # limits may be reached on the way
        for token_id in spelled:
            if token_id in self.vocabulary.eos_token_ids or not ahead.accept(token_id):
                break
            tokens.append(token_id)
        return tokens

    def copy(self) -> LlguidanceMatcher:
        copy = LlguidanceMatcher(self.vocabulary, self._raw.deep_copy(), self._outgrown)
        copy._num_ends = self._num_ends
        return copy

    def raw_for(self, draft: Sequence[int]) -> LLMatcher | None:
        """llguidance's matcher, if that alone can go through `draft`: it knows neither an end taken nor padding."""
        ends = self.vocabulary.eos_token_ids
        if self._num_ends or any(t in ends or not 0 <= t < self.vocabulary.vocab_size for t in draft):
            return None
        return self._raw

    def check(self) -> None:
        """Raise `EngineError` if llguidance has given up."""
        if self._raw.is_error():
            self._outgrown.set()
            reason = _first_line(self._raw.get_error())
            if "NoExtensionBias" in reason:  # llguidance's name of it
                raise EngineError("no output can match the form: after what was written, nothing may follow")
            raise EngineError(
                f"the form of the output outgrew what a step may compute: {reason}; "
                "make the schema or grammar simpler"
            )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
