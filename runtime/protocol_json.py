"""Strict JSON (RFC 8259) at the door: what a request body may hold before anything looks at its fields.

Python's reader accepts more than JSON (NaN, UTF-16, repeated keys, infinities such as 1e400) and recurses on
nesting; here each is a `RequestError`. The cheap bounds run first, so that a hostile body costs milliseconds.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ..errors import RequestError

MAX_JSON_DEPTH = 64
MAX_JSON_COMMAS = 2**19
"""Bound on the commas of a body, those in strings included: cheap to count, and they bound its values."""

# An unterminated string runs to the end, so that a scan is linear for any input.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Says what keeps a text from being JSON. `key` is the one at fault, if it is one."""

    def __init__(self, reason: str, key: str | None = None) -> None:
        super().__init__(reason)
        self.key = key


def parse_json(data: bytes) -> object:
    """The value of a UTF-8 JSON text. Raises `RequestError` (code `invalid_json`) saying what is wrong."""
    try:
        return read_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
    except JsonError as error:
        if error.key is not None:
            raise RequestError(str(error), field=error.key, code="invalid_json") from None
        reason = str(error)
    raise RequestError(f"the body cannot be read as JSON: {reason}", code="invalid_json")


def read_json(text: str) -> object:
    """The value of a JSON text. Raises `JsonError`."""
    if text.count(",") > MAX_JSON_COMMAS:
        raise JsonError(f"more than {MAX_JSON_COMMAS} commas; send several smaller requests")
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH:
        _check_depth(text)
    try:
        value: object = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError:  # the interpreter's bound on the digits of an integer
        raise JsonError("an integer has too many digits") from None
    if _ESCAPED_SURROGATE.search(text):
        _check_surrogates(value)
    return value


def dump_json(value: object) -> bytes:
    """Compact UTF-8 JSON. A NaN or an infinity in `value` is a bug and raises `ValueError`."""
    return _ENCODER.encode(value).encode()


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise JsonError(f"nested more than {MAX_JSON_DEPTH} levels deep")
        elif first != '"':
            depth -= 1


def _check_surrogates(value: object) -> None:
    """A lone surrogate escape is no character: it can be neither tokenised nor sent back."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise JsonError("a string has an unpaired surrogate escape (\\ud800 to \\udfff)") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"the key {key[:64]!r} occurs twice", key[:64])
            seen.add(key)
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")


def _finite_float(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise JsonError(f"the number {literal[:32]} is out of range")
    return value
