"""`pelton generate`: text in the terminal, streamed; with `--chat` a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..compile.bundle import read_manifest
from ..errors import PeltonError
from ..interrupts import held_interrupts
from .engine_options import chat_template_option, engine_config, engine_options
from .option_types import FiniteFloat

if TYPE_CHECKING:
    from ..runtime.llm import LLM
    from ..runtime.outputs import Delta
    from ..runtime.request import SamplingParams

_DEFAULT_MAX_TOKENS = 256
_CHAT_COMMANDS = (
    "/reset forgets the conversation, /exit ends it; a message that begins with // is sent with one /"
)


@click.command(name="generate")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option(
    "--chat", is_flag=True, help="Treat PROMPT as a user's message; without PROMPT, hold a conversation."
)
@click.option("--system", help="System message of the conversation (with --chat).")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help=f"Tokens of an answer.  [default: {_DEFAULT_MAX_TOKENS}, or what the context has left]",
)
@click.option("--temperature", default=0.0, show_default=True, type=FiniteFloat(), help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=FiniteFloat())
@click.option("--top-k", default=0, show_default=True, type=int, help="0: off.")
@click.option("--seed", type=int, help="Repeatable sampling.")
@click.option("--stop", multiple=True, help="Text that ends the answer; repeat for several.")
@chat_template_option
@engine_options
def command(
    engine: Path,
    prompt: str | None,
    chat: bool,
    system: str | None,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    chat_template: str | None,
    **options: Any,
) -> None:
    """Generate text from the bundle ENGINE.

    PROMPT is continued; if it is left out or `-`, it is read from standard input, without the last newline. With --chat
    and no PROMPT, on a terminal, each line you type is a message; Ctrl-D or /exit ends the conversation, /reset
    forgets it, and Ctrl-C ends an answer.
    """
    with held_interrupts():
        from ..runtime.llm import LLM
        from ..runtime.request import SamplingParams

    if system is not None and not chat:
        raise PeltonError("--system needs --chat")
    if chat_template is not None and not chat:
        raise PeltonError("--chat-template needs --chat")
    max_model_len = read_manifest(engine).limits.max_model_len
    if max_tokens is not None and max_tokens >= max_model_len:
        raise PeltonError(
            f"--max-tokens: the context of {engine} holds {max_model_len} tokens, prompt and answer together; "
            f"ask for {max_model_len - 1} at most"
        )
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    config = engine_config(**options)
    if prompt == "-" or (prompt is None and not (chat and sys.stdin.isatty())):
        prompt = sys.stdin.read().removesuffix("\n")
    settings = {name: getattr(config, name) for name in config.__slots__}
    with LLM(engine, chat_template=chat_template, **settings) as llm:
        history = [{"role": "system", "content": system}] if system is not None else []
        if chat and prompt is None:
            _converse(llm, history, params)
        elif chat:
            message = {"role": "user", "content": prompt}
            _answer(llm, llm.tokenizer.encode_chat([*history, message]), params)
        else:
            assert prompt is not None
            _answer(llm, llm.tokenizer.encode(prompt), params)


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
        if message.startswith("/") and not message.startswith("//"):
            click.echo(f"{message.split()[0]} is no command: {_CHAT_COMMANDS}", err=True)
            continue
        if not message:
            continue
        message = message.removeprefix("/")
        turn = [*history, {"role": "user", "content": message}]
        try:
            answer = _answer(llm, llm.tokenizer.encode_chat(turn), params)
        except PeltonError as error:
            click.echo(f"{error}", err=True)
            continue
        except KeyboardInterrupt:
            click.echo()
            continue
        history[:] = [*turn, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, token_ids: list[int], params: SamplingParams) -> str:
    """Print the answer as it comes and return it. Raises what ended it, if that was an error.

    Without `max_tokens` it is as long as our default and the context let it be.
    """
    if params.max_tokens is None:
        room = llm.limits.max_model_len - len(token_ids)
        params = replace(params, max_tokens=min(_DEFAULT_MAX_TOKENS, max(room, 1)))
    return _show(llm.stream(token_ids, params))


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
