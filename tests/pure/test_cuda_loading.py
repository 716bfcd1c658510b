"""Bundles of the `cuda` target that cannot run here say what they were built for, what was found and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pelton.compile.bundle import HostFacts, Manifest, check_bundle
from pelton.errors import BundleError, ConfigError
from pelton.runtime.cuda_loading import check_needs, find_compiler
from pelton.runtime.cuda_memory import CudaNeeds, plan_memory
from support.trt_bundle import COMMAND, limits, read_facts, write_bundle


def bundle(directory: Path, **changes: Any) -> Manifest:
    """For a GPU of 9.0; `changes` are fields of `engine.json`."""
    manifest = write_bundle(
        directory, limits(), **{"target": "cuda", "gpus": ["9.0"], "plugins": [], **changes}
    )
    return replace(manifest, target="cuda", engine={"activation_bytes": 1 << 20, "num_logits_rows": 16})


def needs(
    directory: Path,
    *,
    gpu: str | None,
    has_triton: bool = True,
    compiler: str | None = "/usr/bin/gcc",
    **changes: Any,
) -> str:
    """What `check_needs` says; empty when it is content."""
    manifest = bundle(directory, **changes)
    try:
        check_needs(
            manifest,
            read_facts(directory),
            directory,
            gpu=gpu,
            has_triton=has_triton,
            compiler=compiler,
        )
    except BundleError as error:
        return str(error).removeprefix(f"{directory}: ")
    return ""


def test_a_bundle_for_this_machine_is_taken(tmp_path: Path) -> None:
    assert needs(tmp_path, gpu="9.0") == ""


def test_another_gpu_is_named_with_how_to_rebuild(tmp_path: Path) -> None:
    assert needs(tmp_path, gpu="8.9") == (
        "built with/for an NVIDIA GPU of compute capability 9.0, found one of 8.9; "
        f"rebuild with: {COMMAND} -o {tmp_path}"
    )


def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    assert needs(tmp_path, gpu=None, has_triton=False, compiler=None) == (
        "built with/for an NVIDIA GPU of compute capability 9.0, found no CUDA device; run it where there is such a "
        f"GPU, or rebuild for this machine with --target cpu (rebuild with: {COMMAND} -o {tmp_path})"
    )


def test_a_missing_triton_is_named(tmp_path: Path) -> None:
    said = needs(tmp_path, gpu="9.0", has_triton=False)
    assert said.startswith(
        "built with/for Triton, which compiles the kernels of its attention, found no triton; "
    )
    assert "pip install 'pelton[cuda]'" in said


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    assert needs(tmp_path, gpu="9.0", compiler=None) == (
        "built with/for a C compiler, with which Triton compiles what launches its kernels, found neither the one "
        "that CC names nor gcc or clang; install gcc, or set CC to a compiler's path, then, if anything else differs, "
        f"rebuild with: {COMMAND} -o {tmp_path}"
    )
    said = needs(tmp_path, gpu="9.0", has_triton=False, compiler=None)
    assert "found no triton and neither the one" in said
    assert "pip install 'pelton[cuda]'" in said


def test_the_compiler_is_the_one_that_triton_would_start(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    assert find_compiler(environment) is None
    paths = {}
    for name in ("clang", "gcc", "other"):  # gcc goes before clang
        paths[name] = tmp_path / name
        paths[name].touch(mode=0o755)
        assert find_compiler(environment) == str(paths["clang" if name == "clang" else "gcc"])
    assert find_compiler({**environment, "CC": "other"}) == str(paths["other"])
    assert find_compiler({**environment, "CC": str(paths["other"])}) == str(paths["other"])
    assert find_compiler({**environment, "CC": "nowhere"}) is None  # Triton looks no further


def test_an_engine_of_another_target_is_refused(tmp_path: Path) -> None:
    said = needs(tmp_path, gpu="9.0", target="tensorrt")
    assert said.startswith("built with/for an engine for tensorrt, found a manifest for cuda; rebuild with")


def test_packages_load_only_in_the_torch_that_compiled_them(tmp_path: Path) -> None:
    manifest = bundle(tmp_path)
    host = HostFacts(machine="x86_64", cpu_flags=frozenset(), torch_version=manifest.versions.torch)
    check_bundle(manifest, tmp_path, host)
    with pytest.raises(
        BundleError, match=r"built with/for torch 2\.13\.0, found torch 2\.14\.0; rebuild with"
    ):
        check_bundle(manifest, tmp_path, replace(host, torch_version="2.14.0"))


@pytest.mark.parametrize("value", [None, 0, -1, "16", True, 1.5])
@pytest.mark.parametrize("name", ["activation_bytes", "num_logits_rows"])
def test_a_manifest_without_its_memory_is_refused(name: str, value: object, tmp_path: Path) -> None:
    manifest = bundle(tmp_path)
    damaged = replace(manifest, engine={**manifest.engine, name: value})
    with pytest.raises(
        BundleError, match=rf"manifest\.json: engine\.{name}: must be a positive integer.*rebuild"
    ):
        CudaNeeds.read(damaged, "rebuild it")


def test_memory_is_an_equation(tmp_path: Path) -> None:
    manifest = bundle(tmp_path)
    facts, wanted = read_facts(tmp_path), CudaNeeds.read(manifest, "rebuild it")
    options: dict[str, Any] = {"weight_bytes": 5000, "kv_cache_bytes": 7 * facts.block_bytes}
    plan = plan_memory(facts, wanted, manifest.limits, **options, free_bytes=1 << 30)
    assert plan.num_blocks == 7
    assert plan.num_logits_rows == 16
    assert plan.device_bytes == (
        5000
        + 7 * facts.block_bytes
        + (1 << 20)
        + plan.input_bytes
        + 16 * facts.vocab_size * 4
        + plan.sampling.device_bytes
    )
    assert plan_memory(facts, wanted, manifest.limits, **options, free_bytes=plan.device_bytes) == plan
    with pytest.raises(
        ConfigError, match=r"^kv_cache_memory: .*but only \d+ MiB of the GPU are free; build again"
    ):
        plan_memory(facts, wanted, manifest.limits, **options, free_bytes=plan.device_bytes - 1)
