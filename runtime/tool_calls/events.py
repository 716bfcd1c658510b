"""What parsers find in the text of an answer, in its order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text that the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` of the answer begins. `call_id` is the model's own, where its format has ids."""

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """More of the arguments of call `index`: the model's own JSON text, not looked at beyond its brackets."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of call `index` are whole: their last bracket is closed. Without it the call was cut or broke."""

    index: int


Event = ContentText | ReasoningText | CallStart | ArgumentsText | CallEnd
