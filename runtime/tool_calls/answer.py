"""An answer taken apart: reasoning, then content and calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from .events import ArgumentsText, CallEnd, CallStart, ContentText, Event, ReasoningText
from .formats import ToolFormat
from .reasoning import ReasoningFormat, ReasoningReader


@dataclass(slots=True)
class ParsedCall:
    """`arguments` is the model's own JSON text, up to its last bracket if `is_whole`. `call_id` is the model's own, if
    its format has ids.
    """

    name: str
    arguments: str = ""
    call_id: str | None = None
    is_whole: bool = True


@dataclass(slots=True)
class ParsedAnswer:
    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ContentText(text):
                    self.content += text
                case ReasoningText(text):
                    self.reasoning += text
                case CallStart(_, name, call_id):
                    self.calls.append(ParsedCall(name, call_id=call_id, is_whole=False))
                case ArgumentsText(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].is_whole = True


class AnswerParser:
    """The parser of one answer; without formats all of it is content.

    `is_in_reasoning`: the prompt ended behind the tag that opens the reasoning. Calls inside reasoning are none.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        tool_names: Collection[str] = (),
        is_in_reasoning: bool = False,
    ) -> None:
        self._calls = None if tool_format is None else tool_format.reader(tool_names)
        self._reasoning = (
            None
            if reasoning_format is None
            else ReasoningReader(reasoning_format, starts_open=is_in_reasoning)
        )

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of text."""
        if self._reasoning is None:
            return self._read_calls(ContentText(text)) if text else []
        return [found for event in self._reasoning.feed(text) for found in self._read_calls(event)]

    def finish(self) -> list[Event]:
        """The events of what was held back. Nothing may be fed after it."""
        events = [] if self._reasoning is None else self._reasoning.finish()
        found = [each for event in events for each in self._read_calls(event)]
        return found if self._calls is None else found + self._calls.finish()

    def _read_calls(self, event: Event) -> list[Event]:
        if self._calls is not None and isinstance(event, ContentText):
            return self._calls.feed(event.text)
        return [event]


def parse_answer(
    text: str,
    tool_format: ToolFormat | None = None,
    reasoning_format: ReasoningFormat | None = None,
    *,
    tool_names: Collection[str] = (),
    is_in_reasoning: bool = False,
) -> ParsedAnswer:
    """A whole answer at once. Options as of `AnswerParser`.

    `text` must hold the markers: where they are special tokens, sample with `skip_special_tokens=False`.
    """
    parser = AnswerParser(
        tool_format, reasoning_format, tool_names=tool_names, is_in_reasoning=is_in_reasoning
    )
    answer = ParsedAnswer()
    answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer
