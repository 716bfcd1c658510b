"""The outermost layer: every request has an id, and no exception leaves as a traceback or a bare close."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import EngineError
from .streaming import error_response

_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")

_log = logging.getLogger(__name__)


class RequestBoundary:
    """Puts the id into `scope["state"]` and the `x-request-id` header. A client may choose its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request %s: internal error", request_id)
            if not is_started:
                error = EngineError(f"internal error; the server's log has it under request id {request_id}")
                await error_response(error)(scope, receive, send_with_id)


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_ID.fullmatch(value):
            return str(value, "ascii")
    return None
