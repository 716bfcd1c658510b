"""Telling the control tokens that a chat template writes from their mere text inside a client's strings.

A client may write `<|im_end|>` in a message; encoded as a control token it would end the message and let the
rest pose as another speaker. So control-token text in untrusted strings is marked before the template is
rendered, found again in the rendered text, and encoded as the plain characters that it is.

How a mixed text is encoded: every control token that the template itself wrote is replaced by an alias made
of private-use characters, and the text is encoded by a twin of the tokenizer that knows the aliases in place
of the control tokens. So text is cut exactly where the tokenizer would have cut it, and nowhere else.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from ..errors import RequestError

# Marks of one rendering are taken from this range (plane 15, private use); aliases from the range behind it.
_MARKS = range(0xF0000, 0xF1000)
_ALIAS_START, _ALIAS_END = chr(0xF1000), chr(0xF1001)
_ALIAS_DIGITS = 0xF1100


@dataclass(frozen=True, slots=True)
class Marks:
    """Three private-use characters that appear nowhere in the text at hand.

    `start` and `end` enclose a whole control-token text of an untrusted string. `edge` stands where such a
    string begins or ends with a part of a control token, which its neighbour in the rendered text could
    complete.
    """

    start: str
    end: str
    edge: str

    @classmethod
    def absent_from(cls, *values: object) -> Marks:
        """Marks that no string of these JSON values holds."""
        present: set[str] = set()
        for value in values:
            _add_characters(value, present)
        free = (chr(point) for point in _MARKS if chr(point) not in present)
        try:
            return cls(next(free), next(free), next(free))
        except StopIteration:
            raise _not_encodable("too many different private-use characters") from None


class Places:
    """Where the marks of a rendered text stood, as offsets in the text without them."""

    def __init__(self) -> None:
        self.starts: set[int] = set()
        self.ends: set[int] = set()
        self.edges: set[int] = set()

    @classmethod
    def read(cls, marked: str, marks: Marks) -> tuple[str, Places]:
        """Take the marks out of a rendered text."""
        places = cls()
        sets = {marks.start: places.starts, marks.end: places.ends, marks.edge: places.edges}
        parts: list[str] = []
        offset = 0
        for part in re.split(f"([{marks.start}{marks.end}{marks.edge}])", marked):
            if part in sets:
                sets[part].add(offset)
            else:
                parts.append(part)
                offset += len(part)
        return "".join(parts), places

    def moved(self, text: str, other: str) -> Places | None:
        """The same places in `other`, or None if it differs from `text` in more than white space.

        Marks keep a template from trimming the text behind them (`content.split('</think>')[-1].strip()`).
        One that stood before or behind white space of a token moves into the token, and so still divides it.
        """
        if text == other:
            return self
        solid = [offset for offset, char in enumerate(text) if not char.isspace()]
        other_solid = [offset for offset, char in enumerate(other) if not char.isspace()]
        if [text[offset] for offset in solid] != [other[offset] for offset in other_solid]:
            return None
        places = Places()
        for start in self.starts:
            number = bisect_left(solid, start)
            places.starts.add(other_solid[number] if number < len(other_solid) else len(other))
        for source, target in ((self.ends, places.ends), (self.edges, places.edges)):
            for end in source:
                number = bisect_left(solid, end)
                target.add(other_solid[number - 1] + 1 if number else 0)
        return places

    def touch(self, start: int, end: int) -> bool:
        """Whether marks enclose or divide the characters `[start, end)`."""
        if start in self.starts and end in self.ends:
            return True
        inside = range(start + 1, end)
        return any(place in group for group in (self.starts, self.ends, self.edges) for place in inside)


class ControlTokens:
    """The control tokens of one tokenizer, and how to write their text as plain text.

    `contents` maps each control token's text, which is not all white space, to its id. Safe for use from many
    threads.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, contents: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._contents = dict(contents)
        self._ids = frozenset(self._contents.values())
        longest_first = sorted(self._contents, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._heads = {token[:size] for token in longest_first for size in range(1, len(token))}
        self._tails = {token[size:] for token in longest_first for size in range(1, len(token))}
        self._max_part = max(map(len, longest_first), default=1) - 1
        self._twin: _Twin | None = None
        self._twin_lock = threading.Lock()

    def is_part(self, text: str) -> bool:
        """Whether `text` lies within a control token's text."""
        return any(text in token for token in self._contents)

    def settle(self, marked: str, marks: Marks, plain: str) -> tuple[str, Places]:
        """The text to encode, of a conversation rendered with marks and without, and where the marks stood.

        It is the plain text wherever the marks can be placed in it. A template that reads more into a marked
        text than white space gives another one, which then counts: it is the one whose marks are known.
        """
        text, places = Places.read(marked, marks)
        moved = places.moved(text, plain)
        return (text, places) if moved is None else (plain, moved)

    def num_in_text(self, text: str) -> int:
        return sum(1 for _ in self._pattern.finditer(text))

    def num_in_ids(self, token_ids: Sequence[int]) -> int:
        return sum(map(self._ids.__contains__, token_ids))

    def mark(self, value: Any, marks: Marks) -> Any:
        """A copy of a JSON value whose strings are marked where they hold or touch control-token text.

        An unaffected value comes back equal. Of object keys, only those that hold a whole token are marked:
        templates look others up by name.
        """
        if isinstance(value, str):
            return self._mark_edges(self._mark_tokens(value, marks), value, marks)
        if isinstance(value, Mapping):
            return {
                self._mark_tokens(key, marks) if isinstance(key, str) else key: self.mark(item, marks)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.mark(item, marks) for item in value]
        return value

    def encode(self, text: str, places: Places) -> list[int]:
        """Encode a rendered text; control-token text that marks enclose or divide is plain text.

        Raises `RequestError(field="messages")` where this tokenizer has no other way to write that text than
        the control token itself.
        """
        if _ALIAS_START in text:
            raise _not_encodable(f"the private-use character U+{ord(_ALIAS_START):X}")
        twin = self._get_twin()
        parts: list[str] = []
        done = 0
        trusted = 0
        for start, end, is_trusted in self._find(text, places):
            if is_trusted:
                parts += (text[done:start], twin.alias_of[text[start:end]])
                done = end
                trusted += 1
        token_ids = twin.encode("".join(parts) + text[done:])
        if self.num_in_ids(token_ids) != trusted:
            raise _not_encodable("control-token text that this tokenizer cannot write as plain text")
        return token_ids

    def is_safe(self, text: str, places: Places) -> bool:
        """Whether all control-token text of a rendered text is the template's own."""
        return all(is_trusted for _, _, is_trusted in self._find(text, places))

    def _find(self, text: str, places: Places) -> Iterator[tuple[int, int, bool]]:
        """Leftmost-longest occurrences of control tokens, and whether the template wrote them.

        An untrusted occurrence hides nothing: the search goes on at its second character.
        """
        position = 0
        while match := self._pattern.search(text, position):
            start, end = match.span()
            is_trusted = not places.touch(start, end)
            yield start, end, is_trusted
            position = end if is_trusted else start + 1

    def _mark_tokens(self, text: str, marks: Marks) -> str:
        return self._pattern.sub(lambda match: f"{marks.start}{match[0]}{marks.end}", text)

    def _mark_edges(self, marked: str, text: str, marks: Marks) -> str:
        sizes = range(1, min(self._max_part, len(text)) + 1)
        if any(text[-size:] in self._heads for size in sizes):
            marked += marks.edge
        if any(text[:size] in self._tails for size in sizes):
            marked = marks.edge + marked
        return marked

    def _get_twin(self) -> _Twin:
        with self._twin_lock:
            if self._twin is None:
                self._twin = _Twin(self._tokenizer, self._contents)
            return self._twin


class _Twin:
    """The tokenizer with its control tokens spelled as aliases; every other added token stays as it is."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, contents: Mapping[str, int]) -> None:
        self._twin = tokenizers.Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._twin.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._twin.pre_tokenizer = tokenizer.pre_tokenizer
        self.alias_of: dict[str, str] = {}
        spellings: dict[str, int] = {}
        added: list[tokenizers.AddedToken] = []
        for number, (token_id, token) in enumerate(sorted(tokenizer.get_added_tokens_decoder().items())):
            spelling = token.content
            if spelling in contents:
                spelling = self.alias_of[token.content] = _alias(number)
            spellings[spelling] = token_id
            added.append(
                tokenizers.AddedToken(
                    spelling,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
            )
        self._twin.add_tokens(added)
        self._id_of = {self._twin.token_to_id(spelling): token_id for spelling, token_id in spellings.items()}

    def encode(self, text: str) -> list[int]:
        id_of = self._id_of
        return [id_of.get(i, i) for i in self._twin.encode(text, add_special_tokens=False).ids]


def _add_characters(value: object, present: set[str]) -> None:
    if isinstance(value, str):
        if not value.isascii():
            present.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add_characters(key, present)
            _add_characters(item, present)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_characters(item, present)


def _alias(number: int) -> str:
    digits = ""
    while number or not digits:
        digits = chr(_ALIAS_DIGITS + number % 256) + digits
        number //= 256
    return f"{_ALIAS_START}{digits}{_ALIAS_END}"


def _not_encodable(what: str) -> RequestError:
    return RequestError(f"messages: they hold {what}; take it out", field="messages")
