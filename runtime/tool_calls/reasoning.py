"""Reasoning before an answer, between tags.

The opening tag is the model's own, or stands at the end of the prompt already (`starts_open`), so that the text has
the closing one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .events import ContentText, Event, ReasoningText


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`begin` and `end` enclose the reasoning. `is_always_open`: the answer begins in it, whatever the prompt says."""

    name: str
    begin: str
    end: str
    is_always_open: bool = False

    @property
    def literals(self) -> tuple[str, ...]:
        return self.begin, self.end


class ReasoningReader:
    """Splits the text of one answer into reasoning and content.

    An answer reasons if its first characters that are no white space are the opening tag, or from the start with
    `starts_open`; from then on up to the closing tag, or to the end. White space beside the tags is dropped.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, starts_open: bool) -> None:
        self._begin, self._end = reasoning_format.begin, reasoning_format.end
        self._is_open = starts_open or reasoning_format.is_always_open
        self._held = ""
        self._is_content = False
        self._may_open = True  # the opening tag may stand at the front of what is held
        self._is_at_front = True  # white space here lies beside a tag

    def feed(self, text: str) -> list[Event]:
        return self._read(text, is_ended=False)

    def finish(self) -> list[Event]:
        return self._read("", is_ended=True)

    def _read(self, text: str, *, is_ended: bool) -> list[Event]:
        self._held += text
        if self._may_open and not self._decide(is_ended):
            return []
        events: list[Event] = []
        if not self._is_content:
            self._read_reasoning(events, is_ended)
        if self._is_content:
            content = self._held.lstrip() if self._is_at_front else self._held
            self._held = ""
            if content:
                self._is_at_front = False
                events.append(ContentText(content))
        return events

    def _decide(self, is_ended: bool) -> bool:
        """Whether it is known if the answer begins with the opening tag, as it may although the prompt ends with it."""
        front = self._held.lstrip()
        if front.startswith(self._begin):
            self._held = front[len(self._begin) :]
            self._is_open = True
        elif not is_ended and self._begin.startswith(front):
            return False
        elif not self._is_open:
            self._is_content, self._is_at_front = True, False
        self._may_open = False
        return True

    def _read_reasoning(self, events: list[Event], is_ended: bool) -> None:
        end = self._held.find(self._end)
        if end >= 0:
            reasoning, self._held = self._held[:end].rstrip(), self._held[end + len(self._end) :]
            self._is_content = True
        else:
            cut = len(self._held) if is_ended else len(self._held) - self._num_pending()
            cut = len(self._held[:cut].rstrip())
            reasoning, self._held = self._held[:cut], "" if is_ended else self._held[cut:]
        if self._is_at_front:
            reasoning = reasoning.lstrip()
        if reasoning:
            events.append(ReasoningText(reasoning))
        self._is_at_front = self._is_content or (self._is_at_front and not reasoning)

    def _num_pending(self) -> int:
        for size in range(min(len(self._end) - 1, len(self._held)), 0, -1):
            if self._end.startswith(self._held[-size:]):
                return size
        return 0


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            ReasoningFormat("think", "<think>", "</think>"),
            ReasoningFormat("deepseek_r1", "<think>", "</think>", is_always_open=True),
            ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        )
    }
)
"""By the names that `--reasoning-parser` takes."""
