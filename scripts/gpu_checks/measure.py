"""Time on a device, and its ceilings. Functions take the device and a timer, so that any machine can run them."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from .records import Fact, Record
from .roofline import Ceilings
from .units import Unit

_MIB = 2**20
# Distributions whose versions are told, if they are there.
_DISTRIBUTIONS = (
    "pelton",
    "triton",
    "transformers",
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-rtx-cu13-bindings",
    "numpy",
)
COPY_BYTES = 2**30
PRODUCT_SIZE = 8192
# Names of facts; that of a dtype's ceiling is the dtype's with a suffix.
BANDWIDTH, PRODUCTS = "memory_bytes_per_s", "_flops_per_s"


class Timer(Protocol):
    def seconds(self, run: Callable[[], object], *, is_cold: bool = False) -> float:
        """Median time of `run`, warm-up excluded; `is_cold`: with nothing of its data in the device's caches."""
        ...


@dataclass(frozen=True, slots=True)
class HostTimer:
    """For CPU tensors, whose operations are done when they return. Does not clear caches."""

    repeats: int = 3

    def seconds(self, run: Callable[[], object], *, is_cold: bool = False) -> float:
        run()
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return median(times)


class CudaTimer:
    """By CUDA events around replays of a captured graph, so that no time of the host is in them.

    What cannot be captured is launched as it is. Clearing the L2 cache between runs also keeps the device busy while
    the host enqueues the next one.
    """

    def __init__(self, device: torch.device, *, repeats: int = 15, warmups: int = 3) -> None:
        self._device = device
        self._repeats = repeats
        self._warmups = warmups
        cache_bytes = _l2_cache_bytes(device)
        self._flushed = torch.empty(max(2 * cache_bytes, 64 * _MIB), dtype=torch.uint8, device=device)

    def seconds(self, run: Callable[[], object], *, is_cold: bool = False) -> float:
        for _ in range(self._warmups):
            run()
        torch.cuda.synchronize(self._device)
        launch = self._captured(run)
        events = []
        for _ in range(self._repeats):
            if is_cold:
                self._flushed.zero_()
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            launch()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self._device)
        return median(float(start.elapsed_time(end)) / 1e3 for start, end in events)

    def _captured(self, run: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError:
            torch.cuda.synchronize(self._device)  # raises if it was more than a forbidden operation
            return run
        return graph.replay


def units(device: torch.device, timer: Timer) -> Iterator[Unit]:
    """What the machine is and reaches."""
    yield Unit("versions", _versions)
    yield Unit("device", partial(_device, device))
    yield Unit("memory bandwidth", partial(bandwidth_ceiling, device, timer, COPY_BYTES))
    for dtype in (torch.float16, torch.bfloat16):
        run = partial(product_ceiling, device, timer, dtype, PRODUCT_SIZE)
        yield Unit(f"{name_of(dtype)} products", run)
    run = partial(float8_ceiling, device, timer, PRODUCT_SIZE)
    yield Unit("float8_e4m3fn products", run, is_ours=False)


def bandwidth_ceiling(device: torch.device, timer: Timer, num_bytes: int) -> list[Record]:
    """Bytes read and written per second by a copy of `num_bytes`."""
    source = torch.randint(0, 100, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = timer.seconds(lambda: target.copy_(source))
    return [Fact(BANDWIDTH, 2 * num_bytes / seconds)]


def product_ceiling(device: torch.device, timer: Timer, dtype: torch.dtype, size: int) -> list[Record]:
    """FLOP/s of a square product of random numbers (zeros are faster)."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    seconds = timer.seconds(lambda: torch.matmul(a, b, out=out))
    return [Fact(f"{name_of(dtype)}{PRODUCTS}", 2 * size**3 / seconds)]


def float8_ceiling(device: torch.device, timer: Timer, size: int) -> list[Record]:
    """As `product_ceiling`, by `torch._scaled_mm`; raises what that raises where there is none."""
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    seconds = timer.seconds(float8_product(a, b, torch.bfloat16))
    return [Fact(f"float8_e4m3fn{PRODUCTS}", 2 * size**3 / seconds)]


def ceilings_of(facts: Mapping[str, Any]) -> Ceilings | None:
    """From the facts of the functions above, by name; None if the bandwidth is not among them."""
    if BANDWIDTH not in facts:
        return None
    products = {
        name.removesuffix(PRODUCTS): value for name, value in facts.items() if name.endswith(PRODUCTS)
    }
    return Ceilings(facts[BANDWIDTH], products)


def float8_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Callable[[], Tensor]:
    """What computes `a @ b^T` of float8 tensors with the scale 1, by cuBLAS."""
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out_dtype)


def row_error(actual: Tensor, expected: Tensor) -> float:
    """`[..., N]`: the largest deviation within a row over the row's largest magnitude; NaN if anything is.

    Rows of zeros must be zeros.
    """
    expected = expected.to(torch.promote_types(expected.dtype, torch.float32))
    deviation = (actual.to(expected) - expected).abs().amax(-1)
    largest = expected.abs().amax(-1).clamp(min=torch.finfo(expected.dtype).tiny)
    return float((deviation / largest).max())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arch_of(device: torch.device) -> int:
    """Compute capability times ten. Raises `ValueError` for a device that has none."""
    if device.type != "cuda":
        raise ValueError(f"{device} has no compute capability")
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _versions() -> Iterator[Record]:
    yield Fact("python", platform.python_version())
    yield Fact("torch", torch.__version__)
    yield Fact("cuda", torch.version.cuda)
    for name in _DISTRIBUTIONS:
        try:
            yield Fact(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Fact(name, None)


def _device(device: torch.device) -> Iterator[Record]:
    properties: Any = torch.cuda.get_device_properties(device)
    yield Fact("gpu", properties.name)
    yield Fact("compute_capability", f"{properties.major}.{properties.minor}")
    yield Fact("multiprocessors", properties.multi_processor_count)
    yield Fact("memory_bytes", properties.total_memory)
    yield Fact("l2_cache_bytes", _l2_cache_bytes(device))
    yield Fact("driver", _driver())


def _l2_cache_bytes(device: torch.device) -> int:
    """0 if torch does not tell."""
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def _driver() -> str | None:
    """The driver's version, if `nvidia-smi` tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)
