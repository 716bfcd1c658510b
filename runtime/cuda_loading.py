"""A bundle of the `cuda` target -> its executor, or a `BundleError`: what it was built for, what is here, what to do.

Torch is imported once the files that can be checked without it have been.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..compile.bundle import Manifest
from ..errors import BundleError
from .trt_facts import EngineFacts
from .trt_loading import rebuild

if TYPE_CHECKING:
    from .executor_cuda import CudaExecutor


def open_executor(directory: Path, manifest: Manifest, *, kv_cache_bytes: int | None = None) -> CudaExecutor:
    """The executor of the bundle on this machine's first GPU. `check_bundle` has compared torch and the CPU.

    Raises `BundleError` before the engine is touched when the bundle is for something else than what is here,
    `ConfigError` when memory does not suffice.
    """
    facts = EngineFacts.read(directory, rebuild(manifest, directory))
    from .cuda_device import CudaDevice, has_cuda

    gpu = CudaDevice().compute_capability if has_cuda() else None
    has_triton = importlib.util.find_spec("triton") is not None
    compiler = find_compiler(os.environ)
    check_needs(manifest, facts, directory, gpu=gpu, has_triton=has_triton, compiler=compiler)
    from .executor_cuda import CudaExecutor
    from .torch_device import TorchGpu

    return CudaExecutor(directory, manifest, facts, device=TorchGpu(), kv_cache_bytes=kv_cache_bytes)


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """The C compiler that Triton would start: `CC` and nothing else where it is set, otherwise gcc or clang.

    Triton looks for it when the first kernel is launched, to compile what launches it (triton/runtime/build.py).
    """
    path = environment.get("PATH")
    names = [environment["CC"]] if "CC" in environment else ["gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def check_needs(
    manifest: Manifest,
    facts: EngineFacts,
    where: Path,
    *,
    gpu: str | None,
    has_triton: bool,
    compiler: str | None,
) -> None:
    """Raise `BundleError` unless the bundle is for a GPU like `gpu` (a compute capability; None: there is none) and
    the kernels of its attention can be compiled, which takes Triton and a C compiler."""
    built, found = [], []
    if facts.target != manifest.target:
        built.append(f"an engine for {facts.target}")
        found.append(f"a manifest for {manifest.target}")
    if gpu is None or gpu not in facts.gpus:
        built.append(f"an NVIDIA GPU of compute capability {' or '.join(facts.gpus)}")
        found.append("no CUDA device" if gpu is None else f"one of {gpu}")
    remedy = rebuild(manifest, where)
    if gpu is None:
        remedy = f"run it where there is such a GPU, or rebuild for this machine with --target cpu ({remedy})"
    elif not has_triton:
        built.append("Triton, which compiles the kernels of its attention")
        found.append("no triton")
        remedy = f"`pip install 'pelton[cuda]'`, then, if anything else differs, {remedy}"
    if gpu is not None and compiler is None:
        built.append("a C compiler, with which Triton compiles what launches its kernels")
        found.append("neither the one that CC names nor gcc or clang")
        remedy = f"install gcc, or set CC to a compiler's path, then, if anything else differs, {remedy}"
    if built:
        raise BundleError(
            f"{where}: built with/for {' and '.join(built)}, found {' and '.join(found)}; {remedy}"
        )
