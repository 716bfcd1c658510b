"""API keys: one gate before all routes, so that no route can be reached around it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import RequestError
from .streaming import error_response

PUBLIC_PATHS = frozenset({"/health"})
"""What load balancers ask without a key. Everything else, unknown paths too, needs one."""


class ApiKeyGate:
    """Passes requests on whose `Authorization: Bearer` key is one of `keys`; all, if there are none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or self._is_public(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = RequestError(
            "no valid API key; send the header 'Authorization: Bearer KEY'", code="invalid_api_key"
        )
        await error_response(refusal)(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in PUBLIC_PATHS

    def _has_key(self, scope: Scope) -> bool:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, in full: the time taken tells nothing about any of them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
