"""The input of a batch job: one request per line, read as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ...errors import RequestError
from ..protocol import CHAT_COMPLETIONS, COMPLETIONS, parse_json

MAX_LINE_BYTES = 64 << 20
"""A longer line becomes an error record; it bounds what one line can cost in memory."""

BATCH_URLS = (CHAT_COMPLETIONS, COMPLETIONS)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DISCARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RawLine:
    """Physical line `number` (from 1) without its line end; `data` is empty when it `is_oversized`."""

    number: int
    data: bytes
    is_oversized: bool = False

    @property
    def is_blank(self) -> bool:
        return not self.is_oversized and not self.data.strip()


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of the OpenAI Batch file format. Keys that the format does not name are left alone."""

    custom_id: str
    url: str
    body: Mapping[str, object]


def read_lines(file: BinaryIO, on_data: Callable[[bytes], object] | None = None) -> Iterator[RawLine]:
    """The lines of `file` from its position on; `on_data` sees every byte, in order.

    Lines end with LF or CRLF; a UTF-8 byte order mark before a line is dropped (files joined with `cat` have
    them in the middle).
    """
    number = 0
    while chunk := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if on_data is not None:
            on_data(chunk)
        is_oversized = len(chunk) > MAX_LINE_BYTES and not chunk.endswith(b"\n")
        while is_oversized and chunk and not chunk.endswith(b"\n"):
            chunk = file.readline(_DISCARD_BYTES)
            if on_data is not None:
                on_data(chunk)
        data = b"" if is_oversized else chunk.rstrip(b"\r\n").removeprefix(_BYTE_ORDER_MARK)
        yield RawLine(number, data, is_oversized)


def parse_line(line: RawLine) -> BatchLine:
    """Raises `RequestError` naming the field for a line that cannot be run."""
    if line.is_oversized:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES} bytes", code="line_too_long")
    value = parse_json(line.data)
    if not isinstance(value, dict):
        raise RequestError(
            f"the line must be a JSON object, got {type(value).__name__}", code="invalid_json_line"
        )
    custom_id, method, url, body = (value.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError("custom_id must be a non-empty string", field="custom_id")
    if method != "POST":
        raise RequestError(f"method must be 'POST', got {method!r}", field="method")
    if not isinstance(url, str) or url not in BATCH_URLS:
        raise RequestError(
            f"url must be {' or '.join(BATCH_URLS)}, got {url!r}", field="url", code="invalid_url"
        )
    if not isinstance(body, dict):
        raise RequestError("body must be a JSON object", field="body")
    if body.get("stream"):
        raise RequestError("stream must be false: a batch job writes whole answers", field="stream")
    return BatchLine(custom_id, url, body)


def as_object(line: RawLine) -> dict[str, object] | None:
    """The line as a JSON object, or None when it is not one.

    More lenient than `parse_line` (NaN and repeated keys pass), so that a line refused by it still keeps its
    custom_id, and about as fast as the disk.
    """
    try:
        value = json.loads(line.data.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
