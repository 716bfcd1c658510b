"""The options of every command that loads an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from ..errors import BundleError, ConfigError, PeltonError
from ..interrupts import held_interrupts
from ..runtime.engine_config import EngineConfig
from ..runtime.speculate.config import SpeculationConfig, SpeculationMethod
from .sizes import MEMORY

_Function = TypeVar("_Function", bound=Callable[..., object])

_OPTIONS = (
    click.option("--max-batch-size", type=click.IntRange(1), help="At most so many sequences in a step."),
    click.option("--max-step-tokens", type=click.IntRange(1), help="At most so many tokens in a step."),
    click.option(
        "--max-chunk-tokens", type=click.IntRange(1), help="Prompt tokens of one sequence in a step."
    ),
    click.option("--kv-cache-memory", type=MEMORY, help="Memory of the KV pages.  [default: the bundle's]"),
    click.option("--threads", type=click.IntRange(1), help="Threads of a CPU engine."),
    click.option("--no-prefix-caching", is_flag=True, help="Compute every prompt in full."),
    click.option(
        "--speculate",
        type=click.Choice(get_args(SpeculationMethod)),
        help="Who drafts tokens that the model verifies; the tokens are the same without.  [default: nobody]",
    ),
    click.option(
        "--num-draft-tokens",
        type=click.IntRange(1),
        help="At most so many drafted tokens of a sequence in a step.  [default: the method's]",
    ),
    click.option(
        "--draft-model",
        type=click.Path(path_type=Path),
        help="Bundle of the draft model (--speculate draft-model).",
    ),
    click.option(
        "--no-adaptive-drafting",
        is_flag=True,
        help="Draft the full number of tokens, also where it does not pay.",
    ),
)


def _read_template(context: click.Context, option: click.Parameter, path: Path | None) -> str | None:
    """The source in a file, which must be a chat template."""
    if path is None:
        return None
    with held_interrupts():
        from ..runtime.chat_template import replacement_template
    try:
        source = path.read_text("utf-8")
        replacement_template(source, {})
    except (OSError, UnicodeDecodeError, BundleError) as error:
        raise PeltonError(f"--chat-template {path}: {error}") from None
    return source


chat_template_option = click.option(
    "--chat-template",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    callback=_read_template,
    help="Jinja file that replaces the model's chat template.",
)
"""Its source."""


def engine_options(function: _Function) -> _Function:
    """Add the options to a command, which passes them on to `engine_config` as they are."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def engine_config(
    *,
    kv_cache_memory: int | None,
    threads: int | None,
    no_prefix_caching: bool,
    speculate: SpeculationMethod | None,
    num_draft_tokens: int | None,
    draft_model: Path | None,
    no_adaptive_drafting: bool,
    **limits: Any,
) -> EngineConfig:
    """Raises `ConfigError` where options do not go together."""
    speculation = None
    if speculate is not None:
        speculation = SpeculationConfig(
            speculate, num_draft_tokens, draft_model, is_adaptive=not no_adaptive_drafting
        )
    else:
        given = {
            "--num-draft-tokens": num_draft_tokens is not None,
            "--draft-model": draft_model is not None,
            "--no-adaptive-drafting": no_adaptive_drafting,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise ConfigError(f"{name} needs --speculate")
    return EngineConfig(
        enable_prefix_caching=not no_prefix_caching,
        kv_cache_bytes=kv_cache_memory,
        num_threads=threads,
        speculation=speculation,
        **limits,
    )


def engine_arguments(config: EngineConfig) -> list[str]:
    """The command-line words that `engine_config` turns into `config` again."""
    values: dict[str, object] = {
        "--max-batch-size": config.max_batch_size,
        "--max-step-tokens": config.max_step_tokens,
        "--max-chunk-tokens": config.max_chunk_tokens,
        "--kv-cache-memory": config.kv_cache_bytes,
        "--threads": config.num_threads,
    }
    speculation = config.speculation
    if speculation is not None:
        values |= {
            "--speculate": speculation.method,
            "--num-draft-tokens": speculation.num_draft_tokens,
            "--draft-model": speculation.draft_bundle,
        }
    words = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    flags = {
        "--no-prefix-caching": not config.enable_prefix_caching,
        "--no-adaptive-drafting": speculation is not None and not speculation.is_adaptive,
    }
    return [*words, *(name for name, is_set in flags.items() if is_set)]
