"""The `tensorrt` and `tensorrt-rtx` targets: ONNX -> parser -> network with Pelton's plugins -> plan.

The one owner of TensorRT's builder. What it writes into a directory:

    engine.plan   the plan, weights inside
    engine.json   profiles, page layout, plugins and the network's layers with their HF names

Both targets share this code: TensorRT and TensorRT-RTX have the same API (`plugins_trt.tensorrt`). TensorRT-RTX builds
for GPUs that it is told, with none at hand, and finishes kernel selection on the user's GPU; TensorRT times kernels
on the GPU of the building machine and keeps what it measured in a timing cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import BuildError
from ...interrupts import held_interrupts
from ...plugins_trt.fp8_linear import unsupported_reason as fp8_unsupported_reason
from ...plugins_trt.fp8_linear_plugin import FP8_LINEAR_PLUGIN
from ...plugins_trt.int4_linear_plugin import INT4_LINEAR_PLUGIN
from ...plugins_trt.messages import make_log
from ...plugins_trt.moe_experts_plugin import MOE_EXPERTS_PLUGIN
from ...plugins_trt.paged_attention_plugin import PAGED_ATTENTION_PLUGIN
from ...plugins_trt.plugin import Operator, register
from ...plugins_trt.tensorrt import TENSORRT_RTX, collector_held, load
from ..diagnose import ParserError, diagnose
from ..profiles import Profile
from .tensorrt_progress import make_monitor

PLAN_FILE = "engine.plan"
ENGINE_FILE = "engine.json"
PLUGINS: tuple[Operator, ...] = (
    PAGED_ATTENTION_PLUGIN,
    INT4_LINEAR_PLUGIN,
    FP8_LINEAR_PLUGIN,
    MOE_EXPERTS_PLUGIN,
)

# Compute capabilities that TensorRT-RTX compiles for.
RTX_COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


@dataclass(frozen=True, slots=True)
class NetworkLayer:
    """A layer as TensorRT's network has it. `kind` is TensorRT's layer type, for a plugin its name."""

    name: str
    kind: str
    precision: str


@dataclass(frozen=True, slots=True)
class TensorRTOptions:
    """`gpus`: compute capabilities such as `8.9`, for TensorRT that of this machine's GPU. `workspace_bytes` limits
    the scratch memory of a layer.
    """

    gpus: tuple[str, ...] = ()
    workspace_bytes: int = 1 << 30


def machine_gpu() -> str:
    """Compute capability of this machine's first GPU, which TensorRT builds for. Raises `BuildError` without one."""
    if not torch.cuda.is_available():
        raise BuildError(
            f"target: tensorrt builds for the GPU of the machine that it runs on, and torch {torch.__version__} finds "
            "none; an engine of --target tensorrt-rtx can be built here, without a GPU"
        )
    major, minor = torch.cuda.get_device_capability(0)
    return f"{major}.{minor}"


def check_gpus(
    target: str, gpus: Sequence[str], scheme: str | None = None, *, detect_gpu: Callable[[], str]
) -> tuple[str, ...]:
    """The compute capabilities to build for. TensorRT-RTX: those given, or all that can run the quantisation `scheme`;
    TensorRT: the one that `detect_gpu` finds.

    Raises `BuildError` naming the option.
    """
    if target != TENSORRT_RTX:
        if gpus:
            raise BuildError(
                "gpu: TensorRT builds for the GPU of the machine that it runs on; --gpu is for tensorrt-rtx"
            )
        here = detect_gpu()
        if (reason := _unable(here, scheme)) is not None:
            raise BuildError(f"gpu: this machine's, of compute capability {here}, {reason}")
        return (here,)
    able = [gpu for gpu in RTX_COMPUTE_CAPABILITIES if _unable(gpu, scheme) is None]
    for gpu in gpus:
        if gpu not in RTX_COMPUTE_CAPABILITIES:
            raise BuildError(
                f"gpu: {gpu!r} is not a compute capability that TensorRT-RTX builds for; choose among {', '.join(able)}"
            )
        if (reason := _unable(gpu, scheme)) is not None:
            raise BuildError(f"gpu: {gpu} {reason}")
    return tuple(sorted(set(gpus) or able, key=_capability))


def _unable(gpu: str, scheme: str | None) -> str | None:
    """Why a GPU cannot run an engine of this kind, None if it can. Pelton's kernels need 8.0."""
    if _capability(gpu) < (8, 0):
        return "is too old for Pelton's kernels, which need 8.0 or later"
    if scheme == "fp8" and (reason := fp8_unsupported_reason(int(gpu.replace(".", "")))) is not None:
        return f"cannot run --quantize fp8: {reason}"
    return None


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


@collector_held()
def build_plan(
    target: str,
    onnx_path: Path,
    profiles: Sequence[Profile],
    options: TensorRTOptions,
    directory: Path,
    *,
    timing_cache: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[NetworkLayer, ...]:
    """Compile the ONNX file into `directory / PLAN_FILE`; returns the network's layers.

    Raises `BuildError` with the layer, the cause and the remedy.
    """
    trt = load(target)
    creators = [register(trt, plugin) for plugin in PLUGINS]  # the registry keeps no reference
    log = make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        reported = [
            ParserError(error.node_name(), error.node_operator(), error.desc(), error.code().name)
            for error in errors
        ]
        faults = [fault for creator in creators for fault in creator.faults]
        raise BuildError(str(diagnose([*faults, *log.errors], reported, warnings=list(log.warnings))))
    return build_network(
        trt, target, builder, network, log, profiles, options, directory,
        timing_cache=timing_cache, on_progress=on_progress,
    )  # fmt: skip


def build_network(
    trt: Any,
    target: str,
    builder: Any,
    network: Any,
    log: Any,
    profiles: Sequence[Profile],
    options: TensorRTOptions,
    directory: Path,
    *,
    timing_cache: Path | None,
    on_progress: Callable[[str], None],
) -> tuple[NetworkLayer, ...]:
    """Compile a network, whoever made it, as `build_plan` does; `log` has what TensorRT says to `builder`."""
    config = _configure(trt, builder, network, log, profiles, options, target)
    cache = _use_timing_cache(config, timing_cache)
    with held_interrupts() as is_interrupted:
        # Cancelled in the middle, TensorRT-RTX 1.7 corrupts the heap of the process; its builds are the short ones.
        monitor = make_monitor(trt, on_progress, is_interrupted, can_cancel=target != TENSORRT_RTX)
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
    if monitor.interrupt is not None:
        raise monitor.interrupt
    if plan is None:
        raise BuildError(str(diagnose(list(log.errors), warnings=list(log.warnings))))
    (directory / PLAN_FILE).write_bytes(plan)
    if cache is not None and timing_cache is not None:
        _save(timing_cache, cache.serialize())
    return tuple(_layer(trt, network.get_layer(i)) for i in range(network.num_layers))


def _configure(
    trt: Any,
    builder: Any,
    network: Any,
    log: Any,
    profiles: Sequence[Profile],
    options: TensorRTOptions,
    target: str,
) -> Any:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # names and tactics for `pelton inspect`
    if target == TENSORRT_RTX:
        config.num_compute_capabilities = len(options.gpus)
        for index, gpu in enumerate(options.gpus):
            major, minor = _capability(gpu)
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{major}{minor}"), index)
    names = [network.get_input(i).name for i in range(network.num_inputs)]
    for profile in profiles:
        missing = sorted(set(names) - set(profile.shapes))
        if missing:
            raise BuildError(f"profile {profile.name}: has no shapes for the inputs {', '.join(missing)}")
        native = builder.create_optimization_profile()
        for name in names:
            shapes = profile.shapes[name]
            native.set_shape(name, shapes.min, shapes.opt, shapes.max)
        if config.add_optimization_profile(native) < 0:
            raise BuildError(f"profile {profile.name}: {diagnose(list(log.errors))}")
    return config


def _use_timing_cache(config: Any, path: Path | None) -> Any:
    """Give the builder the timings that `path` holds, or none where it refuses those; None without a path."""
    if path is None:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, False):  # of another GPU or driver, or damaged
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _save(path: Path, content: Any) -> None:
    """Replace `path` whole: builds may run side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def _layer(trt: Any, layer: Any) -> NetworkLayer:
    kind = layer.type.name.lower()
    if layer.type == trt.LayerType.PLUGIN_V3:
        kind = _plugin_name(layer.name)
    output = layer.get_output(0)
    return NetworkLayer(layer.name, kind, output.dtype.name.lower() if output is not None else "")


def _plugin_name(layer_name: str) -> str:
    operator = layer_name.rpartition("/")[2]
    known = [plugin.name for plugin in PLUGINS if operator.startswith(plugin.name)]
    return f"pelton::{known[0]}" if known else operator


def write_engine_facts(
    directory: Path, profiles: Sequence[Profile], layers: Sequence[NetworkLayer], facts: dict[str, Any]
) -> None:
    """`engine.json`: what the executor and `pelton inspect --layers` need to know of the plan."""
    content = {
        **facts,
        "plugins": [plugin.name for plugin in PLUGINS],
        "profiles": [profile.to_json() for profile in profiles],
        "layers": [[layer.name, layer.kind, layer.precision] for layer in layers],
    }
    (directory / ENGINE_FILE).write_text(json.dumps(content, indent=1) + "\n")
