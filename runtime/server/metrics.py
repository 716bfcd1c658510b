"""Prometheus metrics: the engine's counters, and latencies as clients see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..outputs import FINISH_REASONS, Delta

if TYPE_CHECKING:
    from ..engine import EngineStats

_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LATENCY_BUCKETS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """A registry of its own, so that a process may hold several servers."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.time_to_first_token = Histogram(
            "pelton_time_to_first_token_seconds",
            "From the arrival of a call to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self.time_per_output_token = Histogram(
            "pelton_time_per_output_token_seconds",
            "Mean time between the tokens of a choice after its first.",
            buckets=_TPOT_BUCKETS,
            registry=self._registry,
        )
        self.call_latency = Histogram(
            "pelton_call_latency_seconds",
            "From the arrival of a call to the end of its answer, for calls answered in full.",
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class CallTimer:
    """Observes one call, from its arrival (a `time.monotonic()` value) on."""

    def __init__(self, metrics: ServerMetrics, arrival_time: float) -> None:
        self._metrics = metrics
        self._arrival_time = arrival_time
        self._first_token_times: dict[tuple[str, int], float] = {}

    def observe(self, delta: Delta) -> None:
        now = time.monotonic()
        choice = (delta.request_id, delta.index)
        if delta.token_ids and choice not in self._first_token_times:
            if not self._first_token_times:
                self._metrics.time_to_first_token.observe(now - self._arrival_time)
            self._first_token_times[choice] = now
        if (
            delta.finish_reason is not None
            and delta.num_output_tokens > 1
            and choice in self._first_token_times
        ):
            elapsed = now - self._first_token_times[choice]
            self._metrics.time_per_output_token.observe(elapsed / (delta.num_output_tokens - 1))

    def finish(self) -> None:
        self._metrics.call_latency.observe(time.monotonic() - self._arrival_time)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("requests_running", "Choices in the batch.", stats.num_running),
            ("requests_waiting", "Choices waiting for a place in the batch.", stats.num_waiting),
            ("kv_cache_blocks", "Blocks of the KV cache.", stats.num_blocks),
            ("kv_cache_blocks_used", "Blocks that running choices hold.", stats.num_used_blocks),
            (
                "kv_cache_usage_ratio",
                "Part of the KV cache in use.",
                stats.num_used_blocks / stats.num_blocks,
            ),
        ):
            yield GaugeMetricFamily(f"pelton_{name}", text, value)
        for name, text, value in (
            ("steps", "Engine steps.", stats.num_steps),
            ("prompt_tokens", "Tokens of admitted prompts.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens sampled.", stats.num_output_tokens),
            ("preemptions", "Choices set back to be computed again.", stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                stats.num_prefix_queried_tokens,
            ),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_prefix_hit_tokens),
            ("draft_tokens", "Tokens drafted and verified.", stats.num_draft_tokens),
            ("accepted_tokens", "Drafted tokens that were accepted.", stats.num_accepted_tokens),
        ):
            yield CounterMetricFamily(f"pelton_{name}", text, value)
        finished = CounterMetricFamily(
            "pelton_requests_finished", "Choices ended, by reason.", labels=["reason"]
        )
        # Each reason from the start: a rate over a series that is not there yet misses its first increase.
        for reason, count in (dict.fromkeys(FINISH_REASONS, 0) | stats.num_finished).items():
            finished.add_metric([reason], count)
        yield finished
