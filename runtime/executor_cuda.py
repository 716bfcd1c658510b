"""Runs an engine of the `cuda` target.

    step -> check shapes -> fill pinned staging -> one copy to the device -> engine, or a captured graph of it
         -> logits, which are sampled where they are (`sampler_device.py`)

Nothing is waited for but, before the staging memory is written again, the last copy from it: what reads tokens waits.
Pages, inputs and logits are allocated once. Decode steps are padded to few sizes (`trt_shapes.py`); the first step of a
size runs as it is and is then captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ..compile.bundle import Manifest
from ..errors import ConfigError, EngineError
from ..plugins_trt.cuda_engine import WEIGHTS_FILE, Attend, CudaEngine
from .cuda_memory import CudaMemoryPlan, CudaNeeds, plan_memory
from .executor import ExecutorLimits, StepOutput
from .inputs import StepInputs
from .sampler import Sampler
from .sampler_device import DeviceSampler, TorchTransfer
from .torch_device import TorchDevice
from .trt_facts import STEP_INPUTS, EngineFacts
from .trt_loading import rebuild
from .trt_memory import engine_limits
from .trt_shapes import Placement, Placer, StepSize, check_consistent, fill

log = logging.getLogger(__name__)


class CudaExecutor:
    """`Executor` on AOTInductor packages and Triton kernels.

    `device` is owned by the executor from now on; `attend` is for tests. With `use_graphs`, decode steps are captured
    the first time that their size comes up. Raises `BundleError` naming the file that does not load, `ConfigError`
    naming the setting when memory does not suffice.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        facts: EngineFacts,
        *,
        device: TorchDevice,
        kv_cache_bytes: int | None = None,
        attend: Attend | None = None,
        use_graphs: bool = True,
    ) -> None:
        self._device = device
        self._graphs: dict[StepSize, Callable[[], None]] = {}
        self._samplers: WeakSet[DeviceSampler] = WeakSet()
        self._transfer = TorchTransfer(device.device, self._while_open)
        self._engine: CudaEngine | None = None
        self._staging = self._inputs = self._logits = torch.empty(0)
        self._is_closed = False
        try:
            needs = CudaNeeds.read(manifest, rebuild(manifest, directory))
            self._memory = plan_memory(
                facts,
                needs,
                manifest.limits,
                weight_bytes=(directory / WEIGHTS_FILE).stat().st_size,
                kv_cache_bytes=kv_cache_bytes,
                free_bytes=device.free_bytes(),
            )
            num_blocks = self._memory.num_blocks
            self._limits = engine_limits(facts, manifest.limits, num_blocks, self._memory.num_logits_rows)
            self._placer = Placer(facts, self._limits, use_graphs=use_graphs)
            self._engine = CudaEngine(directory, device=device.device, num_blocks=num_blocks, attend=attend)
            self._allocate()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        plan, device = self._memory, self._device.device
        try:
            self._staging = self._device.allocate_staging(plan.input_bytes)
            self._inputs = torch.empty(plan.input_bytes, dtype=torch.uint8, device=device)
            shape = (plan.num_logits_rows, self._limits.vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=device)
        except RuntimeError as error:
            raise ConfigError(
                f"kv_cache_memory: nothing is left for inputs and logits ({error}); lower it"
            ) from error

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def memory(self) -> CudaMemoryPlan:
        return self._memory

    def make_sampler(self, eos_token_ids: Iterable[int]) -> Sampler:
        sampler = DeviceSampler(
            self._limits.vocab_size, eos_token_ids, transfer=self._transfer, sizes=self._memory.sampling
        )
        self._samplers.add(sampler)
        return sampler

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Raises `EngineError`, with nothing enqueued, when a shape is outside what the engine was built for or a
        page outside what was allocated."""
        engine = self._open_engine()
        check_consistent(inputs, self._limits.block_size)
        self._check_pages(inputs)
        passes = self._split(inputs.logits_rows)
        placements = [self._placer.place(inputs, len(rows)) for rows in passes]
        with torch.inference_mode(), self._device.faults():
            engine.copy_blocks(inputs.block_copies.tolist())
            if len(passes) == 1:
                return StepOutput(self._run(inputs, passes[0], placements[0]))
            # Each run overwrites the logits of the last one, and they would not fit side by side.
            runs = zip(passes, placements, strict=True)
            parts = [self._run(inputs, rows, placement).to("cpu", copy=True) for rows, placement in runs]
            return StepOutput(torch.cat(parts))

    def close(self) -> None:
        """Give back the memory; a later `execute`, and sampling, raise `EngineError`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._device.synchronize()  # graphs may be in flight
        finally:
            self._graphs.clear()
            for sampler in self._samplers:
                sampler.release()
            self._transfer.release()
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._staging = self._inputs = self._logits = torch.empty(0)
            self._device.close()

    def _open_engine(self) -> CudaEngine:
        if self._engine is None:
            raise EngineError("the executor is closed")
        return self._engine

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """What samplers do on the device happens within this."""
        self._open_engine()
        with self._device.faults():
            yield

    def _check_pages(self, inputs: StepInputs) -> None:
        num_blocks = self._limits.num_blocks
        for name, pages in (("block_table", inputs.block_table), ("block_copies", inputs.block_copies)):
            if pages.size and not 0 <= pages.min() <= pages.max() < num_blocks:
                raise EngineError(
                    f"{name}: pages {pages.min()} to {pages.max()}, but there are 0 to {num_blocks - 1}"
                )

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        """The wanted rows in as many runs as the memory for logits asks for: prompt log-probabilities only.

        A step may be run again: it writes the same K/V to the same places.
        """
        most = self._memory.num_logits_rows
        return [rows[i : i + most] for i in range(0, max(len(rows), 1), most)]

    def _run(self, inputs: StepInputs, rows: np.ndarray, placement: Placement) -> Tensor:
        """Logits of `rows` [len(rows), vocab_size] on the device, valid until the next run."""
        size = placement.size
        self._device.wait_for_upload()
        fill(self._staging.numpy(), size, inputs, rows)
        self._device.upload(self._staging[: size.num_bytes], self._inputs[: size.num_bytes])
        if (graph := self._graphs.get(size)) is not None and placement.is_captured:
            graph()
            return self._logits[: len(rows)]
        self._forward(size, int(np.diff(inputs.query_start_loc).max(initial=0)))
        if placement.is_captured:
            self._capture(size)
        return self._logits[: len(rows)]

    def _forward(self, size: StepSize, max_rows: int) -> None:
        """Enqueue the engine on the inputs as `fill` lays them out."""
        step = {name: self._input(size, name) for name in size.shapes}
        self._logits[: size.num_rows].copy_(self._open_engine().run(step, max_rows=max_rows))

    def _input(self, size: StepSize, name: str) -> Tensor:
        shape, dtype = size.shapes[name], getattr(torch, STEP_INPUTS[name])
        num_bytes = dtype.itemsize * int(np.prod(shape))
        return self._inputs[size.offsets[name] :][:num_bytes].view(dtype).view(shape)

    def _capture(self, size: StepSize) -> None:
        """Capture a decode step of the size that has just run. What cannot be captured goes on without graphs."""
        try:
            self._graphs[size] = self._device.capture(lambda: self._forward(size, 1))
        except EngineError as error:
            log.warning("decode steps run without CUDA graphs from now on: %s", str(error))
            self._placer.use_graphs = False
            self._device.synchronize()  # graphs of other sizes may be in flight
            self._graphs.clear()
