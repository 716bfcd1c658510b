"""Tool calls and reasoning in the text that models write.

text --feed--> Event, Event, ...      `AnswerParser`, piece by piece, the same events for every split of the text
text --------> ParsedAnswer           `parse_answer`, the whole at once
"""

from __future__ import annotations

from .answer import AnswerParser, ParsedAnswer, ParsedCall, parse_answer
from .detect import detect_reasoning_format, detect_tool_format
from .events import ArgumentsText, CallEnd, CallStart, ContentText, Event, ReasoningText
from .formats import TOOL_FORMATS, ToolFormat
from .reasoning import REASONING_FORMATS, ReasoningFormat
from .tools import Tool

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "AnswerParser",
    "ArgumentsText",
    "CallEnd",
    "CallStart",
    "ContentText",
    "Event",
    "ParsedAnswer",
    "ParsedCall",
    "ReasoningFormat",
    "ReasoningText",
    "Tool",
    "ToolFormat",
    "detect_reasoning_format",
    "detect_tool_format",
    "parse_answer",
]
