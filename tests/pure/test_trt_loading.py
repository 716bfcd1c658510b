"""Bundles of TensorRT targets that cannot run here say what they were built with, what was found and what to do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pelton.compile.bundle import Versions, read_manifest
from pelton.errors import BundleError
from pelton.runtime.executor_trt import TensorRTExecutor
from pelton.runtime.trt_facts import PLAN_FILE, EngineFacts, EngineProfile
from pelton.runtime.trt_loading import check_needs
from support.fake_cuda import FakeDevice
from support.fake_tensorrt import FakeTensorRT
from support.trt_bundle import COMMAND, engine_json, limits, open_fake, read_facts, write_bundle


def needs(directory: Path, *, version: str | None, gpu: str | None, **changes: Any) -> str:
    """What `check_needs` says of a bundle built with tensorrt-rtx 1.7.1; empty when it is content."""
    manifest = write_bundle(directory, limits(), **changes)
    try:
        check_needs(manifest, read_facts(directory), directory, version=version, gpu=gpu)
    except BundleError as error:
        return str(error).removeprefix(f"{directory}: ")
    return ""


def test_tr_01_a_bundle_for_this_machine_is_taken(tmp_path: Path) -> None:
    assert needs(tmp_path, version="1.7.1", gpu="8.9") == ""
    assert needs(tmp_path, version="1.7.1", gpu="8.9", gpus=["8.6", "8.9"]) == ""


@pytest.mark.parametrize(
    ("version", "gpu", "changes", "built", "found"),
    [
        ("1.8.0", "8.9", {}, "tensorrt-rtx 1.7.1", "tensorrt-rtx 1.8.0"),
        (None, "8.9", {}, "tensorrt-rtx 1.7.1", "no tensorrt-rtx"),
        ("1.7.1", "9.0", {"gpus": ["8.6", "8.9"]}, "an NVIDIA GPU of compute capability 8.6 or 8.9", "one of 9.0"),
        ("1.7.1", "8.9", {"target": "tensorrt"}, "a plan for tensorrt", "a manifest for tensorrt-rtx"),
        (
            "2.0", "9.0", {"gpus": ["8.9"]},
            "tensorrt-rtx 1.7.1 and an NVIDIA GPU of compute capability 8.9", "tensorrt-rtx 2.0 and one of 9.0",
        ),
    ],
)  # fmt: skip
def test_tr_01_what_differs_is_named_with_what_was_found_and_how_to_rebuild(
    tmp_path: Path, version: str | None, gpu: str, changes: dict[str, Any], built: str, found: str
) -> None:
    assert needs(tmp_path, version=version, gpu=gpu, **changes) == (
        f"built with/for {built}, found {found}; rebuild with: {COMMAND} -o {tmp_path}"
    )


def test_tr_01_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    assert needs(tmp_path, version="1.7.1", gpu=None, gpus=["8.9"]) == (
        "built with/for an NVIDIA GPU of compute capability 8.9, found no CUDA device; run it where there is such a "
        f"GPU, or rebuild for this machine with --target cpu (rebuild with: {COMMAND} -o {tmp_path})"
    )


def refusal(directory: Path, *, is_rtx: bool = True) -> tuple[str, FakeDevice]:
    """What the executor says of the bundle in `directory`, and the device that it was to run on."""
    facts = read_facts(directory)
    device = FakeDevice()
    trt = FakeTensorRT(device, facts, is_rtx=is_rtx)
    with pytest.raises(BundleError) as caught:
        TensorRTExecutor(directory, read_manifest(directory), facts, trt=trt, device=device)
    return str(caught.value), device


@pytest.mark.parametrize("is_rtx", [True, False], ids=["rtx", "standard"])
def test_tr_01_a_plan_that_does_not_load_is_explained(tmp_path: Path, is_rtx: bool) -> None:
    write_bundle(tmp_path, limits())
    (tmp_path / PLAN_FILE).write_bytes(b"something else")
    said, device = refusal(tmp_path, is_rtx=is_rtx)
    assert said == (
        f"{tmp_path / PLAN_FILE}: it was written by another version of TensorRT, or is damaged (TensorRT: "
        + ("version mismatch; " if is_rtx else "")
        + f"header.magicTag == kEXPECTED failed); rebuild with: {COMMAND} -o {tmp_path}"
    )
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("content", [b"", None], ids=["empty", "missing"])
def test_tr_01_a_plan_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    write_bundle(tmp_path, limits())
    (tmp_path / PLAN_FILE).unlink()
    if content is not None:
        (tmp_path / PLAN_FILE).write_bytes(content)
    said, _ = refusal(tmp_path)
    assert said.startswith(f"{tmp_path / PLAN_FILE}: cannot be read")
    assert said.endswith(f"rebuild with: {COMMAND} -o {tmp_path}")


@pytest.mark.parametrize("name", ["sliding_attention", "paged-attention", "..paged_attention", ""])
def test_tr_06_a_plugin_that_is_not_here_is_named(tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path, limits(), plugins=["paged_attention", name])
    said, _ = refusal(tmp_path)
    assert said == (
        f"{tmp_path}: its plan uses the plugin {name!r}, which this Pelton does not have; "
        f"rebuild with: {COMMAND} -o {tmp_path}"
    )


def test_tr_06_plugins_are_registered_without_the_builder_or_torch(tmp_path: Path) -> None:
    write_bundle(tmp_path, limits())
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from pathlib import Path
from support.fake_cuda import FakeDevice
from support.fake_tensorrt import FakeTensorRT
from pelton.compile.bundle import read_manifest
from pelton.runtime.executor_trt import TensorRTExecutor
from pelton.runtime.trt_facts import EngineFacts
directory = Path({str(tmp_path)!r})
facts = EngineFacts.read(directory, "rebuild it")
device = FakeDevice()
trt = FakeTensorRT(device, facts)
executor = TensorRTExecutor(directory, read_manifest(directory), facts, trt=trt, device=device)
assert trt.registry.get_creator("paged_attention", "1", "pelton") is not None
executor.close()
loaded = [name for name in sys.modules if name.startswith(("torch", "triton", "tensorrt", "pelton.compile"))]
print(*sorted(loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["pelton.compile", "pelton.compile.bundle"]


def test_a_plan_with_other_profiles_than_engine_json_is_refused(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path, limits())
    facts = read_facts(tmp_path)
    larger = write_bundle(tmp_path / "other", limits(max_step_tokens=32))
    device = FakeDevice()
    trt = FakeTensorRT(device, read_facts(tmp_path / "other"))
    with pytest.raises(
        BundleError, match=r"do not belong together: profile mixed was built with .* for input_ids"
    ):
        TensorRTExecutor(tmp_path, manifest, facts, trt=trt, device=device)
    assert larger.limits.max_step_tokens == 32


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda facts: replace(facts, kv_heads=(2,), head_dims=(4,)), "tensors k_caches_1"),
        (lambda facts: replace(facts, cache_dtype="int8"), "k_caches_0 should be float16 and is int8"),
        (lambda facts: replace(facts, profiles=facts.profiles[1:]), "1 profiles instead of 2"),
    ],
)
def test_a_plan_with_other_tensors_than_engine_json_is_refused(
    tmp_path: Path, change: Any, fault: str
) -> None:
    manifest = write_bundle(tmp_path, limits())
    facts: EngineFacts = read_facts(tmp_path)
    device = FakeDevice()
    trt = FakeTensorRT(device, change(facts))
    with pytest.raises(BundleError, match=fault):
        TensorRTExecutor(tmp_path, manifest, facts, trt=trt, device=device)
    assert device.allocated_bytes == 0


def test_a_runtime_that_does_not_start_is_an_error_of_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeTensorRT, logger: Any) -> None:
        logger.log(logger.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(FakeTensorRT, "Runtime", refuse)
    with pytest.raises(BundleError, match=r"the CUDA driver is missing or too old .*error: 35\); install a"):
        open_fake(tmp_path)


def test_the_manifest_s_compiler_is_what_the_version_is_compared_with(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path, limits())
    older = Versions(pelton="0.1.0", torch="2.13.0", transformers="5.24.0", compiler="tensorrt-rtx 1.6.0")
    with pytest.raises(BundleError, match=r"built with/for tensorrt-rtx 1\.6\.0, found tensorrt-rtx 1\.7\.1"):
        check_needs(
            replace(manifest, versions=older), read_facts(tmp_path), tmp_path, version="1.7.1", gpu="8.9"
        )


def test_the_profiles_of_engine_json_are_those_of_the_builder() -> None:
    names = [profile["name"] for profile in engine_json(limits())["profiles"]]
    assert names == ["decode", "mixed"]
    assert EngineProfile("mixed", {"x": ((1,), (2,), (3,))}).fault({"x": (1, 1)}) == (
        "x: shape (1, 1) is outside (1,) to (3,), which profile mixed was built for"
    )
