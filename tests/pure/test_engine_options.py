"""Options of an engine on the command line: what they mean, and that they can be written down again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pelton.errors import ConfigError
from pelton.runtime.engine_config import EngineConfig
from pelton.runtime.speculate.config import SpeculationConfig
from pelton.scripts.engine_options import engine_arguments, engine_config, engine_options


def read(*words: str) -> EngineConfig:
    made: list[EngineConfig] = []

    @click.command()
    @engine_options
    def command(**options: Any) -> None:
        made.append(engine_config(**options))

    result = CliRunner().invoke(command, list(words))
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return made[0]


CONFIGS = [
    EngineConfig(),
    EngineConfig(enable_prefix_caching=False, max_batch_size=3, max_step_tokens=40, max_chunk_tokens=8),
    EngineConfig(kv_cache_bytes=12345678, num_threads=2),
    EngineConfig(speculation=SpeculationConfig("ngram")),
    EngineConfig(speculation=SpeculationConfig("suffix", 7, is_adaptive=False)),
    EngineConfig(speculation=SpeculationConfig("draft-model", draft_bundle=Path("artifacts/small"))),
    EngineConfig(speculation=SpeculationConfig("heads", 3), max_batch_size=8),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_written_down_is_read_as_the_same(config: EngineConfig) -> None:
    assert read(*engine_arguments(config)) == config


@pytest.mark.parametrize(
    "words", [("--num-draft-tokens", "3"), ("--draft-model", "x"), ("--no-adaptive-drafting",)]
)
def test_options_of_speculation_need_it(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{words[0]} needs --speculate"):
        read(*words)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_bundle: method ngram uses no draft model"):
        read("--speculate", "ngram", "--draft-model", "x")
    with pytest.raises(ConfigError, match="draft_bundle: method draft-model needs"):
        read("--speculate", "draft-model")
