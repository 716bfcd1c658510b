"""The work that `pelton bench` measures."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..compile.bundle import read_manifest
from ..runtime.engine import Engine, EngineConfig
from ..runtime.executor_cpu import CpuExecutor
from ..runtime.load import load_engine
from ..runtime.request import Request, SamplingParams

TTFT_PROMPT_TOKENS = 512
TPOT_CONTEXT_TOKENS = 256
TPOT_NEW_TOKENS = 64
SHARED_REQUESTS, SHARED_TOKENS, SHARED_OWN_TOKENS, SHARED_NEW_TOKENS = 32, 400, 32, 16


@dataclass(frozen=True, slots=True)
class BenchConfig:
    repeats: int
    num_requests: int
    num_running: int
    num_new_tokens: int
    measure_start: bool
    baseline: Path | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from admission to the first token of all, to the end, and the tokens made."""

    first: float
    total: float
    num_output_tokens: int


@dataclass(slots=True)
class _Samples:
    """What each repeat measured."""

    single: list[Timing] = field(default_factory=list)
    prefill: list[Timing] = field(default_factory=list)
    many: list[Timing] = field(default_factory=list)
    shared: list[Timing] = field(default_factory=list)
    baseline: list[dict[str, float]] = field(default_factory=list)
    peak_memory: int = 0


def measure(bundle: Path, engine_config: EngineConfig, config: BenchConfig) -> dict[str, Any]:
    """Everything `pelton bench` reports, as JSON-ready numbers: medians over the repeats."""
    manifest = read_manifest(bundle)
    start = [_start_to_first_token(bundle) for _ in range(config.repeats)] if config.measure_start else []
    bandwidth = _read_bandwidth()
    weight_bytes = _step_weight_bytes(bundle)
    running = min(config.num_running, manifest.limits.max_batch_size)
    samples = _sample(bundle, replace(engine_config, max_batch_size=running), config)
    floor = weight_bytes / bandwidth
    tpot = median((t.total - t.first) / (t.num_output_tokens - 1) for t in samples.single)
    rates = [t.num_output_tokens / t.total for t in samples.many]
    report: dict[str, Any] = {
        "bundle": bundle.resolve().name,
        "model": manifest.model.source.rsplit("/", 1)[-1],
        "dtype": manifest.dtype,
        "num_running": running,
        "num_requests": config.num_requests,
        "repeats": config.repeats,
        "tpot_ms": _round(tpot * 1e3),
        "tpot_floor_ms": _round(floor * 1e3),
        "tpot_over_floor": _round(tpot / floor),
        "ttft_512_ms": _round(median(t.first for t in samples.prefill) * 1e3),
        "output_tokens_per_s": _round(median(rates)),
        "output_tokens_per_s_all": [_round(rate) for rate in rates],
        "shared_prefix_requests_per_s": _round(median(SHARED_REQUESTS / t.total for t in samples.shared)),
        "start_to_first_token_s": _round(median(start)) if start else None,
        "peak_memory_mib": round(samples.peak_memory / 2**20),
        "read_bandwidth_gb_per_s": _round(bandwidth / 1e9),
        "step_weight_mib": round(weight_bytes / 2**20),
    }
    if samples.baseline:
        names = samples.baseline[0]
        report["transformers"] = {name: _round(median(b[name] for b in samples.baseline)) for name in names}
        pairs = zip(rates, samples.baseline, strict=True)
        report["throughput_ratio"] = _round(median(rate / b["output_tokens_per_s"] for rate, b in pairs))
    return report


def _sample(bundle: Path, engine_config: EngineConfig, config: BenchConfig) -> _Samples:
    """The parts in turn, repeat by repeat, so that a drift of the machine touches all of them."""
    manifest = read_manifest(bundle)
    vocab = manifest.model.vocab_size
    samples = _Samples()
    engine = load_engine(bundle, engine_config)
    _run(engine, [_prompt(vocab, 64, seed=1)], 8)
    for repeat in range(config.repeats):
        one = _prompt(vocab, TPOT_CONTEXT_TOKENS, seed=100 + repeat)
        samples.single.append(_run(engine, [one], TPOT_NEW_TOKENS))
        long = _prompt(vocab, TTFT_PROMPT_TOKENS, seed=200 + repeat)
        samples.prefill.append(_run(engine, [long], 1))
        prompts = _prompts(vocab, config.num_requests, repeat)
        samples.many.append(_run(engine, prompts, config.num_new_tokens))
        common = _prompt(vocab, SHARED_TOKENS, seed=300 + repeat)
        own = [_prompt(vocab, SHARED_OWN_TOKENS, seed=1000 * repeat + i) for i in range(SHARED_REQUESTS)]
        samples.shared.append(_run(engine, [common + o for o in own], SHARED_NEW_TOKENS))
        if not samples.baseline:  # transformers in this process would count as ours
            samples.peak_memory = max(samples.peak_memory, _resident_peak())
        if config.baseline is not None:
            samples.baseline.append(_baseline(config.baseline, manifest.dtype, prompts, config))
    engine.close()
    return samples


def _resident_peak() -> int:
    """Bytes. Linux counts KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _run(engine: Engine, prompts: list[list[int]], num_new_tokens: int) -> Timing:
    params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.admit(Request(f"bench-{index}", tuple(prompt), params))
    first, count = 0.0, 0
    while engine.has_work:
        for delta in engine.step():
            if not count:
                first = time.perf_counter() - start
            count += len(delta.token_ids)
            if delta.error is not None:
                raise delta.error
    return Timing(first, time.perf_counter() - start, count)


def _prompt(vocab: int, length: int, *, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, length)]


def _prompts(vocab: int, count: int, repeat: int) -> list[list[int]]:
    """Prompts of 32 to 512 random tokens, of the same lengths in each repeat: nothing is shared."""
    lengths = np.random.default_rng(0).integers(32, 513, count)
    return [_prompt(vocab, int(n), seed=10_000 * (repeat + 1) + i) for i, n in enumerate(lengths)]


def _read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory: the best of several passes over 512 MiB."""
    import torch

    data = torch.ones(2**27, dtype=torch.int32)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        data.max()
        best = min(best, time.perf_counter() - start)
    return float(data.nbytes / best)


def _step_weight_bytes(bundle: Path) -> int:
    manifest = read_manifest(bundle)
    return CpuExecutor(bundle, manifest, kv_cache_bytes=1 << 24).num_step_weight_bytes


def _start_to_first_token(bundle: Path) -> float:
    """Seconds from starting `pelton serve` to the first streamed token of a chat."""
    start = time.perf_counter()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pelton.scripts.cli",
            "serve",
            str(bundle),
            "--port",
            "0",
            "--log-level",
            "error",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        base = next((word for word in server.stdout.readline().split() if word.startswith("http")), None)
        if base is None:
            raise RuntimeError("the server did not start")
        model = json.load(urllib.request.urlopen(f"{base}/models"))["data"][0]["id"]
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "stream": True}
        request = urllib.request.Request(
            f"{base}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            response.readline()
            return time.perf_counter() - start
    finally:
        server.terminate()
        server.wait(timeout=60)


def _baseline(
    checkpoint: Path, dtype: str, prompts: list[list[int]], config: BenchConfig
) -> dict[str, float]:
    """The same work by `transformers.generate`: batches of `num_running` as they arrive, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    generate: Callable[..., Any] = model.generate

    def run(batch: list[list[int]], num_new_tokens: int) -> float:
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        start = time.perf_counter()
        with torch.no_grad():
            generate(
                ids, attention_mask=mask, max_new_tokens=num_new_tokens, min_new_tokens=num_new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - start

    run([prompts[0][:16]], 2)
    one = [prompts[0] * 16][0][:TPOT_CONTEXT_TOKENS]
    tpot = (run([one], 33) - run([one], 1)) / 32
    ttft = run([(prompts[0] * 32)[:TTFT_PROMPT_TOKENS]], 1)
    batches = [prompts[i : i + config.num_running] for i in range(0, len(prompts), config.num_running)]
    total = sum(run(batch, config.num_new_tokens) for batch in batches)
    return {
        "tpot_ms": tpot * 1e3,
        "ttft_512_ms": ttft * 1e3,
        "output_tokens_per_s": len(prompts) * config.num_new_tokens / total,
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")
