"""Literal values and bounds of JSON schemas: what no output can be, or none exactly, is refused by its place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from .patterns import UNSPELLABLE
from .place import Place

_MAX_EXACT = 2**53


class SchemaError(ValueError):
    """`pointer` (RFC 6901, at most 300 characters) is the keyword or value at fault."""

    def __init__(self, place: Place, reason: str) -> None:
        super().__init__(reason)
        self.pointer = str(place)


def check_value(value: object, at: Place, max_depth: int) -> None:
    """A literal value: its numbers and texts must be such as the grammar spells exactly."""
    if at.depth > max_depth:
        raise SchemaError(at, f"nested more than {max_depth} levels deep")
    if isinstance(value, dict):
        for key, item in value.items():
            check_text(key, at / key)
            check_value(item, at / key, max_depth)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_value(item, at / index, max_depth)
    elif isinstance(value, str):
        check_text(value, at)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        check_number(value, at)


def check_range(plain: Mapping[str, Any], place: Place) -> None:
    """Where all values are numbers, some must be within the bounds."""
    names = _type_names(plain)
    lows = [(Fraction(plain[key]), key) for key in ("minimum", "exclusiveMinimum") if key in plain]
    highs = [(Fraction(plain[key]), key) for key in ("maximum", "exclusiveMaximum") if key in plain]
    if not names or not names <= {"integer", "number"} or not lows or not highs:
        return
    low, low_key = max(lows, key=lambda bound: (bound[0], bound[1] == "exclusiveMinimum"))
    high, high_key = min(highs, key=lambda bound: (bound[0], bound[1] != "exclusiveMaximum"))
    is_open = low_key == "exclusiveMinimum", high_key == "exclusiveMaximum"
    if low > high or (low == high and any(is_open)):
        raise SchemaError(place / low_key, f"with it no number is within {high_key}")
    step = Fraction(plain.get("multipleOf", 0))
    if "number" not in names:  # the multiples of a / b, in lowest terms, that are whole are those of a
        step = Fraction(step.numerator or 1)
    if not step:
        return
    least = math.ceil(low / step) * step
    least += step if is_open[0] and least == low else 0
    if least > high or (least == high and is_open[1]):
        key, what = ("multipleOf", "multiple") if "multipleOf" in plain else (low_key, "whole number")
        raise SchemaError(place / key, f"no {what} is within {low_key} and {high_key}")


def check_types(plain: Mapping[str, Any], place: Place, schema: Mapping[str, object]) -> None:
    """Of literal values beside a type, some must be of it."""
    names = _type_names(plain)
    for key in ("const", "enum"):
        if not names or key not in schema:
            continue
        values = schema[key] if key == "enum" else [schema[key]]
        if isinstance(values, list) and not any(_is_of(value, names) for value in values):
            raise SchemaError(place / key, "no such value is of the type beside it")


def _type_names(plain: Mapping[str, Any]) -> set[str]:
    """Those of `type`; none: all."""
    names = plain.get("type", ())
    return {names} if isinstance(names, str) else set(names)


def _is_of(value: object, names: set[str]) -> bool:
    kind = type_of(value)
    return kind in names or (
        isinstance(value, (int, float)) and kind == "number" and "integer" in names and value % 1 == 0
    )


def type_of(value: object) -> str:
    """The JSON type of a literal; whole numbers are `number` too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def check_text(text: str, at: Place) -> None:
    for char in text:
        if ord(char) in UNSPELLABLE:
            raise SchemaError(
                at,
                f"the character U+{ord(char):04X} cannot be in an output's strings; of control characters there are "
                r"\b, \t, \n, \f and \r",
            )


def check_number(value: float, at: Place) -> None:
    if abs(value) > _MAX_EXACT or (value and abs(value) < 1e-9):
        raise SchemaError(
            at, f"numbers beyond 2**53 or closer to 0 than 1e-9 are not exact: {str(value)[:32]}"
        )
