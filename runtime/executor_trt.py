"""Runs a TensorRT engine: the only file that touches execution contexts and streams.

    step -> check shapes -> fill pinned staging -> one copy to the device -> engine (enqueued, or a captured graph)
         -> sampling of the logits where they are -> one copy of the tokens to pinned memory -> wait for that

Everything runs on one stream, so nothing else has to be waited for. Pages, inputs, logits, what sampling needs and the
memory for activations are allocated once. Each profile has an execution context, and each captured graph one of its
own: a graph is bound to the state of the context that it was captured from
(https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/performance/optimization.html, "Limitations of CUDA Graphs").
They can all share one block for activations because no two of them run at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from ..compile.bundle import Manifest
from ..errors import BundleError, ConfigError, EngineError
from ..plugins_trt.messages import make_log
from ..plugins_trt.tensorrt import collector_held, find_version
from .device import Device, DeviceBuffer, Graph, PinnedBuffer
from .executor import ExecutorLimits, StepOutput
from .inputs import StepInputs
from .sampler import Sampler
from .trt_facts import LOGITS, STEP_INPUTS, EngineFacts, Shape
from .trt_loading import (
    check_engine,
    check_needs,
    deserialize,
    explain,
    load_library,
    rebuild,
    register_plugins,
)
from .trt_memory import MemoryPlan, engine_limits, plan_memory
from .trt_sampling import SamplingBuffers, StreamTransfer
from .trt_shapes import Placement, Placer, StepSize, check_consistent, fill

if TYPE_CHECKING:  # brings torch
    from .sampler_device import DeviceSampler

log = logging.getLogger(__name__)

_FLOAT32 = 4


def open_executor(
    directory: Path, manifest: Manifest, *, kv_cache_bytes: int | None = None
) -> TensorRTExecutor:
    """The executor of the bundle on this machine's GPU.

    Raises `BundleError` before the plan is touched when the bundle was built with or for something else than what is
    here, `ConfigError` when memory does not suffice.
    """
    facts = EngineFacts.read(directory, rebuild(manifest, directory))
    # torch takes a second to import: a damaged bundle has been refused by now.
    from .cuda_device import CudaDevice, has_cuda

    device = CudaDevice() if has_cuda() else None
    check_needs(
        manifest,
        facts,
        directory,
        version=find_version(manifest.target),
        gpu=None if device is None else device.compute_capability,
    )
    assert device is not None  # check_needs has refused that
    trt = load_library(manifest, directory)
    return TensorRTExecutor(directory, manifest, facts, trt=trt, device=device, kv_cache_bytes=kv_cache_bytes)


@dataclass(slots=True)
class _Lane:
    """An execution context with what was last set in it, and the graph that was captured from it."""

    context: Any
    config: Any  # of the context, kept as long
    size: StepSize | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    graph: Graph | None = None


@dataclass(frozen=True, slots=True)
class _Buffers:
    """All memory of an executor. `staging` and `inputs` mirror each other."""

    caches: dict[str, DeviceBuffer]
    activations: DeviceBuffer
    inputs: DeviceBuffer
    logits: DeviceBuffer
    staging: PinnedBuffer
    sampling: SamplingBuffers


class TensorRTExecutor:
    """`Executor` on a TensorRT or TensorRT-RTX engine.

    `trt` is the target's module, `device` the GPU, which the executor owns from now on. With `use_graphs`, decode steps
    are captured the first time that their size comes up. Raises `BundleError` when the plan does not load,
    `ConfigError` naming the setting when memory does not suffice.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        facts: EngineFacts,
        *,
        trt: Any,
        device: Device,
        kv_cache_bytes: int | None = None,
        use_graphs: bool = True,
    ) -> None:
        self._trt, self._device, self._facts = trt, device, facts
        self._lanes: dict[Placement | int, _Lane] = {}
        self._log = make_log(trt)
        self._engine: Any = None
        self._runtime: Any = None
        self._logits: Any = None  # tensor [num_logits_rows, vocab_size] on the buffer
        self._creators: list[Any] = []
        self._samplers: WeakSet[DeviceSampler] = WeakSet()
        self._is_closed = self._is_in_flight = False
        try:
            self._load(directory, rebuild(manifest, directory))
            self._memory = plan_memory(
                facts,
                manifest.limits,
                kv_cache_bytes=kv_cache_bytes,
                activation_bytes=self._activation_bytes(),
                free_bytes=device.free_bytes(),
            )
            self._limits = engine_limits(
                facts, manifest.limits, self._memory.num_blocks, self._memory.num_logits_rows
            )
            self._placer = Placer(facts, self._limits, use_graphs=use_graphs)
            self._stream = device.create_stream()
            self._done = device.create_event()
            self._buffers = self._allocate(self._memory)
            rows = (self._memory.num_logits_rows, self._limits.vocab_size)
            self._logits = device.tensor(self._buffers.logits, "float32", rows)
        except BaseException:
            self.close()
            raise

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def memory(self) -> MemoryPlan:
        return self._memory

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Waits for nothing but an earlier step that nobody has sampled from. Logits of more rows than the device has
        room for are an array on the host.

        Raises `EngineError`, with nothing enqueued, when a shape is outside what the engine was built for.
        """
        self._must_be_open()
        check_consistent(inputs, self._limits.block_size)
        passes = self._split(inputs.logits_rows)
        placements = [self._placer.place(inputs, len(rows)) for rows in passes]
        self._settle()
        self._is_in_flight = True
        self._copy_blocks(inputs.block_copies)
        if len(passes) == 1:
            self._run(inputs, passes[0], placements[0])
            return StepOutput(self._logits[: len(passes[0])])
        logits = np.empty((len(inputs.logits_rows), self._limits.vocab_size), np.float32)
        start = 0
        for rows, placement in zip(passes, placements, strict=True):
            self._run(inputs, rows, placement)
            # Before the next run overwrites them.
            logits[start : start + len(rows)] = self._read_logits(len(rows))
            start += len(rows)
        return StepOutput(logits)

    def make_sampler(self, eos_token_ids: Iterable[int]) -> Sampler:
        from .sampler_device import DeviceSampler

        transfer = StreamTransfer(
            self._device,
            self._stream,
            self._buffers.sampling,
            self._buffers.logits,
            enter=self._begin_sampling,
            wait=self._wait,
        )
        sizes = self._memory.sampling
        sampler = DeviceSampler(self._limits.vocab_size, eos_token_ids, transfer=transfer, sizes=sizes)
        self._samplers.add(sampler)
        return sampler

    def close(self) -> None:
        """Give back the memory; a later `execute`, and sampling, raise `EngineError`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._settle()
        finally:
            # Graphs before the contexts that they came from, contexts before their engine, memory when nothing uses it.
            self._drop_lanes()
            self._engine = self._runtime = self._logits = None
            self._creators = []
            for sampler in self._samplers:
                sampler.release()
            self._device.close()

    @collector_held()
    def _load(self, directory: Path, remedy: str) -> None:
        self._creators = register_plugins(self._trt, self._facts, directory, remedy)
        try:
            self._runtime = self._trt.Runtime(self._log)
        except TypeError as error:  # of the bindings, for a null pointer
            said = explain(self._log.errors, unknown="TensorRT does not start here", remedy=remedy)
            raise BundleError(f"{directory}: {said}") from error
        self._engine = deserialize(self._trt, self._runtime, self._log, directory, remedy)
        check_engine(self._trt, self._engine, self._facts, directory, remedy)

    def _activation_bytes(self) -> int:
        profiles = range(self._engine.num_optimization_profiles)
        return max(int(self._engine.get_device_memory_size_for_profile_v2(i)) for i in profiles)

    def _allocate(self, plan: MemoryPlan) -> _Buffers:
        device = self._device
        try:
            device.reserve(plan.sampling.torch_bytes, self._stream)
            return _Buffers(
                caches={
                    name: device.allocate(plan.num_blocks * self._facts.page_bytes(name))
                    for name in self._facts.cache_names
                },
                activations=device.allocate(plan.activation_bytes),
                inputs=device.allocate(plan.input_bytes),
                logits=device.allocate(plan.logits_bytes),
                staging=device.allocate_pinned(plan.input_bytes),
                sampling=SamplingBuffers.allocate(device, plan.sampling),
            )
        except MemoryError as error:
            raise ConfigError(
                f"kv_cache_memory: {plan.kv_bytes >> 20} MiB of KV pages cannot be allocated ({error}); lower it"
            ) from error

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        """The wanted rows in as many runs as the logits buffer asks for.

        A step may be run again: it writes the same K/V to the same places.
        """
        most = self._memory.num_logits_rows
        return [rows[i : i + most] for i in range(0, max(len(rows), 1), most)]

    def _run(self, inputs: StepInputs, rows: np.ndarray, placement: Placement) -> None:
        """Enqueue the step; the logits of `rows` become the first ones of the buffer."""
        self._is_in_flight = True
        size = placement.size
        lane = self._lane(placement)
        self._set_shapes(lane, size)
        fill(self._device.view(self._buffers.staging), size, inputs, rows)
        self._device.copy_to_device(self._buffers.staging, self._buffers.inputs, size.num_bytes, self._stream)
        if lane.graph is None:
            self._enqueue(lane)
        else:
            self._device.launch(lane.graph, self._stream)
        if placement.is_captured and lane.graph is None:
            self._wait()
            self._capture(lane)

    def _settle(self) -> None:
        """Wait for a step that failed, or that nobody sampled from: it may still read the staging buffer."""
        if self._is_in_flight:
            self._wait()

    def _wait(self) -> None:
        self._device.record(self._done, self._stream)
        self._device.wait(self._done)
        self._is_in_flight = False

    def _must_be_open(self) -> None:
        if self._is_closed:
            raise EngineError("the executor is closed")

    def _begin_sampling(self) -> None:
        self._must_be_open()
        self._is_in_flight = True

    def _read_logits(self, num_rows: int) -> np.ndarray:
        vocab_size = self._limits.vocab_size
        num_bytes = num_rows * vocab_size * _FLOAT32
        content = self._device.read(self._buffers.logits, num_bytes, self._stream)
        self._is_in_flight = False
        return content.view(np.float32).reshape(num_rows, vocab_size)

    def _copy_blocks(self, block_copies: np.ndarray) -> None:
        for source, destination in block_copies.tolist():
            for name, buffer in self._buffers.caches.items():
                size = self._facts.page_bytes(name)
                self._device.copy_within(buffer, source * size, destination * size, size, self._stream)

    def _lane(self, placement: Placement) -> _Lane:
        """The context for a step: its own for each captured size, the profile's for the others."""
        key = placement if placement.is_captured else placement.profile
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._make_lane(placement)
        return lane

    def _make_lane(self, placement: Placement) -> _Lane:
        """A context with pages, logits and activations bound for good."""
        trt = self._trt
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if placement.is_captured and hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # By default TensorRT-RTX swaps better kernels in while it runs; a graph would keep the first ones.
            config.dynamic_shapes_kernel_specialization_strategy = (
                trt.DynamicShapesKernelSpecializationStrategy.EAGER
            )
        context = self._engine.create_execution_context(config)
        if context is None:
            raise EngineError(f"TensorRT makes no execution context: {self._reason()}")
        handle = self._stream.handle
        self._must("set_optimization_profile_async", context, placement.profile, handle)
        activations = self._buffers.activations
        context.set_device_memory(activations.address, activations.num_bytes)
        for name, buffer in self._buffers.caches.items():
            shape = self._facts.cache_shape(name, self._memory.num_blocks)
            self._must("set_input_shape", context, name, shape)
            self._must("set_tensor_address", context, name, buffer.address)
            self._must("set_tensor_address", context, f"{name}_out", buffer.address)
        self._must("set_tensor_address", context, LOGITS, self._buffers.logits.address)
        return _Lane(context, config)

    def _set_shapes(self, lane: _Lane, size: StepSize) -> None:
        """Tell the context what has changed since its last step; nothing once its size is captured."""
        if lane.size == size:
            return
        lane.size = None  # until all is set: TensorRT may refuse halfway
        for name in STEP_INPUTS:
            shape, offset = size.shapes[name], size.offsets[name]
            if lane.shapes.get(name) != shape:
                self._must("set_input_shape", lane.context, name, shape)
                lane.shapes[name] = shape
            if lane.offsets.get(name) != offset:
                self._must("set_tensor_address", lane.context, name, self._buffers.inputs.address + offset)
                lane.offsets[name] = offset
        lane.size = size

    def _enqueue(self, lane: _Lane) -> None:
        self._must("execute_async_v3", lane.context, self._stream.handle)

    def _capture(self, lane: _Lane) -> None:
        """Capture the size that `lane` has just run, which also brought the context up to date.

        What cannot be captured goes on without a graph.
        """
        try:
            if hasattr(lane.context, "is_stream_capturable") and not lane.context.is_stream_capturable(
                self._stream.handle
            ):
                raise EngineError("TensorRT-RTX says that the context cannot be captured")
            lane.graph = self._device.capture(self._stream, lambda: self._enqueue(lane))
        except EngineError as error:
            log.warning("decode steps run without CUDA graphs from now on: %s", str(error))
            self._placer.use_graphs = False
            self._drop_lanes()

    def _drop_lanes(self) -> None:
        """Nothing may be in flight. A later step makes the context that it needs."""
        for lane in self._lanes.values():
            if lane.graph is not None:
                self._device.destroy(lane.graph)
        self._lanes.clear()

    def _must(self, method: str, context: Any, *arguments: Any) -> None:
        """Call a method of a context that returns whether it worked."""
        call: Callable[..., bool] = getattr(context, method)
        if not call(*arguments):
            raise EngineError(f"TensorRT refused {method}{arguments}: {self._reason()}")

    def _reason(self) -> str:
        """Of what was refused just now: the newest message says it."""
        return explain(list(self._log.errors)[-1:], unknown="it cannot")
