"""Runs an engine of the `cpu` target."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil
import torch

from ..compile.bundle import Manifest
from ..errors import ConfigError
from ..plugins_trt.cpu_engine import CpuEngine, EngineProgram
from .executor import ExecutorLimits, StepOutput
from .inputs import StepInputs
from .sampler import HostSampler

log = logging.getLogger(__name__)


class CpuExecutor:
    """`Executor` on PyTorch Inductor libraries.

    KV memory is `kv_cache_bytes`, or what the bundle was built for: as many whole blocks as fit.
    Raises `ConfigError` when that is less than one block or more than the machine has free.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        kv_cache_bytes: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        if num_threads is not None:
            num_processors = os.cpu_count() or 1
            if num_threads > num_processors:
                raise ConfigError(
                    f"threads: {num_threads} is above the {num_processors} processors that are here"
                )
            torch.set_num_threads(num_threads)
        num_parts = manifest.engine.get("num_threads", 0)
        if torch.get_num_threads() > num_parts > 0:
            log.warning(
                "the engine was built for %d threads and gains nothing from more; build it again here for %d",
                num_parts,
                torch.get_num_threads(),
            )
        limits = manifest.limits
        block_bytes = EngineProgram.read(directory).block_bytes
        available = limits.kv_cache_bytes if kv_cache_bytes is None else kv_cache_bytes
        num_blocks = available // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory: {available} bytes hold no block of {block_bytes} bytes; raise it"
            )
        free = psutil.virtual_memory().available
        if available > free:
            raise ConfigError(
                f"kv_cache_memory: {available >> 20} MiB of KV pages are asked for, but only {free >> 20} MiB "
                "of memory are free; lower it"
            )
        self._engine = CpuEngine(directory, num_blocks=num_blocks)
        self._limits = ExecutorLimits(
            max_model_len=limits.max_model_len,
            max_batch_size=limits.max_batch_size,
            max_step_tokens=limits.max_step_tokens,
            block_size=limits.block_size,
            num_blocks=num_blocks,
            vocab_size=manifest.model.vocab_size,
        )

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def num_step_weight_bytes(self) -> int:
        """Bytes of weights that a step reads whatever its size: what memory bandwidth bounds."""
        return self._engine.num_step_weight_bytes

    def execute(self, inputs: StepInputs) -> StepOutput:
        if len(inputs.block_copies):
            self._engine.copy_blocks(inputs.block_copies)
        if not len(inputs.logits_rows):
            # A library cannot take an empty list of rows; one row's logits are made and dropped.
            logits, hidden = self._run(inputs, np.zeros(1, np.int64))
            return StepOutput(logits[:0], None if hidden is None else hidden[:0])
        return StepOutput(*self._run(inputs, inputs.logits_rows))

    def make_sampler(self, eos_token_ids: Iterable[int]) -> HostSampler:
        return HostSampler(self._limits.vocab_size, eos_token_ids)

    def close(self) -> None:
        """Give back the memory; a later `execute` raises `EngineError`."""
        self._engine.close()

    def _run(self, inputs: StepInputs, rows: np.ndarray) -> tuple[np.ndarray, torch.Tensor | None]:
        # OpenMP counts threads per calling thread, and a server steps on another one than that which loaded the
        # engine; asking makes torch set the count here. Compiled code alone would not.
        torch.get_num_threads()
        with torch.inference_mode():
            logits, hidden = self._engine.run(
                inputs.input_ids,
                inputs.positions,
                inputs.block_table,
                inputs.seq_lens,
                inputs.query_start_loc,
                rows,
            )
        return logits.numpy(), hidden
