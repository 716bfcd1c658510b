"""Reading calls out of text that arrives in pieces.

A reader is written as if the whole text were there: generators that walk over the characters and yield when they
need more. Every decision depends on characters and on the end of the text, never on where a piece ended, so the
events of all splits of a text are the same but for where their texts are cut.

    settled            may yet be unread: `_position` goes back to the start of the buffer
    ---------- | -----------------------------------
               buffer
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from typing import ClassVar, TypeVar

from .events import ArgumentsText, CallEnd, CallStart, ContentText, Event

_Value = TypeVar("_Value")
Reading = Generator[None, None, _Value]
"""A walk over the text, suspended whenever it needs characters that have not arrived."""

MAX_HELD_CHARS = 4096
"""What may be unread again: without a bound a text full of half calls would be read once for each of them."""

_PIECE_CHARS = 4096
"""Longer texts are read in pieces: settling copies what follows in the buffer."""

_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'[^"\\]*')  # within a string
_BETWEEN = re.compile(r"[\w\s.,:+\-]*", re.ASCII)  # between strings and brackets; Python's True and NaN too
_SCALAR = re.compile(r"[\w.+\-]*", re.ASCII)
_CLOSERS = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text at hand is no call."""


class CallReader(ABC):
    """Turns the text of one answer into events. A format is a subclass that knows its markers.

    Text that is no call is content, markers of a malformed call included. A call counts once its name and the
    first key of its arguments (or `{}`) have been read: from then on it streams. If it breaks later, it keeps the
    arguments up to there, as one does that the token limit cuts, and the rest is content. No character of the text
    is lost but those of the format itself, other members of its objects (also where the text ends within them), and
    white space beside calls. What is not known to be a call after `MAX_HELD_CHARS` is none. `tool_names` are the tools
    that the model was given.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()
    """Ends of calls. They are content, but for those behind a call that broke, up to the next marker."""

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        self._tool_names = frozenset(tool_names)
        self._buffer = ""
        self._position = 0
        self._is_ended = False
        self._events: list[Event] = []
        self._content: list[str] = []  # of the next event
        self._num_calls = 0
        self._is_streaming = False  # the buffer up to `_position` is arguments
        self._is_behind_arguments = False  # what follows belongs to the format
        self._has_met_end = False  # a walk has asked for more than there is
        self._marker = ""  # what the buffer begins with, while the call behind it is not settled
        self._space = ""  # white space of the content that may turn out to lie beside a call
        self._has_content = False
        self._is_broken = False  # the latest call is, and no marker has followed it
        self._literals = (*self.markers, *self.closers)
        self._marker_pattern = re.compile("|".join(map(re.escape, self._literals)) or "(?!)")
        self._max_marker = max(map(len, self._literals), default=1)
        self._walk = self._read()

    def feed(self, text: str) -> list[Event]:
        for begin in range(0, len(text), _PIECE_CHARS):
            self._buffer += text[begin : begin + _PIECE_CHARS]
            next(self._walk, None)
        return self._take_events()

    def finish(self) -> list[Event]:
        """The text has ended; what was held back comes out. Nothing may be fed after it."""
        self._is_ended = True
        next(self._walk, None)
        return self._take_events()

    @abstractmethod
    def _read_block(self) -> Reading[None]:
        """Read what follows a marker, settling each call. Raises `Malformed` where it is none."""

    def _read_start(self) -> Reading[None]:
        """Read calls that need no marker, at the start of the answer."""
        return
        yield

    def _take_events(self) -> list[Event]:
        self._flush_content()
        events, self._events = self._events, []
        return events

    def _emit(self, *events: Event) -> None:
        self._flush_content()
        self._events += events

    def _flush_content(self) -> None:
        if self._content:
            self._events.append(ContentText("".join(self._content)))
            self._content.clear()

    def _read(self) -> Reading[None]:
        yield from self._attempt(self._read_start())
        while (yield from self._pass_content()):
            yield from self._attempt(self._read_block())

    def _attempt(self, block: Reading[None]) -> Reading[None]:
        try:
            yield from block
        except Malformed:
            if self._is_streaming:
                self._settle_arguments()
                self._is_streaming = False
                self._is_broken = True
                return
            if self._is_behind_arguments and self._has_met_end:
                self._position = len(self._buffer)
                self._settle()
                return
            marker, self._position = self._marker, len(self._marker)
            self._settle()
            self._add_content(marker)

    def _pass_content(self) -> Reading[bool]:
        """Pass content on up to the next marker, which is then read; False at the end of the text."""
        while True:
            match = self._marker_pattern.search(self._buffer)
            if match is not None and match[0] in self.closers:
                self._add_content(self._buffer[: match.start() if self._is_broken else match.end()])
                self._position = match.end()
                self._settle()
                continue
            if match is not None:
                self._position = match.start()
                self._add_content(self._buffer[: match.start()])
                self._settle()
                self._is_broken = False
                self._marker, self._position = match[0], len(match[0])
                self._is_behind_arguments = False
                return True
            cut = len(self._buffer) - (0 if self._is_ended else self._num_pending())
            self._add_content(self._buffer[:cut])
            self._position = cut
            self._settle()
            if self._is_ended:
                if not self._num_calls:
                    self._emit_content(self._space)
                return False
            yield

    def _num_pending(self) -> int:
        """Characters at the end of the buffer that a marker may begin with."""
        for size in range(min(self._max_marker - 1, len(self._buffer)), 0, -1):
            if any(literal.startswith(self._buffer[-size:]) for literal in self._literals):
                return size
        return 0

    def _add_content(self, text: str) -> None:
        """White space waits for what follows it: before a call, and behind one that no content precedes, it goes."""
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        if not end:
            return
        text = text[:end]
        self._emit_content(text.lstrip() if self._num_calls and not self._has_content else text)

    def _emit_content(self, text: str) -> None:
        if text:
            self._has_content = True
            self._content.append(text)

    def _settle(self) -> None:
        """What has been read stays read."""
        self._buffer, self._position, self._marker = self._buffer[self._position :], 0, ""

    def _settle_arguments(self) -> None:
        if self._position:
            self._emit(ArgumentsText(self._num_calls - 1, self._buffer[: self._position]))
        self._settle()

    def _more(self) -> Reading[bool]:
        """Wait for a character; False at the end of the text."""
        if self._position >= MAX_HELD_CHARS and not self._is_streaming:
            raise Malformed
        while self._position == len(self._buffer):
            if self._is_ended:
                self._has_met_end = True
                return False
            if self._is_streaming:
                self._settle_arguments()
            yield
        return True

    def _peek(self) -> Reading[str]:
        """The next character, or an empty text at the end."""
        return self._buffer[self._position] if (yield from self._more()) else ""

    def _skip(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Go over all characters of `pattern`, a repeated class."""
        while (yield from self._more()):
            match = pattern.match(self._buffer, self._position)
            if match is None or match.end() == self._position:
                return
            self._position = match.end()

    def _skip_space(self) -> Reading[None]:
        yield from self._skip(_SPACE)

    def _accept(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next; it is read if so, and nothing is if not. Not where `_more` may settle: while
        arguments stream only for one character that is known to be there.
        """
        begin = self._position
        for char in literal:
            if (yield from self._peek()) != char:
                self._position = begin
                return False
            self._position += 1
        return True

    def _expect(self, literal: str) -> Reading[None]:
        if not (yield from self._accept(literal)):
            raise Malformed

    def _until(self, literal: str, max_chars: int = 256) -> Reading[str]:
        """The text up to `literal`, which is read too. Longer texts are malformed."""
        begin = self._position
        while (end := self._buffer.find(literal, begin)) < 0:
            if self._is_ended or len(self._buffer) - begin >= max_chars + len(literal):
                raise Malformed
            yield
        if end - begin > max_chars:
            raise Malformed
        self._position = end + len(literal)
        return self._buffer[begin:end]

    def _string(self) -> Reading[str]:
        """The value of a JSON string."""
        begin = self._position
        yield from self._skip_string()
        try:
            value: str = json.loads(self._buffer[begin : self._position])
            value.encode()
        except ValueError:  # also of lone surrogates, which cannot be sent
            raise Malformed from None
        return value

    def _skip_string(self) -> Reading[None]:
        yield from self._expect('"')
        while True:
            yield from self._skip(_PLAIN)
            if (yield from self._accept('"')):
                return
            yield from self._expect("\\")
            if not (yield from self._more()):
                raise Malformed
            self._position += 1

    def _skip_to_close(self, opened: str) -> Reading[None]:
        """To the end of the object or list that `opened` (brackets, outermost first) ends in."""
        stack = list(opened)
        while stack:
            yield from self._skip(_BETWEEN)
            char = yield from self._peek()
            if char == '"':
                yield from self._skip_string()
                continue
            if char in ("{", "["):
                stack.append(char)
            elif char != _CLOSERS[stack[-1]]:
                raise Malformed
            else:
                stack.pop()
            self._position += 1

    def _skip_value(self) -> Reading[None]:
        """Any JSON value."""
        char = yield from self._peek()
        if char == '"':
            yield from self._skip_string()
        elif char in ("{", "["):
            self._position += 1
            yield from self._skip_to_close(char)
        else:
            begin = self._position
            yield from self._skip(_SCALAR)
            if self._position == begin:
                raise Malformed

    def _arguments_head(self) -> Reading[bool]:
        """The arguments up to the colon of their first key; True if they are an empty object."""
        yield from self._expect("{")
        yield from self._skip_space()
        if (yield from self._accept("}")):
            return True
        yield from self._string()
        yield from self._skip_space()
        yield from self._expect(":")
        return False

    def _start_call(
        self, name: str, arguments: str, call_id: str | None = None, *, is_whole: bool = True
    ) -> None:
        """The call is one: what has been read of it is settled."""
        if not name.strip():
            raise Malformed
        self._emit(CallStart(self._num_calls, name, call_id), ArgumentsText(self._num_calls, arguments))
        if is_whole:
            self._emit(CallEnd(self._num_calls))
            self._is_behind_arguments = True
        self._num_calls += 1
        self._space = ""
        self._settle()

    def _stream_arguments(self, name: str, call_id: str | None = None) -> Reading[None]:
        begin = self._position
        is_empty = yield from self._arguments_head()
        self._start_call(name, self._buffer[begin : self._position], call_id, is_whole=is_empty)
        if is_empty:
            return
        self._is_streaming = True
        yield from self._skip_to_close("{")
        self._settle_arguments()
        self._is_streaming = False
        self._is_behind_arguments = True
        self._emit(CallEnd(self._num_calls - 1))

    def _call_object(self, *, must_be_known: bool = False) -> Reading[None]:
        """`{"name": ..., "arguments": {...}}`, or with `parameters`; other members are not looked at.

        Arguments may be a string that holds the object. A call without arguments has `{}`. With `must_be_known` it is a
        call only if a tool has its name and it has arguments: the object may be anything.
        """
        name = arguments = None
        is_started = self._is_behind_arguments = False
        keys: set[str] = set()
        yield from self._expect("{")
        yield from self._skip_space()
        while True:
            key = yield from self._string()
            key = "arguments" if key == "parameters" else key
            if key in keys:
                raise Malformed
            keys.add(key)
            yield from self._skip_space()
            yield from self._expect(":")
            yield from self._skip_space()
            if key == "name":
                name = yield from self._string()
                if must_be_known and name not in self._tool_names:
                    raise Malformed
            elif key == "arguments":
                if (yield from self._accept("null")):
                    arguments = "{}"
                elif (yield from self._peek()) == '"':
                    arguments = _object_text((yield from self._string()))
                elif name is not None:
                    yield from self._stream_arguments(name)
                    is_started = True
                else:
                    arguments = yield from self._held_arguments()
            else:
                yield from self._skip_value()
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                break
            yield from self._skip_space()
        yield from self._expect("}")
        if not is_started:
            if name is None or (must_be_known and arguments is None):
                raise Malformed
            self._start_call(name, arguments or "{}")
        self._settle()

    def _held_arguments(self) -> Reading[str]:
        begin = self._position
        if not (yield from self._arguments_head()):
            yield from self._skip_to_close("{")
        return self._buffer[begin : self._position]

    def _call_list(self) -> Reading[None]:
        """`[{...}, {...}]`"""
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            yield from self._call_object()
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                break
        yield from self._expect("]")
        self._settle()


def _object_text(text: str) -> str:
    """`text`, if it is the JSON of an object. Raises `Malformed`."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise Malformed
    return text
