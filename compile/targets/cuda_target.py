"""The `cuda` target as a build sees it; `cuda.py` compiles."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...errors import BuildError
from ...plugins_trt.cuda_engine import CudaEngine
from ...plugins_trt.cuda_kernels import register_kernels
from ...plugins_trt.fp8_linear import unsupported_reason as fp8_unsupported_reason
from ..bundle import HostNeeds, Limits, ModelFacts
from ..experts import PELTON
from ..export import KVGeometry, kv_geometry
from ..memory import MemoryPlan, gpu_logits_rows, plan_gpu_memory
from ..profiles import derive_profiles
from ..progress import Progress
from ..proof import FlatStep, StepFunction, StepResult, Trace
from . import cuda
from .base import Exported
from .cpu_target import host_compiler, host_needs

NAME = "cuda"
_FIRST_ARCH = 80  # bfloat16 and asynchronous copies, which the kernels use
_NO_GPU = "an engine of --target tensorrt-rtx can be built here, without a GPU"
# Attention's partial results: splits are chosen so that fewer programs than these have rows of at most 128.
_PARTIAL_ROWS = 1024 * 128


class CudaTarget:
    """`Target` on AOTInductor and Triton. `gpu` is the compute capability of `device`, such as `9.0`; `cache_dtype` is
    that of the KV pages, None: the model's own.

    On a `device` of type `cpu`, where tests run, operators and attention are the PyTorch references.
    """

    name = NAME
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    compiler_copies = 3  # weights are inputs of what is compiled
    experts = PELTON

    def __init__(self, device: torch.device, gpu: str, cache_dtype: torch.dtype | None = None) -> None:
        self._device = device
        self._cache_dtype = cache_dtype
        self._gpu = gpu

    @classmethod
    def for_this_machine(cls, scheme: str | None, cache_dtype: torch.dtype | None) -> CudaTarget:
        """For the first GPU. Raises `BuildError` saying what is missing, or that the GPU cannot run `scheme`."""
        if torch.version.cuda is None:
            raise BuildError(
                f"target: cuda needs a CUDA build of torch, this one is {torch.__version__}: install torch from PyPI "
                f"(`pip install 'torch=={torch.__version__.partition('+')[0]}'`) on a machine with an NVIDIA GPU; "
                f"{_NO_GPU}"
            )
        if not torch.cuda.is_available():
            raise BuildError(
                f"target: cuda compiles on the GPU that it is for, and torch finds none; {_NO_GPU}"
            )
        if importlib.util.find_spec("triton") is None:
            raise BuildError("target: cuda needs triton: `pip install 'pelton[cuda]'`")
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            raise BuildError(
                f"target: cuda needs the headers of CUDA {torch.version.cuda}: install its toolkit and set CUDA_HOME"
            )
        device = torch.device("cuda", 0)
        major, minor = torch.cuda.get_device_capability(device)
        gpu = f"{major}.{minor}"
        if reason := unsupported_reason(gpu, scheme):
            raise BuildError(reason)
        return cls(device, gpu, cache_dtype)

    def compiler(self) -> str:
        """Inductor with its C++ compiler and Triton."""
        has_triton = importlib.util.find_spec("triton") is not None
        triton = metadata.version("triton") if has_triton else "none"
        return f"{host_compiler()}, triton {triton}, CUDA {torch.version.cuda}"

    def needs(self) -> HostNeeds:
        """Packages hold code for the host, too: what launches the kernels."""
        return host_needs()

    def options(self) -> Mapping[str, Any]:
        return {"gpu": self._gpu, "cpu_flags": list(self.needs().cpu_flags)}

    def command_options(self) -> Mapping[str, object]:
        return {}

    def warnings(self, dtype: str) -> list[str]:
        return []

    def plan_memory(
        self, config: Any, facts: ModelFacts, limits: Limits, dtype: torch.dtype, weights: int
    ) -> MemoryPlan:
        plan = plan_gpu_memory(facts, limits, dtype, weights, self._cache_dtype or dtype)
        logits = gpu_logits_rows(limits, facts.vocab_size) * facts.vocab_size * 4
        return replace(plan, activations=activation_bytes(config, limits, dtype) + logits)

    def explain(
        self, geometry: tuple[KVGeometry, ...], limits: Limits, num_blocks: int
    ) -> list[tuple[str, str]]:
        return [("gpu", f"compute capability {self._gpu}, this machine's")]

    def lower(self, exported: Exported, directory: Path, progress: Progress) -> Mapping[str, Any]:
        geometry, limits = exported.geometry, exported.limits
        profiles = derive_profiles(limits, geometry, exported.num_blocks)
        facts = {
            "target": self.name,
            "dtype": str(exported.dtype).removeprefix("torch."),
            "vocab_size": exported.vocab_size,
            "gpus": [self._gpu],
            "plugins": [],
            "profiles": [profile.to_json() for profile in profiles],
        }
        activations = activation_bytes(exported.model.config, limits, exported.dtype)
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            register_kernels()
        with progress.stage("compile"):
            program = cuda.lower(
                exported.program, geometry, device=self._device, dtype=exported.dtype,
                block_size=limits.block_size, arch=_arch(self._gpu) if is_cuda else None,
                directory=directory, facts=facts, on_progress=progress.note,
            )  # fmt: skip
        exported.release()
        return {
            "gpus": [self._gpu],
            "num_pieces": len(program.pieces),
            "activation_bytes": activations,
            "num_logits_rows": gpu_logits_rows(limits, exported.vocab_size),
        }

    def engine_step(self, directory: Path, trace: Trace) -> StepFunction:
        engine = CudaEngine(directory, device=self._device, num_blocks=trace.num_blocks)

        def run(step: FlatStep) -> StepResult:
            arrays = {
                "input_ids": step.input_ids[None],
                "positions": step.positions[None],
                "block_table": step.block_table,
                "seq_lens": step.seq_lens,
                "query_start_loc": step.query_start_loc,
                "logits_rows": step.logits_rows,
            }
            tensors = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
            with torch.inference_mode():
                return StepResult(engine.run(tensors, max_rows=len(step.input_ids)).cpu())

        return run


def unsupported_reason(gpu: str, scheme: str | None) -> str | None:
    """Why compute capability `gpu` cannot have an engine, or none of the quantisation `scheme`; None if it can."""
    arch = _arch(gpu)
    if arch < _FIRST_ARCH:
        return f"target: cuda needs a GPU of compute capability 8.0 or later, this one is {gpu}"
    if scheme == "fp8" and (reason := fp8_unsupported_reason(arch)) is not None:
        return f"quantize: {reason}"
    return None


def activation_bytes(config: Any, limits: Limits, dtype: torch.dtype) -> int:
    """An upper bound of what one step computes on the way to its logits, and once more of a decode step, whose CUDA
    graphs have memory of their own:

        tokens * (8 * hidden + 2 * (heads + 2 * kv_heads) * head_dim) * itemsize
        + tokens * experts * (3 * intermediate + hidden) * itemsize    experts that a token is routed to, else 1
        + tokens * 4 * head_dim * 4        rotary tables and their angles, in float32
        + rows * vocab * (itemsize + 4)    the head, and its logits in float32
        + attention's partial results, at most 1024 programs with 128 rows of head_dim + 2 in float32
    """
    item = dtype.itemsize
    hidden, geometry = config.hidden_size, kv_geometry(config)[0]
    head_dim = geometry.head_dim
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None) or 1
    attention = 8 * hidden + 2 * (config.num_attention_heads + 2 * geometry.num_heads) * head_dim
    per_token = (attention + experts * (3 * intermediate + hidden)) * item + 16 * head_dim
    per_row = config.vocab_size * (item + 4)
    partial = _PARTIAL_ROWS * (head_dim + 2) * 4
    rows = gpu_logits_rows(limits, config.vocab_size)
    step = limits.max_step_tokens * per_token + rows * per_row + partial
    decode = limits.max_batch_size * (per_token + per_row) + partial
    return int(step + decode)


def _arch(gpu: str) -> int:
    major, minor = gpu.split(".")
    return int(major) * 10 + int(minor)
