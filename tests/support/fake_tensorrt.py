"""A stand-in for TensorRT's Python module that runs on `FakeDevice` and enforces the contract of the runtime API.

`FakeTensorRT(device, facts)` has the names that the executor uses; everything the real library would answer with
undefined behaviour is a `Violation`. The "model" keeps token ids in its pages, written and read through the block
table, and its logits are those of `ScriptedExecutor(digest(vocab_size))`: any wrong page, padding, graph or shape shows
by value.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

from pelton.runtime.device import Stream
from pelton.runtime.trt_facts import LOGITS, STEP_INPUTS, EngineFacts

from .fake_cuda import FakeDevice, Memory, Violation
from .scripted import digest

PLAN = b"a plan of the fake"
_ACTIVATION_BYTES = 1000  # of profile 0; each further one needs this much more


class ExecutionContextAllocationStrategy(enum.IntEnum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class DynamicShapesKernelSpecializationStrategy(enum.IntEnum):
    LAZY, EAGER, NONE = range(3)


class TensorIOMode(enum.IntEnum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.IntEnum):
    DEVICE, HOST = range(2)


class EngineInvalidityDiagnostics(enum.IntEnum):
    VERSION_MISMATCH, UNSUPPORTED_CC, MALFORMED_ENGINE = 1, 2, 32


class _Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    Severity = _Severity

    def log(self, severity: _Severity, message: str) -> None:
        raise NotImplementedError


class _Interface:
    """Base of the plugin interfaces, which the fake only registers."""


class _Named:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class PluginFieldType(enum.IntEnum):
    FLOAT32, INT32, INT64, INT8, CHAR = range(5)


class _Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name, creator.plugin_version, namespace] = creator
        return True

    def deregister_creator(self, creator: Any) -> bool:
        self.creators = {key: value for key, value in self.creators.items() if value is not creator}
        return True


class FakeTensorRT:
    """`calls` counts calls by method. Methods in `refused` answer as the library does when it cannot, once they have
    worked as often as it says.

    With `is_rtx`, contexts and configurations have what only TensorRT-RTX has. `contexts` are those that live.
    """

    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy
    TensorIOMode = TensorIOMode
    TensorLocation = TensorLocation
    EngineInvalidityDiagnostics = EngineInvalidityDiagnostics
    PluginFieldType = PluginFieldType
    ILogger = ILogger
    PluginField = PluginFieldCollection = _Named
    float32, float16, bfloat16, fp8, int8, int32, int64, bool = (
        "FLOAT", "HALF", "BF16", "FP8", "INT8", "INT32", "INT64", "BOOL",
    )  # fmt: skip

    def __init__(self, device: FakeDevice, facts: EngineFacts, *, is_rtx: bool = True) -> None:
        self.device, self.facts, self.is_rtx = device, facts, is_rtx
        self.calls: Counter[str] = Counter()
        self.refused: dict[str, int] = {}
        self.contexts: weakref.WeakSet[_Context] = weakref.WeakSet()
        self.registry = _Registry()
        for name in (
            "IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime", "IPluginCreatorV3One",
        ):  # fmt: skip
            setattr(self, name, type(name, (_Interface,), {}))
        device.on_free.append(self._check_unbound)

    def get_plugin_registry(self) -> _Registry:
        return self.registry

    def Runtime(self, logger: ILogger) -> _Runtime:
        return (_RtxRuntime if self.is_rtx else _Runtime)(self, logger)

    def answer(self, method: str) -> bool:
        self.calls[method] += 1
        left = self.refused.get(method)
        if left:
            self.refused[method] = left - 1
        return left != 0

    def dtype_of(self, name: str) -> str:
        names = {
            "float32": self.float32, "float16": self.float16, "bfloat16": self.bfloat16, "int8": self.int8,
            "float8_e4m3fn": self.fp8, "int32": self.int32, "int64": self.int64,
        }  # fmt: skip
        return names[name]

    def _check_unbound(self, memory: Memory) -> None:
        for context in self.contexts:
            if context.is_bound_to(memory):
                raise Violation(f"memory at {memory.address:#x} was freed while bound to a context")


class _Runtime:
    def __init__(self, trt: FakeTensorRT, logger: ILogger) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> _Engine | None:
        lacking = [
            name
            for name in self.trt.facts.plugins
            if self.trt.registry.get_creator(name, "1", "pelton") is None
        ]
        if bytes(serialized_engine) != PLAN or lacking:
            message = (
                f"no creator of plugin {lacking[0]}" if lacking else "header.magicTag == kEXPECTED failed"
            )
            self.logger.log(_Severity.ERROR, message)
            return None
        return _Engine(self.trt)


class _RtxRuntime(_Runtime):
    def get_engine_validity(self, buffer: Any) -> tuple[int, int]:
        return (0, 0) if bytes(buffer) == PLAN else (2, EngineInvalidityDiagnostics.VERSION_MISMATCH)


class _RuntimeConfig:
    def __init__(self) -> None:
        self.strategy = ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy


class _RtxRuntimeConfig(_RuntimeConfig):
    def __init__(self) -> None:
        super().__init__()
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY


class _Engine:
    def __init__(self, trt: FakeTensorRT) -> None:
        self.trt, self.facts = trt, trt.facts
        caches = dict.fromkeys(self.facts.cache_names, self.facts.cache_dtype)
        self.inputs: dict[str, str] = {**STEP_INPUTS, **caches}
        self.outputs = {LOGITS: "float32", **{f"{name}_out": dtype for name, dtype in caches.items()}}
        self.names = [*self.inputs, *self.outputs]

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.facts.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return _ACTIVATION_BYTES * len(self.facts.profiles)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return _ACTIVATION_BYTES * (profile_index + 1)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> str:
        return self.trt.dtype_of({**self.inputs, **self.outputs}[name])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return list(self.facts.profiles[profile_index].shapes[name])

    def create_runtime_config(self) -> _RuntimeConfig:
        return _RtxRuntimeConfig() if self.trt.is_rtx else _RuntimeConfig()

    def create_execution_context(self, runtime_config: _RuntimeConfig) -> _Context | None:
        if not self.trt.answer("create_execution_context"):
            return None
        context = (_RtxContext if self.trt.is_rtx else _Context)(self, runtime_config)
        self.trt.contexts.add(context)
        return context


class _Context:
    """`changes` counts everything that was set: a graph is good for the state in which it was captured."""

    def __init__(self, engine: _Engine, config: _RuntimeConfig) -> None:
        self.engine, self.trt, self.config = engine, engine.trt, config
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.activations: tuple[int, int] | None = None
        self.changes = 0
        self.is_flushed = False

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            raise Violation(f"there is no profile {profile_index}")
        if self._change("set_optimization_profile_async"):
            self.profile, self.shapes = profile_index, {}
            return True
        return False

    def set_device_memory(self, memory: int, size: int) -> None:
        if self.config.strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            raise Violation("the context has memory of its own")
        if memory % 256 or size < self.engine.device_memory_size_v2:
            raise Violation(f"{size} bytes at {memory:#x} do not serve as activation memory")
        self.activations = (memory, size)
        self._change("set_device_memory")

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self.profile is None:
            raise Violation("a shape is set before the profile")
        if fault := self.engine.facts.profiles[self.profile].fault({name: tuple(shape)}):
            raise Violation(f"a shape leaves its profile: {fault}")
        if self.shapes.get(name) == tuple(shape):
            raise Violation(f"{name} has the shape {shape} already")
        if self._change("set_input_shape"):
            self.shapes[name] = tuple(shape)
            self.is_flushed = False
            return True
        return False

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if memory % 256:
            raise Violation(f"{name}: address {memory:#x} is not aligned")
        if self._change("set_tensor_address"):
            self.addresses[name] = memory
            return True
        return False

    def execute_async_v3(self, stream_handle: int) -> bool:
        if not self.trt.answer("execute_async_v3"):
            return False
        device = self.trt.device
        tensors = self._tensors()
        if self.activations is None:
            raise Violation("the context has no activation memory")
        activations = device.memory_at(*self.activations)
        if device.is_capturing and not self.is_flushed:
            raise Violation("captured before the new shapes were run once")
        self.is_flushed = True
        facts = self.engine.facts
        aliased = [tensors[name][0] for name in facts.cache_names]
        shapes, profile, changes = dict(self.shapes), self.profile, self.changes
        context = weakref.ref(self)

        def run() -> None:
            living = context()
            if living is None:
                raise Violation("a graph outlives the context that it was captured from")
            if living.changes != changes or living.profile != profile:
                raise Violation("a graph is launched although its context was changed after the capture")
            _run_model(facts, tensors, shapes)

        reads = [tensors[name][0] for name in self.engine.inputs]
        writes = [activations, tensors[LOGITS][0], *aliased]
        device.submit("engine", Stream(stream_handle), reads, writes, run)
        return True

    def is_bound_to(self, memory: Memory) -> bool:
        held = [*self.addresses.values(), *(self.activations or ())[:1]]
        return any(memory.address <= address < memory.address + len(memory.content) for address in held)

    def _change(self, method: str) -> bool:
        self.changes += 1
        return self.trt.answer(method)

    def _tensors(self) -> dict[str, tuple[Memory, int]]:
        """Where each tensor lies; checks that all are set, alive, on the device, apart and large enough."""
        if missing := sorted(set(self.engine.inputs) - set(self.shapes)):
            raise Violation(f"no shape is set for {', '.join(missing)}")
        if missing := sorted(set(self.engine.names) - set(self.addresses)):
            raise Violation(f"no address is set for {', '.join(missing)}")
        tensors, spans = {}, []
        for name, dtype in {**self.engine.inputs, **self.engine.outputs}.items():
            address, num_bytes = self.addresses[name], self._num_bytes(name, dtype)
            memory = self.trt.device.memory_at(address, num_bytes)
            if memory.is_pinned:
                raise Violation(f"{name} is bound to host memory")
            tensors[name] = (memory, address - memory.address)
            if name in self.engine.inputs or name == LOGITS:
                spans.append((address, address + num_bytes, name))
            elif address != self.addresses[name.removesuffix("_out")]:
                raise Violation(f"{name} is not bound to the pages that it aliases")
        spans.sort()
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise Violation(f"{name} and {other} overlap")
        return tensors

    def _num_bytes(self, name: str, dtype: str) -> int:
        if name == LOGITS:
            return 4 * self.shapes["logits_rows"][0] * self.engine.facts.vocab_size
        sizes = {"int64": 8, "int32": 4, "float32": 4, "int8": 1, "float8_e4m3fn": 1}
        return sizes.get(dtype, 2) * math.prod(self.shapes[name.removesuffix("_out")])


class _RtxContext(_Context):
    def is_stream_capturable(self, stream: int) -> bool:
        is_eager = (
            self.config.dynamic_shapes_kernel_specialization_strategy  # type: ignore[attr-defined]
            is DynamicShapesKernelSpecializationStrategy.EAGER
        )
        return self.trt.answer("is_stream_capturable") and is_eager


def _run_model(
    facts: EngineFacts, tensors: dict[str, tuple[Memory, int]], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Write the step's tokens into their pages and the logits of the wanted rows."""
    step = {name: _read(tensors[name], dtype, shapes[name]) for name, dtype in STEP_INPUTS.items()}
    ids, positions = step["input_ids"][0], step["positions"][0]
    table, starts, rows = step["block_table"], step["query_start_loc"], step["logits_rows"]
    if not len(table) == len(step["seq_lens"]) == len(starts) - 1 or len(ids) != len(positions):
        raise Violation("the inputs disagree on the number of sequences or tokens")
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > len(ids):
        raise Violation(f"query_start_loc {starts.tolist()} does not fit {len(ids)} tokens")
    if ids[starts[-1] :].any() or positions[starts[-1] :].any():
        raise Violation("padding rows are not inert")
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(ids)):
        raise Violation("logits of a row that is not there")
    caches = [
        _read(tensors[name], "uint8", (shapes[name][0], facts.block_size, facts.page_bytes(name) // facts.block_size))
        for name in facts.cache_names
    ]  # fmt: skip
    next_token = digest(facts.vocab_size)
    tokens: dict[int, int] = {}
    wanted = set(rows.tolist())
    for b, seq_len in enumerate(step["seq_lens"].tolist()):
        start, end = int(starts[b]), int(starts[b + 1])
        if start == end:
            continue
        where = positions[start:end]
        if where.tolist() != list(range(seq_len - (end - start), seq_len)):
            raise Violation(f"positions {where.tolist()} are not the last of {seq_len}")
        context = _attend(facts, caches, table[b], where, ids[start:end], seq_len)
        for row in wanted & set(range(start, end)):
            tokens[row] = next_token(context[: int(positions[row]) + 1])
    logits = _read(tensors[LOGITS], "float32", (len(rows), facts.vocab_size))
    logits[:] = np.nan  # of padding rows
    for i, row in enumerate(rows.tolist()):
        if row in tokens:
            logits[i] = 0.0
            logits[i, tokens[row]] = 10.0


def _attend(
    facts: EngineFacts,
    caches: list[np.ndarray],
    pages: np.ndarray,
    positions: np.ndarray,
    tokens: np.ndarray,
    seq_len: int,
) -> list[int]:
    """Write `tokens` into every cache, then read the whole context, which all of them must hold alike.

    A token's row in a page is `[token as int32, number of the cache, ...]`.
    """
    used = pages[: -(-seq_len // facts.block_size)]
    if len(used) * facts.block_size < seq_len or used.min() < 0 or used.max() >= len(caches[0]):
        raise Violation(f"block table {pages.tolist()} does not hold {seq_len} tokens")
    contexts = []
    for number, cache in enumerate(caches):
        slots = (pages[positions // facts.block_size], positions % facts.block_size)
        written = np.zeros((len(tokens), 5), np.uint8)
        written[:, :4] = tokens.astype("<i4").view(np.uint8).reshape(-1, 4)
        written[:, 4] = number
        cache[(*slots, slice(0, 5))] = written
        read = cache[used].reshape(-1, cache.shape[-1])[:seq_len]
        if (read[:, 4] != number).any():
            raise Violation(f"cache {number} was read where it was never written, or holds another's page")
        contexts.append(np.ascontiguousarray(read[:, :4]).view("<i4").reshape(-1).tolist())
    if any(context != contexts[0] for context in contexts):
        raise Violation("the layers' pages hold different tokens")
    return contexts[0]


def _read(tensor: tuple[Memory, int], dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    memory, offset = tensor
    num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
    return memory.content[offset : offset + num_bytes].view(dtype).reshape(shape)
