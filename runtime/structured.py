"""Outputs that must have a form: what is asked for, and what a compiled form answers.

StructuredOutput   what the user asked for        --compiled, off the engine's loop-->
Grammar            compiled, shared by requests   --start-->
Matcher            the place of one sequence in its output
Masks              what its form allows there and behind each token of a draft
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, get_args

import numpy as np

from ..errors import EngineError, RequestError

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tagged"]

_WITH_SOURCE: tuple[Kind, ...] = ("json_schema", "regex", "grammar")


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, then a JSON value of `schema` (JSON text), then `end`.

    `places`, for errors: JSON pointers into `schema`, and how the user named what stands there.
    """

    begin: str
    schema: str
    end: str
    places: tuple[tuple[str, str], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form that the whole output must have. `field` is how the user named it, for errors.

    `source` is a JSON schema (`json_schema`; a dict or a bool becomes its text), a regular expression (`regex`) or an
    EBNF grammar (`grammar`). `choices` are the texts of a `choice`, in a list or the like. `tagged`: one of `tags`
    (tool calls), or with `is_repeated` one or more, with `separator` between two. Raises `RequestError` naming the
    argument; whether a source is one of its kind shows when it is compiled.
    """

    kind: Kind
    source: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()
    separator: str = ""
    is_repeated: bool = False
    field: str = "structured_output"

    def __post_init__(self) -> None:
        kinds = get_args(Kind)
        if self.kind not in kinds:
            raise self._mistake("kind", f"must be one of {', '.join(kinds)}, got {str(self.kind)[:64]!r}")
        source: object = self.source
        if self.kind == "json_schema" and isinstance(source, Mapping | bool):
            try:
                source = json.dumps(source, ensure_ascii=False, separators=(",", ":"))
            except (TypeError, ValueError, RecursionError) as error:
                raise self._mistake("source", f"is no JSON schema: {error}") from None
            object.__setattr__(self, "source", source)
        if not isinstance(source, str):
            raise self._mistake("source", f"must be a string, got {type(source).__name__}")
        self._set_tuple("choices", str, "strings")
        self._set_tuple("tags", Tag, "Tag objects")
        for name, owners in (("source", _WITH_SOURCE), ("choices", ("choice",)), ("tags", ("tagged",))):
            if getattr(self, name) and self.kind not in owners:
                raise self._mistake(name, f"does not go with the kind {self.kind}")

    def _set_tuple(self, name: str, kind: type, what: str) -> None:
        value: object = getattr(self, name)
        items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
        if not all(isinstance(item, kind) for item in items):
            raise self._mistake(name, f"must be a list of {what}")
        object.__setattr__(self, name, items)

    def _mistake(self, name: str, reason: str) -> RequestError:
        field = f"{self.field}.{name}"
        return RequestError(f"{field} {reason}", field=field)

    def renamed(self, error: RequestError) -> RequestError:
        """`error`, which names a place in the schema of a tag, with the user's own name for that place."""
        for index, tag in enumerate(self.tags):
            for pointer, place in tag.places:
                found = f"{self.field}[{index}]{pointer}"
                if error.field is not None and f"{error.field}/".startswith(f"{found}/"):
                    name = place + error.field[len(found) :]
                    message = str(error).replace(error.field, name, 1)
                    return RequestError(message, field=name, code=error.code)
        return error


class Matcher(Protocol):
    """Where one sequence is in its output. One thread at a time."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Set `mask` `[ceil(vocab_size / 32)]` int32: bit `i % 32` of word `i // 32` tells whether token i may follow.

        Every token that ends a turn (all EOS ids of the model) may follow where the output may end, and none where it
        may not. When `is_finished` only they may.
        """
        ...

    def allows(self, token_id: int) -> bool:
        """Whether the mask has the token. `accept` may take more: other spellings of a text that must follow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, with nothing changed, if it may not follow. A token that ends the turn is accepted
        where the output may end, after which `is_finished`.
        """
        ...

    def forced(self, max_tokens: int) -> list[int]:
        """The tokens that must follow, as far as each is the only one that may; at most `max_tokens`."""
        ...

    def copy(self) -> Matcher:
        """Another at the same place, which goes its own way: what breaks it does not break this one."""
        ...


class Masks(Protocol):
    """What a form allows behind a sequence and its draft: at place j, behind j tokens of the draft.

    Places are asked for in ascending order, and only those whose tokens before them the form takes. Both raise
    `EngineError` where the form has outgrown its limits.
    """

    def allows(self, place: int, token_id: int) -> bool: ...

    def row(self, place: int) -> np.ndarray:
        """A mask as `Matcher.fill` makes it, `[ceil(vocab_size / 32)]` int32."""
        ...


class MasksOnDemand:
    """`Masks` straight from `matcher`, which stays where it is; `draft` is what the places lie in.

    A mask takes many times longer than the question whether one token may follow, and the token that a model likes
    best mostly may. Whatever fails is an `EngineError` of this sequence alone.
    """

    def __init__(self, matcher: Matcher, draft: Sequence[int], num_words: int) -> None:
        self._matcher = matcher
        self._draft = draft
        self._num_words = num_words
        self._ahead: Matcher | None = None  # `_place` tokens into the draft
        self._place = 0

    def allows(self, place: int, token_id: int) -> bool:
        with FormErrors():
            return self._at(place).allows(token_id)

    def row(self, place: int) -> np.ndarray:
        mask = np.empty(self._num_words, np.int32)
        with FormErrors():
            self._at(place).fill(mask)
        return mask

    def _at(self, place: int) -> Matcher:
        if not place:
            return self._matcher
        if self._ahead is None:
            self._ahead = self._matcher.copy()
        for token_id in self._draft[self._place : place]:
            if not self._ahead.accept(token_id):
                raise ValueError(f"the form refuses token {self._place} of the draft, which was accepted")
            self._place += 1
        return self._ahead


class FormErrors:
    """Whatever a matcher raises in such a context is an `EngineError`."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            raise EngineError(f"the form of the output cannot be kept: {error}") from error


def allows(mask: np.ndarray, token_id: int) -> bool:
    """Whether a mask as `Matcher.fill` makes it lets the token follow."""
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)


class Grammar(Protocol):
    """A compiled form. Immutable, shared by requests and threads."""

    def start(self, token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher that has accepted `token_ids`."""
        ...
