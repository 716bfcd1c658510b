"""Regular expressions of users, made ready for llguidance: ECMA-262, and what of Python's `re` is no different.

llguidance reads the syntax of Rust's regex crate, which gives some of the same characters another meaning (`[a&&b]`,
`[[:alpha:]]`, Unicode classes). So a pattern is parsed here and written anew with nothing left to interpretation;
whatever has no counterpart is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PATTERN_DEPTH = 32
MAX_REPEAT = 100_000

# Sets on which ECMA-262 and Python's `re` agree, and what one of them has besides: of that no pattern makes any.
_SPACES = r"\t\n\x0b\x0c\r\x20\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_WIDE = {"d": r"0-9\p{Nd}", "w": r"0-9A-Za-z_\p{L}\p{N}", "s": rf"{_SPACES}\x1c-\x1f\x{{85}}\x{{feff}}"}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_NOTHING = r"[^\x{0}-\x{10FFFF}]"
_ANY = r"[\x{0}-\x{10FFFF}]"

UNSPELLABLE = frozenset({*range(0x20), 0x7F} - {8, 9, 10, 12, 13})
"""Characters that strings of JSON cannot have here: there is no short escape, and llguidance escapes U+007F too.

Classes must be without them before llguidance makes JSON of a pattern: for one with every control character, or every
one but the line feed, it allows all the escapes that there are, `\\"` and `\\\\` included.
"""
_UNSPELLABLE_CLASS = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_ANYTHING = f"[^{_UNSPELLABLE_CLASS}]*"
_SPELLABLE_SETS = frozenset({f"[{_NARROW['d']}]", f"[{_NARROW['w']}]"})
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_REPEAT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_]\w*>|\?:")


class PatternError(ValueError):
    """Says what of a pattern cannot be honoured, and where it stands."""


def search_regex(pattern: str) -> str:
    """A regex of whole strings in JSON that have a match of `pattern` somewhere. Raises `PatternError`, also where a
    match needs a character of `UNSPELLABLE`.
    """
    return "|".join(
        f"{'' if part.is_start else _ANYTHING}(?:{part.body}){'' if part.is_end else _ANYTHING}"
        for part in _Reader(pattern, is_json=True).alternatives()
    )


def full_regex(pattern: str) -> str:
    """A regex of whole strings that are a match of `pattern`; anchors at its ends change nothing. As above."""
    return "|".join(f"(?:{part.body})" for part in _Reader(pattern).alternatives())


def literal_regex(text: str) -> str:
    return "".join(map(_escaped, text))


@dataclass(frozen=True, slots=True)
class _Alternative:
    body: str
    is_start: bool
    is_end: bool


class _Reader:
    def __init__(self, pattern: str, *, is_json: bool = False) -> None:
        self._text = pattern
        self._is_json = is_json
        self._at = 0
        self._depth = 0

    def alternatives(self) -> list[_Alternative]:
        """The pattern's outermost alternatives, whose anchors count."""
        parts = [self._alternative(is_outermost=True)]
        while self._take("|"):
            parts.append(self._alternative(is_outermost=True))
        if self._at < len(self._text):
            raise self._error("a ')' that closes nothing")
        return parts

    def _alternative(self, *, is_outermost: bool = False) -> _Alternative:
        is_start = is_outermost and self._take("^")
        out: list[str] = []
        is_end = False
        while self._at < len(self._text) and self._peek() not in "|)":
            if is_outermost and self._peek() == "$" and self._text[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                is_end = True
                break
            out.append(self._atom() + self._repeat())
        return _Alternative("".join(out), is_start, is_end)

    def _atom(self) -> str:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return self._spelled(_DOT)
        if char == "\\":
            item = self._escape()
            return self._character(item) if _is_single(item) else self._spelled(item)
        if char in "^$":
            raise self._error(f"the anchor {char!r} anywhere but at the ends of the pattern")
        if char in "*+?" or (char == "{" and _REPEAT.match(self._text, self._at - 1)):
            raise self._error(f"{char!r} that repeats nothing")
        return self._character(_escaped(char))

    def _character(self, item: str) -> str:
        if self._is_json and _point(item) in UNSPELLABLE:
            raise self._error(f"U+{_point(item):04X}, which strings of JSON cannot have here,")
        return item

    def _spelled(self, members: str) -> str:
        """A class without what JSON cannot spell, from one."""
        if not self._is_json or members in _SPELLABLE_SETS:
            return members
        return f"[{members}--[{_UNSPELLABLE_CLASS}]]"

    def _group(self) -> str:
        if self._peek() == "?":
            match = _GROUP_NAME.match(self._text, self._at)
            if match is None:
                raise self._error("a group of the kind '(?...': no lookaround, no flags")
            self._at = match.end()
        self._depth += 1
        if self._depth > MAX_PATTERN_DEPTH:
            raise self._error(f"groups more than {MAX_PATTERN_DEPTH} deep")
        parts = [self._alternative().body]
        while self._take("|"):
            parts.append(self._alternative().body)
        if not self._take(")"):
            raise self._error("a '(' without its ')'")
        self._depth -= 1
        return f"(?:{'|'.join(parts)})"

    def _repeat(self) -> str:
        """The quantifier behind an atom. A lazy one allows the same texts as a greedy one."""
        quantifier = ""
        match = _REPEAT.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            low, comma, high = match.groups()
            # A number of thousands of digits is none that `int` reads.
            counts = [int(count) for count in (low, high) if count] if len(match[0]) <= 16 else []
            if not counts or max(counts) > MAX_REPEAT or counts[-1] < counts[0]:
                raise self._error(
                    f"the repetition {match[0][:16]!r} (0 to {MAX_REPEAT}, the lower number first)"
                )
            quantifier = f"{{{counts[0]}{comma or ''}{counts[1] if high else ''}}}"
        elif self._peek() in ("*", "+", "?"):
            quantifier = self._next()
        if quantifier:
            self._take("?")
            if self._peek() in ("*", "+", "?") or _REPEAT.match(self._text, self._at):
                raise self._error("two repetitions in a row")
        return quantifier

    def _class(self) -> str:
        start = self._at
        is_negated = self._take("^")
        out = ["[^" if is_negated else "["]
        previous: str | None = None  # the character that a '-' may make a range of
        spans: list[range] = []
        sets: set[str] = set()  # the last characters of their escapes
        while not self._take("]"):
            if self._at >= len(self._text):
                self._at = start
                raise self._error("a '[' without its ']'")
            item = self._class_item(is_negated)
            is_range = (
                previous is not None
                and item == r"\-"
                and self._text[self._at - 1] == "-"
                and self._text[self._at - 2] != "\\"
                and self._peek() not in ("", "]")
            )
            if is_range:
                end = self._class_item(is_negated)
                if not _is_single(end):
                    raise self._error("a range of a class that ends with a set")
                if _point(end) < _point(previous or ""):
                    raise self._error("a range of a class that runs backwards")
                spans.append(range(_point(previous or ""), _point(end) + 1))
                out.append("-" + end)
                previous = None
            else:
                out.append(item)
                previous = item if _is_single(item) else None
                if previous is None:
                    sets.add(self._text[self._at - 1])
                else:
                    spans.append(range(_point(item), _point(item) + 1))
        is_all = any({name, name.upper()} <= sets for name in _NARROW)
        is_nothing = is_negated if is_all else not sets and _is_unspellable(spans, is_negated)
        if self._is_json and is_nothing:
            raise self._error("a class of no characters that strings of JSON can have here")
        if len(out) == 1:
            return self._spelled(_ANY) if is_negated else _NOTHING
        if is_negated and all(any(point in span for span in spans) for point in (0xD7FF, 0xE000)):
            out.append("\ud7ff-\ue000")  # Rust's complement would take both for a gap between two ranges
        members = "".join(out) + "]"
        is_touched = bool(sets) or is_negated or any(point in span for span in spans for point in UNSPELLABLE)
        return self._spelled(members) if is_touched else members

    def _class_item(self, is_negated: bool) -> str:
        char = self._next()
        return self._escape(in_class=True, is_negated=is_negated) if char == "\\" else _escaped(char)

    def _escape(self, *, in_class: bool = False, is_negated: bool = False) -> str:
        if self._at >= len(self._text):
            raise self._error("a '\\' at the end")
        match = _HEX.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            point = int(match[1] or match[2] or match[3], 16)
            if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
                raise self._error("an escape that is no character")
            return _escaped(chr(point))
        match = _PROPERTY.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            return f"\\{match[0]}"
        char = self._next()
        if char in _NARROW:
            members = (_WIDE if is_negated else _NARROW)[char]
            return members if in_class else f"[{members}]"
        if char.lower() in _NARROW:
            return f"[^{(_NARROW if is_negated else _WIDE)[char.lower()]}]"
        if char in _CONTROLS:
            return _escaped(chr(_CONTROLS[char]))
        if char == "b" and in_class:
            return _escaped("\b")
        if char == "0" and not self._peek().isdigit():
            return _escaped("\0")
        if char.isalnum() or char == "_":
            raise self._error(f"the escape '\\{char}'")
        return _escaped(char)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, char: str) -> bool:
        if self._peek() == char:
            self._at += 1
            return True
        return False

    def _error(self, what: str) -> PatternError:
        return PatternError(f"{what} at character {min(self._at, len(self._text))} cannot be honoured")


def _escaped(char: str) -> str:
    """`char` as a Rust regex that stands for it, in a class and outside."""
    if char.isascii() and not char.isalnum():
        return f"\\{char}" if char in r"\.+*?()|[]{}^$#&-~" else f"\\x{ord(char):02x}"
    return char


def _is_single(item: str) -> bool:
    return len(item) <= 4 and not item.startswith(("[", r"\p", r"\P", "0-9"))


def _point(item: str) -> int:
    if item.startswith(r"\x"):
        return int(item[2:], 16)
    return ord(item[-1])


def _is_unspellable(spans: list[range], is_negated: bool) -> bool:
    """Whether a class of `spans`, or of all but these, has no character that JSON can spell."""
    if not is_negated:
        return all(point in UNSPELLABLE for span in spans for point in span)
    end = 0
    nothing = [range(0xD800, 0xE000), *(range(point, point + 1) for point in UNSPELLABLE)]
    for span in sorted(spans + nothing, key=lambda span: span.start):
        if span.start > end:
            return False
        end = max(end, span.stop)
    return end > 0x10FFFF
