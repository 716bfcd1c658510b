"""The message of a chat choice, whole or in deltas, in OpenAI's shapes.

Reasoning stands under both names that clients know: `reasoning` (vLLM) and `reasoning_content` (DeepSeek).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .protocol_tools import AnswerFormat
from .tool_calls import ArgumentsText, CallEnd, CallStart, ContentText, Event, ParsedAnswer, ReasoningText


class MessageBuilder:
    """Reads the text of choice number `choice` of a call as it comes. A streamed message equals the whole one."""

    def __init__(self, answer_format: AnswerFormat, call_id: str, choice: int) -> None:
        self._format = answer_format
        self._parser = answer_format.parser()
        self._call_id = call_id
        self._choice = choice
        self._answer = ParsedAnswer()

    @property
    def first_delta(self) -> dict[str, Any]:
        """The role alone. The content is null where calls may take its place."""
        return {"role": "assistant", "content": "" if self._format.tool_format is None else None}

    def feed(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas of the next piece of text; with `is_last` also of what was held back."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        kept = [event for event in events if self._counts(event)]
        self._answer.add(kept)
        return [self._delta(event) for event in kept if not isinstance(event, CallEnd)]

    def finish_reason(self, reason: str | None) -> str | None:
        """What the engine's reason is called for this message: `tool_calls` says that the calls can be made."""
        calls = self._answer.calls
        can_be_made = bool(calls) and calls[-1].is_whole and not self._format.is_named
        return "tool_calls" if reason == "stop" and can_be_made else reason

    def message(self) -> dict[str, Any]:
        answer = self._answer
        has_more = bool(answer.calls or answer.reasoning)
        shown: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if has_more else ""),
            "refusal": None,
        }
        if answer.reasoning:
            shown.update(_reasoning(answer.reasoning))
        if answer.calls:
            shown["tool_calls"] = [
                {
                    "id": call.call_id or self._id(index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(answer.calls)
            ]
        return shown

    def _counts(self, event: Event) -> bool:
        limit = self._format.max_calls
        return limit is None or isinstance(event, ContentText | ReasoningText) or event.index < limit

    def _delta(self, event: ContentText | ReasoningText | CallStart | ArgumentsText) -> dict[str, Any]:
        match event:
            case ContentText(text):
                return {"content": text}
            case ReasoningText(text):
                return _reasoning(text)
            case CallStart(index, name, call_id):
                head = {"index": index, "id": call_id or self._id(index), "type": "function"}
                return {"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]}
            case ArgumentsText(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _id(self, index: int) -> str:
        return self._format.call_id(self._call_id, self._choice, index)


def rank_by_mean(logprobs: Iterable[Iterable[float]]) -> list[int]:
    """Numbers of the choices, given the log-probabilities of their tokens, by falling mean; ties in order."""
    means = []
    for values in map(list, logprobs):
        means.append(sum(values) / len(values) if values else 0.0)
    return sorted(range(len(means)), key=lambda number: -means[number])


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}
