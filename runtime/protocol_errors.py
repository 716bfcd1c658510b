"""Errors as the OpenAI API shows them."""

from __future__ import annotations

from ..errors import OverloadedError, PeltonError, RequestError

_STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "unsupported_media_type": 415,
}


def error_reply(error: PeltonError) -> tuple[int, dict[str, object]]:
    """HTTP status and body. A `RequestError` is 400 unless its code has a status of its own."""
    if isinstance(error, RequestError):
        status = _STATUS_OF_CODE.get(error.code, 400)
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        return status, _body(str(error), kind, error.field, error.code)
    if isinstance(error, OverloadedError):
        return 503, _body(str(error), "overloaded_error", None, "overloaded")
    return 500, _body(str(error), "server_error", None, "engine_error")


def _body(message: str, kind: str, field: str | None, code: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
