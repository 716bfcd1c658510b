"""A bundle's plan -> a deserialised engine, or a `BundleError`: what it was built with, what is here, what to do.

What can be compared is compared before the plan is touched. Plugins are registered from `plugins_trt`: neither the
builder nor the model's code is needed where an engine runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..compile.bundle import Manifest, build_command_into
from ..errors import BuildError, BundleError
from ..plugins_trt.plugin import Operator, dtype_name, register
from ..plugins_trt.tensorrt import load
from .trt_facts import LOGITS, PLAN_FILE, STEP_INPUTS, EngineFacts

# What TensorRT says of a plan that it does not take, and what that means.
_CAUSES = (
    (r"plugin|creator", "it uses a plugin that is not registered"),
    (r"version|magic|malformed|header", "it was written by another version of TensorRT, or is damaged"),
    (r"compute capability|different device|hardware compat|SM ?\d", "it was built for another GPU"),
    (r"memory", "the GPU has too little free memory for it"),
    (r"driver|cuda ?error|cuda runtime", "the CUDA driver is missing or too old"),
)
_MAX_MESSAGES = 16
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


def make_log(trt: Any) -> Any:
    """A logger that keeps the latest errors in `errors`; TensorRT needs it as long as anything of it lives."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: deque[str] = deque(maxlen=_MAX_MESSAGES)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split())[:_MAX_DETAIL])

    return Log()


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
        raise BundleError(f"{path}: {_explain([*reasons, *log.errors])}; {remedy}")
    return engine


def _invalidity(trt: Any, runtime: Any, plan: mmap.mmap) -> list[str]:
    """What TensorRT-RTX finds in the plan's header, as its own names; TensorRT has no such question."""
    if not hasattr(runtime, "get_engine_validity"):
        return []
    _, flags = runtime.get_engine_validity(plan)
    kinds = trt.EngineInvalidityDiagnostics.__members__.values()
    return [kind.name.lower().replace("_", " ") for kind in kinds if int(flags) & int(kind)]


def _explain(messages: Sequence[str]) -> str:
    said = "; ".join(messages) or "it gives no reason"
    causes = (
        cause for message in messages for pattern, cause in _CAUSES if re.search(pattern, message, re.I)
    )
    cause = next(causes, "the plan does not load")
    return f"{cause} (TensorRT: {said[:_MAX_DETAIL]})"


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
