"""The `tensorrt` and `tensorrt-rtx` targets as a build sees them; `tensorrt.py` compiles."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...errors import BuildError
from ...plugins_trt.architectures import ARCHITECTURES
from ...plugins_trt.tensorrt import TENSORRT_RTX, require_version
from ..bundle import HostNeeds, Limits, ModelFacts
from ..experts import PELTON
from ..export import KVGeometry, kv_geometry
from ..kernel_checks import check_attention
from ..memory import MemoryPlan, plan_gpu_memory
from ..onnx_graph import write_onnx
from ..profiles import Profile, derive_profiles
from ..progress import Progress, format_bytes
from ..proof import StepFunction, Trace
from . import torch_tensorrt
from .base import Exported
from .tensorrt import (
    PLAN_FILE,
    NetworkLayer,
    TensorRTOptions,
    build_plan,
    check_gpus,
    write_engine_facts,
)

ONNX_FRONTEND = "onnx"
# What makes the graph and the plugins' kernels, as distributions.
_GRAPH_PACKAGES = ("onnx", "onnxscript", "onnx-ir")
_KERNEL_PACKAGES = ("triton",)


class TensorRTTarget:
    """`Target` on TensorRT's ONNX parser and builder. Raises `BuildError` naming the option at fault.

    `cache_dtype` is that of the KV pages, None: the model's own. `detect_gpu` says the compute capability of this
    machine's GPU; it is asked where TensorRT builds for that one.
    """

    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    compiler_copies = 6  # 4.7 with SmolLM2 on TensorRT-RTX
    experts = PELTON

    def __init__(
        self,
        name: str,
        *,
        gpus: Sequence[str],
        scheme: str | None,
        frontend: str | None = None,
        cache_dtype: torch.dtype | None = None,
        detect_gpu: Callable[[], str],
    ) -> None:
        self.name = name
        self._cache_dtype = cache_dtype
        self._options = TensorRTOptions(gpus=check_gpus(name, gpus, scheme, detect_gpu=detect_gpu))
        self._frontend = frontend or ONNX_FRONTEND

    def compiler(self) -> str:
        return f"{self.name} {require_version(self.name)}"

    def needs(self) -> HostNeeds:
        return HostNeeds(machine=platform.machine(), cpu_flags=())

    def options(self) -> Mapping[str, Any]:
        frontend = self._frontend
        if frontend == torch_tensorrt.TORCH_TENSORRT:
            frontend = f"{frontend} {torch_tensorrt.require_torch_tensorrt()}"
        return {
            "gpus": list(self._options.gpus),
            "workspace_bytes": self._options.workspace_bytes,
            "frontend": frontend,
            "packages": self._packages(),
        }

    def _packages(self) -> dict[str, str]:
        """Versions of the packages that decide the engine beside the compiler, by name."""
        of_graph = _GRAPH_PACKAGES if self._frontend == ONNX_FRONTEND else ()
        try:
            return {name: metadata.version(name) for name in (*of_graph, *_KERNEL_PACKAGES)}
        except metadata.PackageNotFoundError as error:
            raise BuildError(
                f"target: {self.name} needs {error.name}: `pip install 'pelton[rtx]'`"
            ) from error

    def command_options(self) -> Mapping[str, object]:
        options: dict[str, object] = {}
        if self.name == TENSORRT_RTX:  # TensorRT's is the machine's: there is no choice
            options["--gpu"] = ",".join(self._options.gpus)
        if self._frontend != ONNX_FRONTEND:
            options["--frontend"] = self._frontend
        return options

    def warnings(self, dtype: str) -> list[str]:
        return []

    def plan_memory(
        self, config: Any, facts: ModelFacts, limits: Limits, dtype: torch.dtype, weights: int
    ) -> MemoryPlan:
        memory = plan_gpu_memory(facts, limits, dtype, weights, self._cache_dtype or dtype)
        if memory.num_blocks:  # what no profile can hold is refused before the model is loaded
            derive_profiles(limits, kv_geometry(config), memory.num_blocks)
        return memory

    def explain(
        self, geometry: tuple[KVGeometry, ...], limits: Limits, num_blocks: int
    ) -> list[tuple[str, str]]:
        whose = "" if self.name == TENSORRT_RTX else ", this machine's"
        rows = [("gpus", ", ".join(self._options.gpus) + whose)]
        for profile in derive_profiles(limits, geometry, num_blocks):
            rows.append((f"profile {profile.name}", profile.purpose))
            for shape in profile.shapes.values():
                if not shape.name.endswith("_caches_0") and "_caches_" in shape.name:
                    continue  # the pages of all layers are alike
                rows.append((f"  {shape.name}", f"min {shape.min}, opt {shape.opt}, max {shape.max}"))
        return rows

    def lower(self, exported: Exported, directory: Path, progress: Progress) -> Mapping[str, Any]:
        geometry, limits = exported.geometry, exported.limits
        profiles = derive_profiles(limits, geometry, exported.num_blocks)
        # The plugin's workspace is sized for all architectures, whichever the plan is for.
        archs = dict.fromkeys((*(int(gpu.replace(".", "")) for gpu in self._options.gpus), *ARCHITECTURES))
        check_attention(exported.program.graph, geometry, exported.dtype, limits.block_size, tuple(archs))
        facts = {
            "target": self.name,
            "dtype": str(exported.dtype).removeprefix("torch."),
            "cache_dtype": str(self._cache_dtype or exported.dtype).removeprefix("torch."),
            "block_size": limits.block_size,
            "gpus": list(self._options.gpus),
            "packages": self._packages(),
            "kv_heads": [g.num_heads for g in geometry],
            "head_dims": [g.head_dim for g in geometry],
            "vocab_size": exported.vocab_size,
        }
        through = self._through_onnx if self._frontend == ONNX_FRONTEND else self._through_torch_tensorrt
        layers = through(exported, profiles, directory, progress)
        write_engine_facts(directory, profiles, layers, facts)
        num_plugins = sum(layer.kind.startswith("pelton::") for layer in layers)
        progress.note(
            f"plan of {format_bytes((directory / PLAN_FILE).stat().st_size)}: {len(layers)} layers, "
            f"{num_plugins} of them Pelton's plugins"
        )
        return {
            "num_layers": len(layers),
            "num_plugins": num_plugins,
            "gpus": list(self._options.gpus),
            "packages": self._packages(),
        }

    def _through_onnx(
        self, exported: Exported, profiles: Sequence[Profile], directory: Path, progress: Progress
    ) -> tuple[NetworkLayer, ...]:
        with tempfile.TemporaryDirectory(prefix=".onnx-", dir=directory) as work:
            with progress.stage("convert to ONNX"):
                graph = write_onnx(exported.program, Path(work))
            exported.release()  # from here on the weights are in the file
            with progress.stage(f"build with {self.name}"):
                return build_plan(
                    self.name, graph, profiles, self._options, directory,
                    timing_cache=self._timing_cache(), on_progress=progress.step,
                )  # fmt: skip

    def _through_torch_tensorrt(
        self, exported: Exported, profiles: Sequence[Profile], directory: Path, progress: Progress
    ) -> tuple[NetworkLayer, ...]:
        program = exported.program
        exported.release()
        with progress.stage(f"convert with torch-tensorrt and build with {self.name}"):
            return torch_tensorrt.build_plan(
                program, profiles, self._options, directory,
                timing_cache=self._timing_cache(), on_progress=progress.step,
            )  # fmt: skip

    def engine_step(self, directory: Path, trace: Trace) -> StepFunction | None:
        return None

    def _timing_cache(self) -> Path | None:
        """Where kernels' timings are kept between builds, per compiler version and GPU. TensorRT-RTX times nothing."""
        if self.name == TENSORRT_RTX:
            return None
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        (gpu,) = self._options.gpus
        return root / "pelton" / f"{self.compiler().replace(' ', '-')}-{gpu}.timing"
