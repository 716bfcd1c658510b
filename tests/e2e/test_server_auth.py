"""API keys: no way around them."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from pelton.runtime.server import auth
from pelton.runtime.server.app import create_app
from pelton.runtime.server.auth import PUBLIC_PATHS
from support.live_server import LiveServer, live_server
from support.tiny_model import scripted_engine

KEYS = ("first-key", "second-k\N{LATIN SMALL LETTER E WITH ACUTE}y")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(scripted_engine(), api_keys=KEYS) as running:
        yield running


def routes() -> list[str]:
    # The handlers are not called, so they need nothing to work with.
    app = create_app(None, None)  # type: ignore[arg-type]
    return [route.path.replace("{name:path}", "tiny") for route in app.routes if isinstance(route, Route)]


def ask(server: LiveServer, target: str, method: str = "GET", *headers: tuple[str, str]) -> int:
    """The status for a request target that goes out exactly as it is written."""
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", "Content-Length: 2"]
    lines += ["Content-Type: application/json", *(f"{name}: {value}" for name, value in headers)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n{}")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1])


def test_the_public_list_is_short() -> None:
    assert {"/health"} == PUBLIC_PATHS
    assert len(routes()) >= 6
    assert set(routes()) >= PUBLIC_PATHS


@pytest.mark.parametrize("path", routes())
@pytest.mark.parametrize("method", METHODS)
def test_sv_01_every_route_needs_the_key(server: LiveServer, path: str, method: str) -> None:
    is_public = path in PUBLIC_PATHS and method in ("GET", "HEAD")
    assert ask(server, path, method) == (200 if is_public else 401)
    if not is_public:
        assert ask(server, path, method, ("Authorization", "Bearer wrong")) == 401
        assert ask(server, path, method, ("Authorization", f"Bearer {KEYS[0]}")) != 401


@pytest.mark.parametrize(
    "target",
    [
        "//v1/completions",
        "/v1//completions",
        "/v1/../v1/completions",
        "/health/../v1/completions",
        "/health/../metrics",
        "/health/",
        "//health",
        "/health;x",
        "/health%2f..%2fmetrics",
        "/health/%2e%2e/metrics",
        "/HEALTH",
        "/v1/completions/",
        "/v1/completions?key=first-key",
        "/v1%2fcompletions",
        "/v2/completions",
        "/completions",
        "/inference/v1/completions",
        "http://x/v1/models",
        "http://health/v1/models",
        "/",
        "/nowhere",
        "/docs",
        "/openapi.json",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_sv_01_no_spelling_of_a_path_goes_around(server: LiveServer, target: str, method: str) -> None:
    assert ask(server, target, method) == 401


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "first-key",
        "Basic first-key",
        "Bearer first-ke",
        "Bearer first-key2",
        "Bearer FIRST-KEY",
        "Bearer first-key second-kéy",
        "Bearer first-key,",
        "Bearerfirst-key",
    ],
)
def test_sv_01_wrong_credentials(server: LiveServer, value: str) -> None:
    assert ask(server, "/v1/models", "GET", ("Authorization", value)) == 401


def test_sv_01_right_credentials(server: LiveServer) -> None:
    for key in KEYS:
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert ask(server, "/v1/models", "GET", ("authorization", f"{scheme} {key}")) == 200
    right = ("Authorization", f"Bearer {KEYS[0]}")
    assert ask(server, "/v1/models", "GET", right, ("Authorization", "Bearer wrong")) == 401


def test_sv_01_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared, by `hmac.compare_digest`, on digests of one length."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return hmac.compare_digest(given, known)

    class Spy:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(auth, "hmac", Spy)
    gate = auth.ApiKeyGate(None, ["one", "two", "three"])  # type: ignore[arg-type]
    scope: dict[str, Any] = {"headers": [(b"authorization", b"Bearer one")]}
    assert gate._has_key(scope)
    assert len(compared) == 3
    assert {len(value) for pair in compared for value in pair} == {32}


def test_a_refusal_says_how_to_authenticate(server: LiveServer) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["x-request-id"]


def test_without_keys_the_server_is_open() -> None:
    with live_server(scripted_engine()) as server:
        assert ask(server, "/v1/models") == 200
