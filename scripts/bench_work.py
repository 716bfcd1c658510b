"""The work that `pelton bench` measures."""

from __future__ import annotations

import http.client
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np

from ..compile.bundle import read_manifest
from ..errors import PeltonError
from ..runtime.engine import Engine, EngineConfig
from ..runtime.load import load_engine
from ..runtime.request import Request, SamplingParams
from .engine_options import engine_arguments
from .huge_pages import before_restart

TTFT_PROMPT_TOKENS = 512
TPOT_CONTEXT_TOKENS = 256
TPOT_NEW_TOKENS = 64
START_TIMEOUT_S, REPLY_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 120.0, 60.0
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
    peak_memory: int = 0  # bytes
    step_weight_bytes: int = 0


def measure(bundle: Path, engine_config: EngineConfig, config: BenchConfig) -> dict[str, Any]:
    """Everything `pelton bench` reports, as JSON-ready numbers: medians over the repeats."""
    manifest = read_manifest(bundle)
    start: list[float] = []
    if config.measure_start:
        start = [_start_to_first_token(bundle, engine_config) for _ in range(config.repeats)]
    built = manifest.limits.max_batch_size
    running = num_running(config.num_running, wanted=engine_config.max_batch_size, built=built)
    samples = _sample(
        bundle, replace(engine_config, max_batch_size=running), replace(config, num_running=running)
    )
    bandwidth = _read_bandwidth()
    floor = samples.step_weight_bytes / bandwidth
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
        "step_weight_mib": round(samples.step_weight_bytes / 2**20),
    }
    if samples.baseline:
        names = samples.baseline[0]
        report["transformers"] = {name: _round(median(b[name] for b in samples.baseline)) for name in names}
        pairs = zip(rates, samples.baseline, strict=True)
        report["throughput_ratio"] = _round(median(rate / b["output_tokens_per_s"] for rate, b in pairs))
    return report


def num_running(requested: int, *, wanted: int | None, built: int) -> int:
    """Requests that run at a time: those asked for, within --max-batch-size (`wanted`) and the bundle's limit."""
    return min(requested, built, built if wanted is None else wanted)


def _sample(bundle: Path, engine_config: EngineConfig, config: BenchConfig) -> _Samples:
    """The parts in turn, repeat by repeat, so that a drift of the machine touches all of them."""
    manifest = read_manifest(bundle)
    vocab = manifest.model.vocab_size
    samples = _Samples()
    engine = load_engine(bundle, engine_config)
    samples.step_weight_bytes = _step_weight_bytes(engine)
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
            samples.peak_memory = peak_memory()
        if config.baseline is not None:
            samples.baseline.append(_baseline(config.baseline, manifest.dtype, prompts, config))
    engine.close()
    return samples


def peak_memory() -> int:
    """The most bytes that were ever resident in this process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    peak = _vm_hwm(status)
    # Linux counts KiB.
    return peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _vm_hwm(status: str) -> int | None:
    """Bytes of the high-water mark in a /proc/PID/status, None if it has none."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return None


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


def _step_weight_bytes(engine: Engine) -> int:
    from ..runtime.executor_cpu import CpuExecutor

    if not isinstance(engine.executor, CpuExecutor):
        raise PeltonError("bench: only bundles for the target cpu say how many bytes of weights a step reads")
    return engine.executor.num_step_weight_bytes


def _start_to_first_token(bundle: Path, config: EngineConfig) -> float:
    """Seconds from starting `pelton serve` to the first streamed token. Raises `PeltonError` with the reason."""
    command = [sys.executable, "-m", "pelton.scripts.cli", "serve", str(bundle), "--port", "0"]
    return time_first_token([*command, "--log-level", "error", *engine_arguments(config)])


def time_first_token(
    command: Sequence[str], *, start_timeout: float = START_TIMEOUT_S, reply_timeout: float = REPLY_TIMEOUT_S
) -> float:
    """Seconds until the server that `command` starts has streamed a token; it is stopped then.

    The first line that it prints has to hold its address. Raises `PeltonError` with what the server said last when it
    does not start or answer; the timeouts are in seconds. The time includes the server's restart for huge pages.
    """
    environment = before_restart(os.environ)
    environment.pop("PELTON_API_KEY", None)
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            _stream_a_token(_address(server, log, start_timeout), reply_timeout)
            return time.perf_counter() - start
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise PeltonError(
                f"bench: the server did not answer: {error or type(error).__name__}{_last_line(log)}"
            ) from error
        finally:
            _stop(server)


def _address(server: subprocess.Popen[bytes], log: IO[bytes], timeout: float) -> str:
    """The URL in the first line that the server prints."""
    assert server.stdout is not None
    is_readable, _, _ = select.select([server.stdout], [], [], timeout)
    if not is_readable:
        raise PeltonError(f"bench: the server did not start within {timeout:g} s{_last_line(log)}")
    line = server.stdout.readline().decode(errors="replace")
    address = next((word for word in line.split() if word.startswith("http")), None)
    if address is None:
        raise PeltonError(f"bench: the server did not start{_last_line(log)}")
    return address


def _stream_a_token(base: str, timeout: float) -> None:
    # The server is on this machine: a proxy of the environment does not know it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{base}/models", timeout=timeout) as response:
        models: dict[str, Any] = json.load(response)
    body = {"model": models["data"][0]["id"], "prompt": "Once upon a time", "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"{base}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with opener.open(request, timeout=timeout) as response:
        frame = response.readline().decode(errors="replace").strip()
    if not frame.startswith("data: ") or "error" in json.loads(frame.removeprefix("data: ")):
        raise PeltonError(f"bench: the server answered {frame or 'nothing'} instead of a token")


def _last_line(log: IO[bytes]) -> str:
    """What the server said last, to be put behind a message."""
    log.seek(0)
    lines = log.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last.removeprefix('pelton: ')}" if last else ""


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()


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
