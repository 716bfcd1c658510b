"""`pelton serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import PeltonError
from ..interrupts import held_interrupts
from ..runtime.tool_calls import REASONING_FORMATS, TOOL_FORMATS
from .engine_options import chat_template_option, engine_config, engine_options
from .option_types import FiniteFloat, NonEmptyText

_KEY_VARIABLE = "PELTON_API_KEY"
_SWITCH_SECONDS = 0.0005
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command("serve")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port."
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar=_KEY_VARIABLE,
    help="Key that clients must send; repeat for several. The environment keeps it out of the process list.",
)
@click.option(
    "--served-model-name",
    "model_names",
    multiple=True,
    type=NonEmptyText(),
    help="Name that clients send as `model`; repeat for several.  [default: the bundle's name]",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(0),
    default=1024,
    show_default=True,
    help="Choices that may wait for a place in the batch; more are refused with 503.",
)
@click.option(
    "--drain-seconds",
    type=FiniteFloat(0),
    default=30.0,
    show_default=True,
    help="What running requests get to end after SIGTERM.",
)
@click.option(
    "--hang-seconds",
    type=FiniteFloat(1),
    default=60.0,
    show_default=True,
    help="A step longer than this is a hang: clients get an error and /health is 503.",
)
@click.option(
    "--max-body-mib",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Largest request body; a larger one is refused with 413.",
)
@chat_template_option
@click.option(
    "--tool-call-parser",
    type=click.Choice(["auto", "none", *TOOL_FORMATS]),
    default="auto",
    show_default=True,
    help="How the model writes calls of tools; auto tells it from the chat template.",
)
@click.option(
    "--reasoning-parser",
    type=click.Choice(["auto", "none", *REASONING_FORMATS]),
    default="auto",
    show_default=True,
    help="How the model marks its reasoning; auto tells it from the chat template.",
)
@engine_options
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def command(
    engine: Path,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    model_names: tuple[str, ...],
    max_waiting: int,
    drain_seconds: float,
    hang_seconds: float,
    max_body_mib: int,
    chat_template: str | None,
    tool_call_parser: str,
    reasoning_parser: str,
    log_level: str,
    **options: Any,
) -> None:
    """Serve the bundle ENGINE over HTTP, as the OpenAI API.

    SIGTERM or Ctrl-C stops taking requests and lets the running ones end; a second one quits at once.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with held_interrupts():
        from ..runtime.load import load_engine
        from ..runtime.server.gateway import GatewayConfig
        from ..runtime.server.serving import ServerConfig, bind, run_server

    if not all(api_keys) or (_KEY_VARIABLE in os.environ and not api_keys):
        raise PeltonError(f"--api-key or {_KEY_VARIABLE} is empty: set a key, or leave both out to need none")
    sock = bind(host, port)  # before the engine is loaded, which may take a while
    loaded = load_engine(engine, config=engine_config(**options), chat_template=chat_template)
    config = ServerConfig(
        model_names=model_names or (loaded.name,),
        api_keys=api_keys,
        gateway=GatewayConfig(
            max_waiting=max_waiting,
            drain_seconds=drain_seconds,
            hang_seconds=hang_seconds,
            max_body_bytes=max_body_mib * 2**20,
        ),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    # Reading forms is Python, in threads beside those of the loop and the engine, which give up the interpreter many
    # times a step and would wait out Python's 5 ms to get it back.
    sys.setswitchinterval(_SWITCH_SECONDS)
    # What is loaded stays: without it in the collector's sight a full collection is short.
    gc.collect()
    gc.freeze()

    def announce() -> None:
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"serving {', '.join(config.model_names)} on http://{shown}:{sock.getsockname()[1]}/v1")
        if not api_keys and host not in _LOOPBACK:
            click.echo("warning: no --api-key: whoever reaches this port can use the server", err=True)

    if not run_server(loaded, sock, config, announce):
        sys.exit(1)
