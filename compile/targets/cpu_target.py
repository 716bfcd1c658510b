"""The `cpu` target as a build sees it; `cpu.py` compiles."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import BuildError
from ...plugins_trt.cpu_engine import CpuEngine
from ...plugins_trt.paged_attention_cpu import uses_tiles
from ...plugins_trt.processor import has_bfloat16_products
from ..bundle import HostFacts, HostNeeds, Limits, ModelFacts
from ..experts import BATCHED
from ..export import KVGeometry
from ..memory import MemoryPlan, plan_memory
from ..model_loading import empty_model
from ..passes import optimise
from ..progress import Progress
from ..proof import StepFunction, StepResult, Trace
from ..segments import cut, layer_prefix
from . import cpu
from .base import Exported

# Inductor compiles for the building machine (-march=native): whatever instruction sets it has may be in the code.
# On x86 these are the flags that name one; elsewhere every flag counts.
_X86_INSTRUCTION_SETS = re.compile(
    r"avx.*|amx.*|sse.*|ssse3|bmi[12]|fma|f16c|gfni|vaes|vpclmulqdq|pclmulqdq|aes|sha_ni|abm|movbe|adx|popcnt|rdseed"
    r"|clwb|clflushopt|movdir.*|serialize|xsave.*|fsgsbase|rdpid|ptwrite|waitpkg|cldemote"
)


def host_compiler() -> str:
    """Inductor's C++ compiler, on this machine. Raises `BuildError` when there is none."""
    try:
        version = subprocess.run(
            ["g++", "-dumpfullversion"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"g++ is needed to compile for the CPU and does not run here ({error}); install it (Debian: "
            "apt-get install g++)"
        ) from error
    return f"inductor, g++ {version}, {platform.machine()}"


def host_needs() -> HostNeeds:
    """What Inductor's C++ code may use of the building machine."""
    host = HostFacts.detect()
    is_x86 = host.machine in ("x86_64", "AMD64")
    flags = (f for f in host.cpu_flags if not is_x86 or _X86_INSTRUCTION_SETS.fullmatch(f))
    return HostNeeds(machine=host.machine, cpu_flags=tuple(sorted(flags)))


class CpuTarget:
    """`Target` on PyTorch Inductor."""

    name = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    compiler_copies = 6  # 5.3 with SmolLM2
    experts = BATCHED

    def compiler(self) -> str:
        return host_compiler()

    def needs(self) -> HostNeeds:
        return host_needs()

    def options(self) -> Mapping[str, Any]:
        return {"cpu_flags": list(self.needs().cpu_flags), "num_threads": _num_threads()}

    def command_options(self) -> Mapping[str, object]:
        return {}

    def warnings(self, dtype: str) -> list[str]:
        if dtype != "bfloat16" or has_bfloat16_products():
            return []
        return [
            "this processor has no instructions for products of bfloat16: prompts and batches are slower than with "
            "--dtype float32, whose weights and KV pages are twice as large"
        ]

    def plan_memory(
        self, config: Any, facts: ModelFacts, limits: Limits, dtype: torch.dtype, weights: int
    ) -> MemoryPlan:
        soft_cap = getattr(config, "attn_logit_softcapping", None) or 0.0
        has_tiles = uses_tiles(dtype, [soft_cap], has_sinks=_has_sinks(config))
        return plan_memory(
            facts, limits, dtype, is_tied=bool(config.tie_word_embeddings), has_tiles=has_tiles
        )

    def explain(
        self, geometry: tuple[KVGeometry, ...], limits: Limits, num_blocks: int
    ) -> list[tuple[str, str]]:
        return []

    def lower(self, exported: Exported, directory: Path, progress: Progress) -> Mapping[str, Any]:
        geometry = exported.geometry
        with progress.stage("graph passes"):
            graph_module = optimise(exported.program.module(check_guards=False))
            segments = cut(graph_module, layer_prefix(exported.model, len(geometry)), len(geometry))
        with progress.stage("compile"):
            program = cpu.lower(
                graph_module, segments, geometry, dtype=exported.dtype, block_size=exported.limits.block_size,
                num_threads=_num_threads(), directory=directory, on_progress=progress.note,
            )  # fmt: skip
        return {
            "num_segments": len(program.segments),
            "windows": list(program.windows),
            "num_threads": _num_threads(),
        }

    def engine_step(self, directory: Path, trace: Trace) -> StepFunction:
        engine = CpuEngine(directory, num_blocks=trace.num_blocks)
        return lambda step: StepResult(
            *engine.run(
                step.input_ids,
                step.positions,
                step.block_table,
                step.seq_lens,
                step.query_start_loc,
                step.logits_rows,
            )
        )


def _num_threads() -> int:
    """Threads that may share an engine's GEMMs: one for each processor that this process may run on, whatever
    OMP_NUM_THREADS says.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_sinks(config: Any) -> bool:
    """Whether the attention of a model has sinks, by the name that transformers gives these parameters."""
    return any(name.endswith(".sinks") for name, _ in empty_model(config).named_parameters())
