"""What may be switched when a built engine is loaded, and what a running one tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .speculate.config import SpeculationConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What may be switched when a built engine is loaded; None takes the engine's own limit.

    `kv_cache_bytes` sizes the KV pages of this process, those of a draft model included. `check_invariants` verifies
    the bookkeeping after every step (tests); when idle it is always verified. `speculation` None: nothing is drafted
    but what a form forces. Raises `ConfigError` naming a field of a wrong type or below 1.
    """

    enable_prefix_caching: bool = True
    max_batch_size: int | None = None
    max_step_tokens: int | None = None
    max_chunk_tokens: int | None = None
    kv_cache_bytes: int | None = None
    num_threads: int | None = None
    check_invariants: bool = False
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.speculation, SpeculationConfig | None):
            raise ConfigError(f"speculation must be a SpeculationConfig, got {self.speculation!r}")
        for name in ("enable_prefix_caching", "check_invariants"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in (
            "max_batch_size",
            "max_step_tokens",
            "max_chunk_tokens",
            "kv_cache_bytes",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                unit = " (bytes)" if name == "kv_cache_bytes" else ""
                raise ConfigError(
                    f"{name} must be an integer of at least 1{unit}, got {value!r}; leave it out for the engine's own"
                )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges now, and totals since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int  # of the drafted ones
    num_finished: dict[str, int]  # choices, by finish reason


def within(name: str, wanted: int | None, built: int) -> int:
    """`wanted`, or `built` where it is None. Raises `ConfigError` above `built`."""
    if wanted is not None and wanted > built:
        raise ConfigError(
            f"{name}: {wanted} is above {built}, which the engine was built for; lower it or build again"
        )
    return built if wanted is None else wanted
