"""Strict JSON: what a body may not hold, and that refusing it is cheap."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.errors import RequestError
from pelton.runtime.protocol_json import MAX_JSON_COMMAS, MAX_JSON_DEPTH, dump_json, parse_json

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(_VALUES)
def test_what_is_dumped_is_parsed(value: object) -> None:
    assert parse_json(dump_json(value)) == value


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "line 1, column 2"),
        (b'{"a": 1} x', "Extra data"),
        (b"{'a': 1}", "Expecting property name"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [Infinity]}', "Infinity"),
        (b"-Infinity", "-Infinity"),
        (b'{"a": 1e400}', "1e400"),
        (b"[-1e999]", "-1e999"),
        (b"1" + b"0" * 5000, "too many digits"),
        (b'"\xff"', "UTF-8 at byte 1"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (rb'{"a": "\ud800"}', "surrogate"),
        (rb'{"\udFFF": 1}', "surrogate"),
        (rb'"\uD83D\u0041"', "surrogate"),
        (b'"a\nb"', "control character"),
    ],
)
def test_sv_11_not_json(body: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match="cannot be read as JSON") as error:
        parse_json(body)
    assert reason in str(error.value)
    assert error.value.code == "invalid_json"


def test_sv_11_duplicate_key_is_named_at_any_depth() -> None:
    with pytest.raises(RequestError, match="'stop' occurs twice") as error:
        parse_json(b'{"a": [{"stop": 1, "n": 2, "stop": 3}]}')
    assert error.value.field == "stop"


def test_surrogate_pairs_and_brackets_in_strings_are_text() -> None:
    assert parse_json(rb'"\ud83d\ude00 \\ud800"') == "\N{GRINNING FACE} \\ud800"
    text = '\\"[{' * 1000
    assert parse_json(b'["' + text.encode() + b'"]') == [text.replace('\\"', '"')]


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_sv_11_depth_is_bounded(opening: bytes, closing: bytes) -> None:
    parse_json(opening * MAX_JSON_DEPTH + b"1" + closing * MAX_JSON_DEPTH)
    with pytest.raises(RequestError, match="levels deep"):
        parse_json(opening * (MAX_JSON_DEPTH + 1) + b"1" + closing * (MAX_JSON_DEPTH + 1))


def test_depth_counts_what_is_open_and_not_what_was() -> None:
    assert parse_json(b"[" + b"[[]]," * 1000 + b"[]]") == [[[]]] * 1000 + [[]]


def test_sv_11_commas_are_bounded() -> None:
    assert parse_json(b'"' + b"," * MAX_JSON_COMMAS + b'"') == "," * MAX_JSON_COMMAS
    with pytest.raises(RequestError, match="commas"):
        parse_json(b"[" + b"1," * (MAX_JSON_COMMAS + 1) + b"1]")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"1," * 10**6 + b"1]}",
        b'{"prompt": [' + b'"a",' * 10**6 + b'"a"]}',
        b'{"prompt": [' + b"[1]," * 10**6 + b"[1]]}",
        b"[" * 10**5 + b"]" * 10**5,
        b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        b"[]" * 100 + b'"' + b'\\"' * 10**5,
    ],
    ids=["ids", "strings", "lists", "nested lists", "nested objects", "open string"],
)
def test_sv_11_hostile_bodies_are_refused_fast(body: bytes) -> None:
    times: list[float] = []
    while len(times) < 10 and min(times, default=1) >= 0.05:
        start = time.process_time()
        with pytest.raises(RequestError):
            parse_json(body)
        times.append(time.process_time() - start)
    assert min(times) < 0.05
