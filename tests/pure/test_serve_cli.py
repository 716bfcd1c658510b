"""`pelton serve`: what the command checks before it serves, and that every option arrives."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pelton.errors import BundleError, PeltonError
from pelton.runtime import load
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.server import serving
from pelton.runtime.server.gateway import GatewayConfig
from pelton.runtime.server.serving import ServerConfig
from pelton.scripts.serve import command
from support.tiny_model import scripted_engine


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(command, ["bundle", "--port", "0", *arguments], env=environment)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would have loaded and served."""
    seen: dict[str, Any] = {"ends_well": True}

    def load_engine(path: Path, config: EngineConfig, chat_template: str | None) -> Engine:
        seen["engine_config"] = config
        seen["chat_template"] = chat_template
        return scripted_engine()

    def run_server(engine: Engine, sock: socket.socket, config: ServerConfig, on_ready: Any) -> bool:
        seen["server_config"] = config
        on_ready()
        sock.close()
        return bool(seen["ends_well"])

    monkeypatch.setattr(load, "load_engine", load_engine)
    monkeypatch.setattr(serving, "run_server", run_server)
    return seen


def test_defaults(started: dict[str, Any]) -> None:
    result = invoke()
    assert result.exit_code == 0
    assert result.stdout.startswith("serving tiny on http://127.0.0.1:")
    assert result.stdout.endswith("/v1\n")
    assert started["server_config"] == ServerConfig(("tiny",), (), GatewayConfig())
    assert started["engine_config"] == EngineConfig()


def test_the_http_parser_is_the_same_wherever_it_runs() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = serving._uvicorn_config(app)
    config.load()
    assert config.http_protocol_class.__name__ == "H11Protocol"


def test_every_option_arrives(started: dict[str, Any], tmp_path: Path) -> None:
    options = """
        --api-key k1 --api-key k2 --served-model-name a --served-model-name b
        --max-waiting 5 --drain-seconds 2 --hang-seconds 3 --max-body-mib 4
        --max-batch-size 6 --no-prefix-caching --tool-call-parser hermes --reasoning-parser none
    """
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }} é", "utf-8")
    result = invoke(*shlex.split(options), "--chat-template", str(template))
    assert result.exit_code == 0, result.output
    assert started["server_config"] == ServerConfig(
        ("a", "b"),
        ("k1", "k2"),
        GatewayConfig(max_waiting=5, drain_seconds=2.0, hang_seconds=3.0, max_body_bytes=4 * 2**20),
        tool_call_parser="hermes",
        reasoning_parser="none",
    )
    assert started["chat_template"] == "{{ messages[0].content }} é"
    assert started["engine_config"] == EngineConfig(enable_prefix_caching=False, max_batch_size=6)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--drain-seconds", "nan"),
        ("--drain-seconds", "inf"),
        ("--hang-seconds", "nan"),
        ("--hang-seconds", "inf"),
        ("--served-model-name", ""),
        ("--served-model-name", " "),
        ("--tool-call-parser", "gpt"),
        ("--reasoning-parser", "gpt"),
        ("--chat-template", "no-such-file"),
    ],
)
def test_what_is_no_value_is_refused(started: dict[str, Any], option: str, value: str) -> None:
    result = invoke(option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert "server_config" not in started


def test_a_cut_end_has_an_exit_status(started: dict[str, Any]) -> None:
    started["ends_well"] = False
    assert invoke().exit_code == 1


def test_key_from_the_environment(started: dict[str, Any]) -> None:
    invoke(PELTON_API_KEY="secret")
    assert started["server_config"].api_keys == ("secret",)


@pytest.mark.parametrize(
    ("arguments", "environment"), [(["--api-key", ""], {}), ([], {"PELTON_API_KEY": ""})]
)
def test_sv_01_an_empty_key_is_no_key(
    started: dict[str, Any], arguments: list[str], environment: dict[str, str]
) -> None:
    """An unset secret must not open the server."""
    result = invoke(*arguments, **environment)
    assert isinstance(result.exception, PeltonError)
    assert "empty" in str(result.exception)
    assert "server_config" not in started


def test_an_open_server_on_the_network_is_warned_of(started: dict[str, Any]) -> None:
    assert "--api-key" in invoke("--host", "0.0.0.0").stderr
    assert invoke("--host", "0.0.0.0", "--api-key", "k").stderr == ""
    assert invoke().stderr == ""


def test_a_port_in_use_is_found_before_the_engine_is_loaded(started: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("--port", str(port))
    assert isinstance(result.exception, PeltonError)
    assert f"port {port}" in str(result.exception)
    assert "engine_config" not in started


def test_a_host_that_does_not_exist(started: dict[str, Any]) -> None:
    result = invoke("--host", "no.such.host.invalid")
    assert isinstance(result.exception, PeltonError)
    assert "no.such.host.invalid" in str(result.exception)


def test_a_missing_bundle(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path / "nothing"), "--port", "0"])
    assert isinstance(result.exception, BundleError)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"{% for %}", "line 1"),
        (b"{{ greeting }}", "messages"),
        (b"\xff{{ messages }}", "utf-8"),
    ],
)
def test_a_file_that_is_no_chat_template_is_refused_before_the_engine_is_loaded(
    started: dict[str, Any], tmp_path: Path, source: bytes, reason: str
) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(source)
    result = invoke("--chat-template", str(file))
    assert isinstance(result.exception, PeltonError)
    assert str(result.exception).startswith(f"--chat-template {file}: ")
    assert reason in str(result.exception)
    assert "engine_config" not in started
