"""Bundles of the `cuda` target that are compiled for the CPU, and the CPU in the place of its GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pelton.compile import build_plan
from pelton.compile.build import build
from pelton.compile.bundle import Manifest, read_manifest
from pelton.compile.progress import Progress
from pelton.compile.targets.cuda_target import CudaTarget
from pelton.errors import EngineError
from pelton.runtime.executor_cuda import CudaExecutor
from pelton.runtime.torch_device import typed_faults
from pelton.runtime.trt_facts import EngineFacts

BLOCK = 16
_LIMITS = {"max_batch_size": 6, "max_step_tokens": 256, "kv_cache_bytes": 2 << 20}


class HostTarget(CudaTarget):
    """The target compiling for the CPU; its bundles say that they are for a GPU of 9.0."""

    dtypes = ("float32", "float16")

    def __init__(self, cache_dtype: torch.dtype | None) -> None:
        super().__init__(torch.device("cpu"), "9.0", cache_dtype)


def build_on_host(checkpoint: Path, output: Path, **request: Any) -> Path:
    """The real build, with its proofs, of everything but device code; an unchanged bundle is found."""
    own = build_plan._target
    build_plan._target = lambda _, cache_dtype: HostTarget(cache_dtype)  # type: ignore[assignment]
    try:
        options = {"block_size": BLOCK, **_LIMITS, **request}
        plan = build_plan.resolve(
            build_plan.BuildRequest(model=str(checkpoint), output=output, target="cuda", **options)
        )
        build(plan, Progress(StringIO()))
    finally:
        build_plan._target = own
    return output


class HostDevice:
    """`TorchDevice` on the CPU, where what is enqueued has run: a captured graph is its function."""

    def __init__(self, free_bytes: int = 1 << 30, *, can_capture: bool = True) -> None:
        self._free_bytes = free_bytes
        self._can_capture = can_capture
        self._in_use: tuple[Tensor, Tensor] | None = None  # staging memory, and what was in it
        self.num_captures = 0
        self.num_replays = 0
        self.num_uploads = 0
        self.is_closed = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def free_bytes(self) -> int:
        return self._free_bytes

    def allocate_staging(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def upload(self, staging: Tensor, destination: Tensor) -> None:
        assert self._in_use is None, "an upload was not waited for"
        destination.copy_(staging)
        self._in_use = staging, staging.clone()
        self.num_uploads += 1

    def wait_for_upload(self) -> None:
        if self._in_use is not None:
            staging, uploaded = self._in_use
            assert torch.equal(staging, uploaded), "staging memory was written while it was being copied"
        self._in_use = None

    def synchronize(self) -> None:
        self.wait_for_upload()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        if not self._can_capture:
            raise EngineError("it cannot be captured")
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            enqueue()

        return replay

    def faults(self) -> AbstractContextManager[None]:
        return typed_faults()

    def close(self) -> None:
        self.is_closed = True


def open_on_host(
    directory: Path, *, device: HostDevice | None = None, manifest: Manifest | None = None, **options: Any
) -> CudaExecutor:
    manifest = manifest or read_manifest(directory)
    facts = EngineFacts.read(directory, "rebuild it")
    return CudaExecutor(directory, manifest, facts, device=device or HostDevice(), **options)
