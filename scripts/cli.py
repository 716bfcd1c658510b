"""`pelton`: the command group. Each command's module is imported when it is used."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from .. import __version__
from ..errors import PeltonError
from ..interrupts import held_interrupts, ignore_interrupts
from .huge_pages import restart_with_huge_pages
from .standard_streams import open_standard_streams

_COMMANDS = {
    "build": "compile a checkpoint into a bundle",
    "serve": "serve a bundle over HTTP, OpenAI-compatible",
    "batch": "run a file of requests through a bundle, resumable",
    "generate": "generate text in the terminal",
    "bench": "measure a bundle's latency, throughput and memory",
    "inspect": "show what a bundle holds, and verify it",
    "train-drafter": "train heads that guess a model's tokens, for build --drafter",
}
# Those that run an engine: they restart themselves with huge pages for its activations.
_ENGINE_COMMANDS = frozenset({"serve", "batch", "generate", "bench"})


class _Commands(click.Group):
    """Commands by name, each in the module of its name as `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with held_interrupts():
            command: Any = import_module(f".{cmd_name.replace('-', '_')}", __package__).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PeltonError as error:
            click.echo(f"pelton: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            ignore_interrupts()
            click.echo("pelton: interrupted", err=True)
            sys.exit(130)
        except BrokenPipeError:
            # The reader of our output went away (`| head`): nothing is left to say to it.
            _discard_output()
            sys.exit(1)
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            click.echo(f"pelton: {where}{error.strerror or error}", err=True)
            _discard_output()
            sys.exit(2)


def _discard_output() -> None:
    """What is still buffered cannot be written either; trying at exit would end in a traceback and status 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pelton")
def main() -> None:
    """Compile language models ahead of time and serve them."""


def entry() -> None:
    """What the console script runs."""
    open_standard_streams()
    if sys.argv[1:2] and sys.argv[1] in _ENGINE_COMMANDS:
        restart_with_huge_pages()
    main()


if __name__ == "__main__":
    entry()
