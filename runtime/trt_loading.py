"""A bundle's plan -> a deserialised engine, or a `BundleError`: what it was built with, what is here, what to do.

What can be compared is compared before the plan is touched. Plugins are registered from `plugins_trt`: neither the
builder nor the model's code is needed where an engine runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compile.bundle import Manifest, build_command_into
from ..errors import BuildError, BundleError
from ..plugins_trt.messages import Meaning, one_line, recognise
from ..plugins_trt.plugin import Operator, dtype_name, register
from ..plugins_trt.tensorrt import load
from .trt_facts import LOGITS, PLAN_FILE, STEP_INPUTS, EngineFacts

# By meaning of what TensorRT says: the cause, and what to do where building again alone is not it.
_REBUILD = "{rebuild}"
_WORDS: Mapping[Meaning, tuple[str, str]] = {
    Meaning.PLUGIN_MISSING: ("it uses a plugin that is not registered", _REBUILD),
    Meaning.PLUGIN_REFUSES: ("one of its plugins cannot be made", _REBUILD),
    Meaning.PLAN_VERSION: ("it was written by another version of TensorRT, or is damaged", _REBUILD),
    Meaning.OTHER_GPU: ("it was built for another GPU", _REBUILD),
    Meaning.NO_FP8: ("it computes in FP8, which this GPU cannot", _REBUILD),
    Meaning.NO_BF16: ("it computes in bfloat16, which this GPU cannot", _REBUILD),
    Meaning.SHAPE_OUTSIDE: ("a shape lies outside what the engine was built for", _REBUILD),
    Meaning.MEMORY: (
        "the GPU has too little free memory for it",
        "free memory on the GPU, or choose smaller limits and {rebuild}",
    ),
    Meaning.DRIVER: ("the CUDA driver is missing or too old", "install a newer NVIDIA driver"),
}
_MAX_DETAIL = 300


def rebuild(manifest: Manifest, where: Path) -> str:
    """How to build the bundle at `where` again."""
    return f"rebuild with: {build_command_into(manifest.build_command, where)}"


def check_needs(
    manifest: Manifest, facts: EngineFacts, where: Path, *, version: str | None, gpu: str | None
) -> None:
    """Raise `BundleError` unless the bundle was built with TensorRT `version` and for a GPU like `gpu`.

    `version` is that of the target's library here, `gpu` the compute capability; None: there is none.
    """
    built, found = [], []
    if facts.target != manifest.target:
        built.append(f"a plan for {facts.target}")
        found.append(f"a manifest for {manifest.target}")
    here = f"{manifest.target} {version}" if version else f"no {manifest.target}"
    if manifest.versions.compiler != here:
        built.append(manifest.versions.compiler)
        found.append(here)
    if gpu is None or (facts.gpus and gpu not in facts.gpus):
        wanted = f" of compute capability {' or '.join(facts.gpus)}" if facts.gpus else ""
        built.append(f"an NVIDIA GPU{wanted}")
        found.append("no CUDA device" if gpu is None else f"one of {gpu}")
    if not built:
        return
    remedy = rebuild(manifest, where)
    if gpu is None:
        remedy = f"run it where there is such a GPU, or rebuild for this machine with --target cpu ({remedy})"
    raise BundleError(f"{where}: built with/for {' and '.join(built)}, found {' and '.join(found)}; {remedy}")


def load_library(manifest: Manifest, where: Path) -> Any:
    """TensorRT's module for the bundle's target."""
    try:
        return load(manifest.target)
    except BuildError as error:
        raise BundleError(
            f"{where}: needs {manifest.target}: {str(error).removeprefix('target: ')}"
        ) from error


def register_plugins(trt: Any, facts: EngineFacts, where: Path, remedy: str) -> list[Any]:
    """Make the plan's plugins known to TensorRT; returns their creators, which must outlive the engine.

    Raises `BundleError` naming a plugin that this version of Pelton does not have.
    """
    operators = [_find_operator(name, where, remedy) for name in facts.plugins]
    return [register(trt, operator) for operator in operators]


def _find_operator(name: str, where: Path, remedy: str) -> Operator:
    """Operator `NAME` stands in `plugins_trt/NAME_plugin.py` as `NAME_PLUGIN`, in capitals."""
    package = __package__.rpartition(".")[0]
    module_name = f"{package}.plugins_trt.{name}_plugin"
    if not name.isidentifier() or importlib.util.find_spec(module_name) is None:
        raise BundleError(
            f"{where}: its plan uses the plugin {name!r}, which this Pelton does not have; {remedy}"
        )
    operator = getattr(importlib.import_module(module_name), f"{name.upper()}_PLUGIN")
    assert isinstance(operator, Operator)
    return operator


def deserialize(trt: Any, runtime: Any, log: Any, directory: Path, remedy: str) -> Any:
    """The engine of the plan, which is mapped, not read. Raises `BundleError` with TensorRT's reason in plain words."""
    path = directory / PLAN_FILE
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = runtime.deserialize_cuda_engine(plan)
            reasons = [] if engine is not None else _invalidity(trt, runtime, plan)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); {remedy}") from error
    if engine is None:
        said = explain([*reasons, *log.errors], unknown="the plan does not load", remedy=remedy)
        raise BundleError(f"{path}: {said}")
    return engine


def _invalidity(trt: Any, runtime: Any, plan: mmap.mmap) -> list[str]:
    """What TensorRT-RTX finds in the plan's header, as its own names; TensorRT has no such question."""
    if not hasattr(runtime, "get_engine_validity"):
        return []
    _, flags = runtime.get_engine_validity(plan)
    kinds = trt.EngineInvalidityDiagnostics.__members__.values()
    return [kind.name.lower().replace("_", " ") for kind in kinds if int(flags) & int(kind)]


def explain(messages: Sequence[str], *, unknown: str, remedy: str | None = None) -> str:
    """Cause (`unknown` where no message tells), TensorRT's own words, and what to do where `remedy` is to rebuild."""
    found = recognise(messages)
    cause, action = _WORDS.get(found[0], (unknown, _REBUILD)) if found else (unknown, _REBUILD)
    said = one_line("; ".join(messages), _MAX_DETAIL) or "it gives no reason"
    text = f"{cause} (TensorRT: {said})"
    return text if remedy is None else f"{text}; {action.format(rebuild=remedy)}"


def check_engine(trt: Any, engine: Any, facts: EngineFacts, where: Path, remedy: str) -> None:
    """Raise `BundleError` unless the engine has the tensors and the profiles that `engine.json` says."""
    if problem := _disagreement(trt, engine, facts):
        raise BundleError(f"{where}: its plan and engine.json do not belong together: {problem}; {remedy}")


def _disagreement(trt: Any, engine: Any, facts: EngineFacts) -> str | None:
    inputs = {**STEP_INPUTS, **dict.fromkeys(facts.cache_names, facts.cache_dtype)}
    outputs = {LOGITS: "float32", **{f"{name}_out": facts.cache_dtype for name in facts.cache_names}}
    expected = {
        **{name: (trt.TensorIOMode.INPUT, dtype) for name, dtype in inputs.items()},
        **{name: (trt.TensorIOMode.OUTPUT, dtype) for name, dtype in outputs.items()},
    }
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    if different := sorted(set(names) ^ set(expected)):
        return f"one has the tensors {', '.join(different)}, the other has not"
    for name in names:
        mode, dtype = expected[name]
        has = dtype_name(trt, engine.get_tensor_dtype(name))
        if engine.get_tensor_mode(name) != mode or has != dtype:
            return f"{name} should be {dtype} and is {has} ({engine.get_tensor_mode(name)})"
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            return f"{name} has to be in host memory"
    if engine.num_optimization_profiles != len(facts.profiles):
        return f"{engine.num_optimization_profiles} profiles instead of {len(facts.profiles)}"
    for index, profile in enumerate(facts.profiles):
        for name in inputs:
            built = tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(name, index))
            if built != profile.shapes[name]:
                return f"profile {profile.name} was built with {built} for {name} instead of {profile.shapes[name]}"
    return None
