"""A bundle on disk -> a running engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ..compile.bundle import HostFacts, Manifest, check_bundle, read_manifest
from ..errors import BundleError, ConfigError
from ..plugins_trt.tensorrt import TENSORRT, TENSORRT_RTX
from .engine import Engine, EngineConfig
from .executor import Executor
from .speculate.loading import read_drafting
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)


def load_engine(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    name: str | None = None,
    chat_template: str | None = None,
) -> Engine:
    """Check the bundle at `path` against this machine, then load it. `chat_template` (Jinja) replaces the model's.

    Raises `BundleError` (built with X, found Z, rebuild with ...) before the engine is touched, `ConfigError`
    when `config` cannot work with it.
    """
    config = config or EngineConfig()
    directory = Path(path)
    manifest = read_manifest(directory)
    check_bundle(manifest, directory, HostFacts.detect())
    if manifest.target not in ("cpu", "cuda", TENSORRT, TENSORRT_RTX):
        raise BundleError(f"{directory}: built for target {manifest.target!r}, which this version cannot run")
    tokenizer = Tokenizer.from_directory(directory, chat_template=chat_template)
    drafting = read_drafting(config, directory, manifest, tokenizer)
    executor = _open_executor(directory, manifest, replace(config, kv_cache_bytes=drafting.kv_cache_bytes))
    limits = executor.limits
    if limits.num_blocks * limits.block_size < limits.max_model_len:
        log.warning(
            "the KV cache holds %d tokens, fewer than max_model_len %d: longer requests are refused",
            limits.num_blocks * limits.block_size,
            limits.max_model_len,
        )
    try:
        speculator = drafting.open(tokenizer, executor.limits)
    except BaseException:
        executor.close()
        raise
    name = name or directory.resolve().name
    return Engine(executor, tokenizer, config, name=name, speculator=speculator)


def _open_executor(directory: Path, manifest: Manifest, config: EngineConfig) -> Executor:
    # torch takes a second to import: everything that can be refused without it has been by now.
    if manifest.target == "cpu":
        from .executor_cpu import CpuExecutor

        return CpuExecutor(
            directory, manifest, kv_cache_bytes=config.kv_cache_bytes, num_threads=config.num_threads
        )
    if config.num_threads is not None:
        raise ConfigError(
            f"threads: only --target cpu computes on CPU threads, not {manifest.target}; leave it out"
        )
    if manifest.target == "cuda":
        from .cuda_loading import open_executor as open_cuda_executor

        return open_cuda_executor(directory, manifest, kv_cache_bytes=config.kv_cache_bytes)
    from .executor_trt import open_executor

    return open_executor(directory, manifest, kv_cache_bytes=config.kv_cache_bytes)
