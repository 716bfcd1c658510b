"""Tokens to text, one sequence at a time: whole characters only, stop strings cut out."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from .request import SamplingParams
from .stop_strings import StopMatcher


class Vocabulary(Protocol):
    """What a `Detokenizer` asks of a tokenizer."""

    @property
    def special_token_ids(self) -> Collection[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TextStep:
    """What a push released.

    `num_tokens` of the pushed tokens were consumed: all of them, or those up to the one that completed the
    stop string `stop_reason`.
    """

    text: str
    num_tokens: int
    stop_reason: str | None = None


class Detokenizer:
    """The text of one choice's output tokens, released as soon as it can no longer change.

    For any split of the output into pushes, the released text, `finish()` included, is the same, and without
    stop strings it is `tokenizer.decode(ids, is_continuation=True)`: the output follows the prompt, so its
    first token keeps its leading space. A character spread over several tokens is released whole with its
    last token. When the output ends inside a character, `finish()` gives one U+FFFD for the unfinished bytes,
    as decoding all tokens at once does.

    A stop string may begin and end anywhere inside tokens. Held back is only text that is a proper prefix of
    a stop string. On a match the text ends before the stop string, or behind it with
    `include_stop_str_in_output`; which of several wins is told at `StopMatcher`. A stop string counts when it
    is complete in a later token than number `min_tokens`, as in vLLM. Tokens that add no text (special ones,
    when skipped) lie inside a stop string without breaking it.
    """

    def __init__(self, tokenizer: Vocabulary, params: SamplingParams) -> None:
        self._token_bytes = tokenizer.token_bytes
        hidden = tokenizer.special_token_ids if params.skip_special_tokens else ()
        self._skipped = frozenset(hidden).difference(params.shown_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._held = ""
        self._num_tokens = 0
        self._stop_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Take the next output tokens. After a stop nothing more is consumed."""
        if self._stop_reason is not None:
            return TextStep("", 0, self._stop_reason)
        released: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if token_id in self._skipped:
                continue
            text = self._utf8.decode(self._token_bytes(token_id))
            if text:
                released.append(self._release(text))
            if self._stop_reason is not None:
                return TextStep("".join(released), count, self._stop_reason)
        return TextStep("".join(released), len(token_ids))

    def finish(self) -> str:
        """Release what is held, at an end that is not a stop string. Nothing may be pushed after it."""
        if self._stop_reason is not None:
            return ""
        text = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self._stops is None:
            return text
        match = self._stops.feed(text, is_armed=self._num_tokens > self._min_tokens)
        pending = self._held + text
        if match is None:
            cut = len(pending) - self._stops.num_pending
            self._held = pending[cut:]
            return pending[:cut]
        end, self._stop_reason = len(self._held) + match[0], match[1]
        self._held = ""
        return pending[: end if self._includes_stop else end - len(self._stop_reason)]
