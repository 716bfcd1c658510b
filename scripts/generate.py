"""`pelton generate`: text in the terminal, streamed; with `--chat` a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import PeltonError
from .engine_options import engine_config, engine_options

if TYPE_CHECKING:
    from ..runtime.llm import LLM
    from ..runtime.outputs import Delta
    from ..runtime.request import SamplingParams


@click.command(name="generate")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option(
    "--chat", is_flag=True, help="Treat PROMPT as a user's message; without PROMPT, hold a conversation."
)
@click.option("--system", help="System message of the conversation (with --chat).")
@click.option(
    "--max-tokens", default=256, show_default=True, type=click.IntRange(1), help="Tokens of an answer."
)
@click.option("--temperature", default=0.0, show_default=True, type=float, help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=float)
@click.option("--top-k", default=0, show_default=True, type=int, help="0: off.")
@click.option("--seed", type=int, help="Repeatable sampling.")
@click.option("--stop", multiple=True, help="Text that ends the answer; repeat for several.")
@engine_options
def command(
    engine: Path,
    prompt: str | None,
    chat: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Generate text from the bundle ENGINE.

    PROMPT is continued; if it is left out or `-`, it is read from standard input, without the last newline. With --chat
    and no PROMPT, on a terminal, each line you type is a message; Ctrl-D or /exit ends the conversation, /reset
    forgets it.
    """
    from ..runtime.llm import LLM
    from ..runtime.request import SamplingParams

    if system is not None and not chat:
        raise PeltonError("--system needs --chat")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    config = engine_config(**options)
    if prompt == "-" or (prompt is None and not (chat and sys.stdin.isatty())):
        prompt = sys.stdin.read().removesuffix("\n")
    with LLM(engine, **{name: getattr(config, name) for name in config.__slots__}) as llm:
        history = [{"role": "system", "content": system}] if system is not None else []
        if chat and prompt is None:
            _converse(llm, history, params)
        elif chat:
            _show(llm.stream_chat([*history, {"role": "user", "content": prompt}], params))
        else:
            assert prompt is not None
            _show(llm.stream(prompt, params))


def _converse(llm: LLM, history: list[dict[str, str]], params: SamplingParams) -> None:
    start = list(history)
    while True:
        try:
            message = input("> ").strip()
        except EOFError:
            click.echo()
            return
        if message == "/exit":
            return
        if message == "/reset":
            history[:] = start
            continue
        if not message:
            continue
        turn = [*history, {"role": "user", "content": message}]
        try:
            answer = _show(llm.stream_chat(turn, params))
        except PeltonError as error:
            click.echo(f"{error}", err=True)
            continue
        except KeyboardInterrupt:
            click.echo()
            continue
        history[:] = [*turn, {"role": "assistant", "content": answer}]


def _show(deltas: Iterator[Delta]) -> str:
    """Print text as it comes and return it whole. Raises what ended it, if that was an error."""
    pieces: list[str] = []
    for delta in deltas:
        click.echo(delta.text, nl=False)
        sys.stdout.flush()
        pieces.append(delta.text)
        if delta.error is not None:
            click.echo()
            raise delta.error
    click.echo()
    return "".join(pieces)
