"""The one place that imports TensorRT: `load` gives a target's module, `find_version` its version without an import.

TensorRT and TensorRT-RTX have the same Python API, so everything else is written against the module that `load`
returns. TensorRT-RTX is taken from its own wheel, or from the bindings wheel over the libraries of ONNX Runtime's
execution provider, which is how it can be had on a machine with no GPU.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import BuildError

TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt-rtx"

# Distributions that bring a target's Python module, in order of preference.
_DISTRIBUTIONS = {
    TENSORRT: ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    TENSORRT_RTX: ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12"),
}
_HOW_TO_GET = {
    TENSORRT: "TensorRT is not installed: `pip install tensorrt` on a machine with an NVIDIA GPU; "
    "`--target tensorrt-rtx` can be built on this one",
    TENSORRT_RTX: "TensorRT-RTX is not installed: `pip install 'pelton[rtx]'`",
}
_PROVIDER = "onnxruntime_ep_nv_tensorrt_rtx"


def find_version(target: str) -> str | None:
    """Version of the installed distribution of `target`, None if there is none. Imports nothing."""
    for name in _DISTRIBUTIONS[target]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_version(target: str) -> str:
    """Like `find_version`; raises `BuildError` saying how to get it."""
    version = find_version(target)
    if version is None:
        raise BuildError(f"target: {_HOW_TO_GET[target]}")
    return version


@cache
def load(target: str) -> Any:
    """The TensorRT module of `target`. Raises `BuildError` saying how to get it, or what its import said."""
    require_version(target)
    try:
        if target == TENSORRT:
            return importlib.import_module("tensorrt")
        if importlib.util.find_spec("tensorrt_rtx") is not None:
            return importlib.import_module("tensorrt_rtx")
        _load_provider_libraries()
        return importlib.import_module("tensorrt_rtx_bindings")
    except (ImportError, OSError) as error:
        raise BuildError(f"target: {target} is installed but cannot be loaded: {error}") from error


@contextmanager
def collector_held() -> Iterator[None]:
    """Keep Python's cycle collector out of TensorRT's calls; also a decorator.

    TensorRT logs while it holds a lock. A builder of an earlier build that the collector finds in the log's callback
    takes the same lock as it goes, and waits for ever.
    """
    is_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _load_provider_libraries() -> None:
    """Load the libraries of the execution provider's wheel, where the bindings look for them.

    The ONNX parser opens "libtensorrt_rtx.so", a name without a version that the wheel does not have, and ends the
    process when that fails. An empty library of that name, linked to the real one, answers to it.
    """
    spec = importlib.util.find_spec(_PROVIDER)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"its libraries are missing: {_HOW_TO_GET[TENSORRT_RTX]}")
    home = Path(next(iter(spec.submodule_search_locations)))
    for pattern in ("libcudart.so.*", "libtensorrt_rtx.so.1.*", "libtensorrt_onnxparser_rtx.so.1.*"):
        for library in sorted(home.glob(pattern)):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    (real,) = home.glob("libtensorrt_rtx.so.1.*")
    with _alias(real, "libtensorrt_rtx.so") as alias:
        ctypes.CDLL(str(alias), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def _alias(library: Path, soname: str) -> Iterator[Path]:
    """An empty shared library called `soname` that depends on `library`; the file is gone afterwards."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ImportError(
            "a C compiler (cc) is needed once, to give its library the name that its parser opens"
        )
    with tempfile.TemporaryDirectory(prefix="pelton-") as work:
        directory = Path(work)
        (directory / "libtensorrt_rtx.so.1").symlink_to(library)
        alias = directory / soname
        command = [
            compiler, "-shared", "-o", str(alias), "-xc", "/dev/null", f"-Wl,-soname,{soname}",
            "-Wl,--no-as-needed", f"-L{directory}", "-l:libtensorrt_rtx.so.1",
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except subprocess.SubprocessError as error:
            raise ImportError(f"{compiler} cannot link a library: {error}") from error
        yield alias
