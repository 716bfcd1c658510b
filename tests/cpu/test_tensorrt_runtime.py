"""Where the fake's word is not enough: the names of the real bindings, a real refusal, and machines without a GPU."""

from __future__ import annotations

import inspect
import platform
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pelton.compile.bundle import HostNeeds, write_manifest
from pelton.errors import BuildError, BundleError, ConfigError
from pelton.plugins_trt.messages import make_log
from pelton.plugins_trt.tensorrt import load
from pelton.runtime import trt_loading
from pelton.runtime.engine import EngineConfig
from pelton.runtime.load import load_engine
from pelton.runtime.trt_facts import PLAN_FILE
from support import fake_tensorrt as fake
from support.trt_bundle import COMMAND, limits, read_facts, write_bundle
from support.vocabularies import byte_level_backend, write_files


@pytest.fixture(scope="module")
def rtx() -> Any:
    try:
        return load("tensorrt-rtx")
    except BuildError as error:
        pytest.skip(str(error))


# A class of the fake, the real one's name, and what only tests use of the fake.
_CLASSES = [
    (fake._RtxRuntime, "Runtime", set()),
    (fake._RtxRuntimeConfig, "IRuntimeConfig", set()),
    (fake._Engine, "ICudaEngine", set()),
    (fake._RtxContext, "IExecutionContext", {"is_bound_to"}),
    (fake._Registry, "IPluginRegistry", set()),
    (fake.ILogger, "ILogger", set()),
]


@pytest.mark.parametrize(("fake_class", "name", "own"), _CLASSES, ids=[name for _, name, _ in _CLASSES])
def test_the_fake_has_no_method_that_tensorrt_has_not(
    rtx: Any, fake_class: type, name: str, own: set[str]
) -> None:
    real = getattr(rtx, name)
    public = {key for key, value in inspect.getmembers(fake_class) if not key.startswith("_")} - own
    assert public, "the fake has lost its methods"
    for method in public:
        assert hasattr(real, method), f"{name} has no {method}"
        implementation = inspect.getattr_static(fake_class, method)
        if inspect.isfunction(implementation):
            count = len(inspect.signature(implementation).parameters)
            assert count in argument_counts(getattr(real, method)), f"{name}.{method} takes other arguments"


def argument_counts(method: Any) -> set[int]:
    """How many arguments, `self` included, each overload may be called with, as pybind11 documents them."""
    counts: set[int] = set()
    for line in re.findall(rf"^(?:\d+\. )?{method.__name__}\((.*)\) ->", method.__doc__, re.MULTILINE):
        parameters = re.findall(r"(?:^|, )(\w+): ", line)
        optional = len(re.findall(r" = ", line))
        counts.update(range(len(parameters) - optional, len(parameters) + 1))
    return counts


@pytest.mark.parametrize(
    "kind",
    [
        fake.ExecutionContextAllocationStrategy,
        fake.DynamicShapesKernelSpecializationStrategy,
        fake.TensorIOMode,
        fake.TensorLocation,
        fake.EngineInvalidityDiagnostics,
        fake._Severity,
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_fake_s_enumerations_are_tensorrt_s(rtx: Any, kind: Any) -> None:
    real = rtx.ILogger.Severity if kind is fake._Severity else getattr(rtx, kind.__name__)
    for member in kind:
        assert int(real.__members__[member.name]) == int(member)


def test_the_fake_s_dtypes_are_tensorrt_s(rtx: Any) -> None:
    names = ("float32", "float16", "bfloat16", "fp8", "int8", "int32", "int64", "bool")
    assert {name: getattr(rtx, name).name for name in names} == {
        name: getattr(fake.FakeTensorRT, name) for name in names
    }


def test_tr_01_the_real_library_refuses_a_plan_that_is_none(rtx: Any, tmp_path: Path) -> None:
    write_bundle(tmp_path, limits())
    (tmp_path / PLAN_FILE).write_bytes(b"x" * 1000)
    log = make_log(rtx)
    creators = trt_loading.register_plugins(rtx, read_facts(tmp_path), tmp_path, "rebuild it")
    runtime = rtx.Runtime(log)
    with pytest.raises(BundleError) as caught:
        trt_loading.deserialize(rtx, runtime, log, tmp_path, "rebuild it")
    said = str(caught.value)
    assert said.startswith(
        f"{tmp_path / PLAN_FILE}: it was written by another version of TensorRT, or is damaged"
    )
    assert "malformed engine" in said
    assert said.endswith("; rebuild it")
    assert len(creators) == 1


def bundle_for_here(directory: Path) -> None:
    """A bundle that `check_bundle` takes on this machine."""
    write_files(directory, byte_level_backend(), {})
    manifest = write_bundle(directory, limits())
    versions = replace(manifest.versions, torch=metadata.version("torch"))
    here = HostNeeds(machine=platform.machine(), cpu_flags=())
    write_manifest(replace(manifest, versions=versions, needs=here), directory)


def test_a_machine_without_a_gpu_is_told_what_the_bundle_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle_for_here(tmp_path)
    monkeypatch.setattr("pelton.runtime.cuda_device.has_cuda", lambda: False)
    monkeypatch.setattr(trt_loading, "load", lambda target: pytest.fail("TensorRT is loaded without need"))
    with pytest.raises(BundleError) as caught:
        load_engine(tmp_path)
    said = str(caught.value)
    assert "an NVIDIA GPU" in said
    assert (
        "no CUDA device; run it where there is such a GPU, or rebuild for this machine with --target cpu"
        in said
    )
    assert COMMAND in said


def test_cpu_threads_are_refused_for_a_gpu_target(tmp_path: Path) -> None:
    bundle_for_here(tmp_path)
    with pytest.raises(
        ConfigError, match="threads: only --target cpu computes on CPU threads, not tensorrt-rtx"
    ):
        load_engine(tmp_path, EngineConfig(num_threads=1))
