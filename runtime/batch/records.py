"""The lines of the output: the OpenAI Batch result format."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_RECORD_ID = "batch_req_{job_id}_{line}"

# U+2028, U+2029 and U+0085 end a line for some readers (Python's `str.splitlines`), and a lone surrogate,
# which JSON input can hold, has no UTF-8 form.
_UNSAFE = re.compile("[\u0085\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Names one line of one job; every id in a record comes from it, so equal jobs give equal records."""

    job_id: str
    line: int

    @property
    def record_id(self) -> str:
        return _RECORD_ID.format(job_id=self.job_id, line=self.line)

    @property
    def call_id(self) -> str:
        return f"{self.job_id}-{self.line}"


def answer_record(key: RecordKey, custom_id: str, body: dict[str, object]) -> bytes:
    return _encode(key, custom_id, 200, body, None)


def error_record(key: RecordKey, custom_id: str | None, status: int, body: dict[str, object]) -> bytes:
    """`body` is the server's error object. `error` repeats its members with the line number: it is null for
    answers and never for failures. `custom_id` is null where the line has none that can be read.
    """
    details = body.get("error")
    error = {"line": key.line, **(details if isinstance(details, dict) else {})}
    return _encode(key, custom_id, status, body, error)


def _encode(
    key: RecordKey, custom_id: str | None, status: int, body: object, error: dict[str, object] | None
) -> bytes:
    response = {"status_code": status, "request_id": key.call_id, "body": body}
    record = {"id": key.record_id, "custom_id": custom_id, "response": response, "error": error}
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a resumed job needs of a record: which line it answers, and whether with an error."""

    key: RecordKey
    is_error: bool


def read_record(data: bytes) -> RecordHead | None:
    """None when `data` is not a whole record: torn, or not written by a batch job."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not data.endswith(b"\n"):
        return None
    match = re.fullmatch(r"batch_req_([0-9a-f]+)_([0-9]+)", str(record.get("id")))
    if match is None or "error" not in record:
        return None
    return RecordHead(RecordKey(match[1], int(match[2])), record["error"] is not None)
