"""Outputs that must have a form: what is asked for, and what a compiled form answers.

StructuredOutput   what the user asked for        --compiled, off the engine's loop-->
Grammar            compiled, shared by requests   --start-->
Matcher            the place of one sequence in its output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tagged"]


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, then a JSON value of `schema` (JSON text), then `end`."""

    begin: str
    schema: str
    end: str


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A form that the whole output must have. `field` is how the user named it, for errors.

    `source` is a JSON schema as text (`json_schema`), a regular expression (`regex`) or an EBNF grammar (`grammar`).
    `choices` are the texts of a `choice`. `tagged`: one of `tags` (tool calls), or with `is_repeated` one or more,
    with `separator` between two.
    """

    kind: Kind
    source: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()
    separator: str = ""
    is_repeated: bool = False
    field: str = "structured_outputs"


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

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, with nothing changed, if it may not follow. A token that ends the turn is accepted
        where the output may end, after which `is_finished`.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted ones."""
        ...

    def forced(self, max_tokens: int) -> list[int]:
        """The tokens that must follow, as far as each is the only one that may; at most `max_tokens`."""
        ...


class Grammar(Protocol):
    """A compiled form. Immutable, shared by requests and threads."""

    def start(self, token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher that has accepted `token_ids`."""
        ...
