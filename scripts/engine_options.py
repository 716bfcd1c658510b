"""The options of every command that loads an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .sizes import MEMORY

if TYPE_CHECKING:
    from ..runtime.engine import EngineConfig

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
)


def engine_options(function: _Function) -> _Function:
    """Add the options to a command, which passes them on to `engine_config` as they are."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def engine_config(
    *, kv_cache_memory: int | None, threads: int | None, no_prefix_caching: bool, **limits: Any
) -> EngineConfig:
    from ..runtime.engine import EngineConfig

    return EngineConfig(
        enable_prefix_caching=not no_prefix_caching,
        kv_cache_bytes=kv_cache_memory,
        num_threads=threads,
        **limits,
    )


def engine_arguments(config: EngineConfig) -> list[str]:
    """The command-line words that `engine_config` turns into `config` again."""
    values = {
        "--max-batch-size": config.max_batch_size,
        "--max-step-tokens": config.max_step_tokens,
        "--max-chunk-tokens": config.max_chunk_tokens,
        "--kv-cache-memory": config.kv_cache_bytes,
        "--threads": config.num_threads,
    }
    words = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return words if config.enable_prefix_caching else [*words, "--no-prefix-caching"]
