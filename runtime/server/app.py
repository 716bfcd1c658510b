"""The routes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...errors import EngineError, PeltonError, RequestError
from ..protocol import CHAT_COMPLETIONS, COMPLETIONS
from .auth import ApiKeyGate
from .boundary import RequestBoundary
from .gateway import Gateway
from .metrics import ServerMetrics
from .streaming import CallResponse, error_response, json_response

# Of a body that is too large, what is read before the answer: clients that send all of it before they look for one
# would find the connection reset.
_DISCARDED_BYTES = 64 << 20
_DISCARDING_SECONDS = 10.0
_HTTP_ERRORS = {404: ("not_found", "no route"), 405: ("method_not_allowed", "method not allowed on")}


def create_app(gateway: Gateway, metrics: ServerMetrics) -> Starlette:
    """The routes alone; `guard` puts the outer layers around them."""
    created = int(time.time())

    async def completions(request: Request) -> Response:
        return await _answer(request, COMPLETIONS, gateway)

    async def chat_completions(request: Request) -> Response:
        return await _answer(request, CHAT_COMPLETIONS, gateway)

    async def models(request: Request) -> Response:
        names = gateway.context.model_names
        return json_response(
            200, {"object": "list", "data": [_model(name, gateway, created) for name in names]}
        )

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in gateway.context.model_names:
            raise RequestError(
                f"the model {name[:128]!r} is not served here", field="model", code="model_not_found"
            )
        return json_response(200, _model(name, gateway, created))

    async def health(request: Request) -> Response:
        status = gateway.status
        return json_response(200 if status == "ok" else 503, {"status": status})

    async def prometheus(request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            Route(COMPLETIONS, completions, methods=["POST"]),
            Route(CHAT_COMPLETIONS, chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", prometheus),
        ],
        exception_handlers={PeltonError: _on_pelton_error, HTTPException: _on_http_error, Exception: _on_bug},
    )
    app.router.redirect_slashes = False
    return app


def guard(app: ASGIApp, api_keys: Sequence[str]) -> ASGIApp:
    """`app` behind the API keys, every request with an id."""
    return RequestBoundary(ApiKeyGate(app, api_keys))


async def _answer(request: Request, endpoint: str, gateway: Gateway) -> Response:
    arrival_time = time.monotonic()
    try:
        data = await _read_body(request, gateway.config.max_body_bytes)
    except ClientDisconnect:
        return Response()
    call = await gateway.parse(endpoint, data, uuid.uuid4().hex)
    return CallResponse(call, gateway, request.state.request_id, arrival_time)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    # A browser sends other types than this one to any host without asking it first.
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError("send the body as 'content-type: application/json'", code="unsupported_media_type")
    too_large = RequestError(f"the body is larger than {max_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    # Who asks for leave sends nothing before it is told to.
    is_asking = request.headers.get("expect", "").lower() == "100-continue"
    if size > max_bytes + (0 if is_asking else _DISCARDED_BYTES):
        raise too_large
    chunks = request.stream()
    if size <= max_bytes:
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            if len(data) > max_bytes:
                break
        else:
            return bytes(data)
    await _discard(chunks)
    raise too_large


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    """Read what a client still sends, within bounds."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARDING_SECONDS):
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > _DISCARDED_BYTES:
                    return


def _model(name: str, gateway: Gateway, created: int) -> dict[str, object]:
    limits = gateway.context.limits
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pelton",
        "max_model_len": limits.max_model_len,
        "limits": {
            "max_batch_size": limits.max_batch_size,
            "max_step_tokens": limits.max_step_tokens,
            "kv_cache_tokens": limits.num_blocks * limits.block_size,
            "vocab_size": gateway.context.vocab_size,
            "max_body_bytes": gateway.config.max_body_bytes,
        },
    }


async def _on_pelton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PeltonError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, reason = _HTTP_ERRORS.get(error.status_code, ("bad_request", str(error.detail)))
    return error_response(RequestError(f"{reason} {request.method} {request.scope['path'][:200]}", code=code))


async def _on_bug(request: Request, error: Exception) -> Response:
    """The boundary logs it: Starlette raises the exception again once this is sent."""
    return error_response(
        EngineError(f"internal error; the server's log has it under {request.state.request_id}")
    )
