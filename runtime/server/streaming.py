"""The answer of a call over HTTP: one JSON object, or server-sent events as the OpenAI API sends them.

A response begins with the first delta, so whatever fails before it has a status of its own. What fails later
is one `data: {"error": ...}` frame; `data: [DONE]` ends every stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import EngineError, PeltonError
from ..protocol import Call, Reply, dump_json, error_reply
from .gateway import CallStream, ClientGone, Gateway

Built = TypeVar("Built")

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the frames back
]
_DONE = b"data: [DONE]\n\n"
RETRY_AFTER_SECONDS = 1

_log = logging.getLogger(__name__)


def json_response(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(body), status, headers, media_type="application/json")


def error_response(error: PeltonError) -> Response:
    status, body = error_reply(error)
    headers = {}
    if status == 503:
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    elif status == 413:
        headers["connection"] = "close"  # not all of the body may have been read
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(status, body, headers)


class CallResponse(Response):
    """Runs `call` and sends its answer. The engine lets go of the call however this ends."""

    def __init__(self, call: Call, gateway: Gateway, request_id: str, arrival_time: float) -> None:
        super().__init__()
        self._call = call
        self._gateway = gateway
        self._request_id = request_id
        self._arrival_time = arrival_time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(self._call, self._gateway.context, int(time.time()))
        try:
            stream = self._gateway.open(self._call, self._arrival_time)
        except PeltonError as error:
            await error_response(error)(scope, receive, send)
            return
        watcher = asyncio.create_task(_watch_client(receive, stream))
        try:
            if self._call.stream:
                await self._send_events(stream, reply, scope, receive, send)
            else:
                response = await self._whole(stream, reply)
                await response(scope, receive, send)
        except ClientGone:
            _log.info("request %s: the client left", self._request_id)
        finally:
            watcher.cancel()
            stream.close(is_done=reply.is_done and reply.error is None)

    async def _whole(self, stream: CallStream, reply: Reply) -> Response:
        try:
            while not reply.is_done:
                await self._next_frames(stream, reply)
            if reply.error is not None:
                raise reply.error
            return await self._built(lambda: json_response(200, reply.body()))
        except PeltonError as error:
            return self._refuse(error)

    async def _send_events(
        self, stream: CallStream, reply: Reply, scope: Scope, receive: Receive, send: Send
    ) -> None:
        is_started = False
        last = _DONE
        try:
            while not reply.is_done:
                frames = await self._next_frames(stream, reply)
                if frames and not is_started:
                    is_started = True
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS}
                    )
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            if reply.error is not None:
                raise reply.error
        except PeltonError as error:
            refusal = self._refuse(error)
            if not is_started:
                await refusal(scope, receive, send)
                return
            last = b"data: " + bytes(refusal.body) + b"\n\n" + _DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _next_frames(self, stream: CallStream, reply: Reply) -> bytes:
        """The events of the next deltas. An error that they bring is left in `reply.error`."""
        deltas = await stream.take()

        def build() -> bytes:
            chunks = [chunk for delta in deltas for chunk in reply.feed(delta)]
            return b"".join(b"data: " + dump_json(chunk) + b"\n\n" for chunk in chunks)

        return await self._built(build)

    async def _built(self, build: Callable[[], Built]) -> Built:
        """Log-probabilities may be long, and are slow to write: beside the event loop."""
        try:
            return await self._gateway.build(build) if self._call.has_logprobs else build()
        except Exception as error:
            _log.exception("request %s: cannot build the answer", self._request_id)
            raise EngineError("the server failed to build the answer") from error

    def _refuse(self, error: PeltonError) -> Response:
        level = logging.ERROR if isinstance(error, EngineError) else logging.INFO
        _log.log(level, "request %s (%s): %s", self._request_id, self._call.call_id, error)
        return error_response(error)


async def _watch_client(receive: Receive, stream: CallStream) -> None:
    """Ends the call when the client closes its connection, whatever the call is waiting for."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.fail(ClientGone())
