"""Stand-ins for TensorRT's builder and for torch-tensorrt 2.13, with the names and signatures that Pelton uses of them.

`install(monkeypatch)` makes `tensorrt` and `torch_tensorrt` importable. The interpreter walks the real lowered graph as
torch-tensorrt's does; its converters for ATen operators only note a layer. Signatures are those of the wheel
torch_tensorrt-2.13.0-cp311 (`dynamo/conversion/_TRTInterpreter.py`, `_ConverterRegistry.py`, `converter_utils.py`,
`dynamo/lowering/passes/_aten_lowering_pass.py`, `_Input.py`).
"""

from __future__ import annotations

import enum
import logging
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node

from .fake_tensorrt import ILogger, PluginFieldType, _Interface, _Named, _Registry

PLAN = b"a plan of the fake builder"


class LayerType(enum.Enum):
    CONSTANT, PLUGIN_V3, MATRIX_MULTIPLY, ELEMENTWISE = range(4)


@dataclass
class Tensor:
    name: str
    dtype: Any = field(default_factory=lambda: SimpleNamespace(name="HALF"))


@dataclass
class Layer:
    name: str
    type: LayerType
    outputs: list[Tensor]
    inputs: Sequence[Tensor] = ()
    plugin: Any = None

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]


class Network:
    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.layers: list[Layer] = []
        self.outputs: list[Tensor] = []

    num_inputs = property(lambda self: len(self.inputs))
    num_layers = property(lambda self: len(self.layers))
    num_outputs = property(lambda self: len(self.outputs))

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]

    def add(self, name: str, kind: LayerType, num_outputs: int = 1, **more: Any) -> Layer:
        layer = Layer(name, kind, [Tensor(f"{name}:{i}") for i in range(num_outputs)], **more)
        self.layers.append(layer)
        return layer

    def add_plugin_v3(self, inputs: list[Tensor], shape_inputs: list[Tensor], plugin: Any) -> Layer:
        assert shape_inputs == []
        assert all(isinstance(tensor, Tensor) for tensor in inputs)
        return self.add(
            "(Unnamed)", LayerType.PLUGIN_V3, len(plugin.operator.outputs), inputs=inputs, plugin=plugin
        )


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Any, Any, Any]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self.shapes[input] = (min, opt, max)


DAMAGED_TIMINGS, OTHER_TIMINGS = b"damaged", b"of another GPU"


class Config:
    def __init__(self) -> None:
        self.profiles: list[Profile] = []
        self.preview: dict[str, bool] = {}
        self.workspace_bytes = 0
        self.profiling_verbosity: Any = None
        self.progress_monitor: Any = None
        self.cached: bytes | None = None

    def set_preview_feature(self, feature: str, enable: bool) -> None:
        self.preview[feature] = enable

    def set_memory_pool_limit(self, pool: str, pool_size: int) -> None:
        self.workspace_bytes = pool_size

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        if serialized_timing_cache == DAMAGED_TIMINGS:
            return None
        return SimpleNamespace(serialize=lambda: serialized_timing_cache + b"+")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        if cache.serialize().startswith(OTHER_TIMINGS):
            return False
        self.cached = cache.serialize()
        return True


class Builder:
    """`refusal`: what TensorRT says instead of building."""

    refusal: str | None = None

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.config = Config()

    def create_builder_config(self) -> Config:
        return self.config

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 2)
        monitor.step_complete("Building engine", 0)
        monitor.phase_finish("Building engine")
        if self.refusal is not None:
            self.logger.log(ILogger.Severity.ERROR, self.refusal)
            return None
        return PLAN


def _tensorrt() -> ModuleType:
    trt = ModuleType("tensorrt")
    registry = _Registry()
    names: dict[str, Any] = {
        "ILogger": ILogger, "Builder": Builder, "LayerType": LayerType, "PluginField": _Named,
        "PluginFieldCollection": _Named, "PluginFieldType": PluginFieldType, "get_plugin_registry": lambda: registry,
        "PreviewFeature": SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased"),
        "MemoryPoolType": SimpleNamespace(WORKSPACE="workspace"),
        "ProfilingVerbosity": SimpleNamespace(DETAILED="detailed"),
    }  # fmt: skip
    for name in ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime",
                 "IPluginCreatorV3One", "IProgressMonitor"):  # fmt: skip
        names[name] = type(name, (_Interface,), {})
    vars(trt).update(names)
    return trt


class ConverterPriority(enum.Enum):
    STANDARD, HIGH = range(2)


class Registry:
    """Converters by target. `unknown`: targets of ATen that have none."""

    def __init__(self) -> None:
        self.own: dict[Any, list[Callable[..., Any]]] = {}
        self.unknown: set[Any] = set()
        self.settings: Any = None

    def set_compilation_settings(self, compilation_settings: Any) -> None:
        self.settings = compilation_settings

    def get(self, node: Node) -> Any:
        assert self.settings is not None
        if node.target in self.own:
            return self.own[node.target][0]
        is_theirs = node.target is operator.getitem or str(node.target).startswith("aten.")
        return _note if is_theirs and node.target not in self.unknown else None

    def register(
        self, key: Any, *, enabled: bool = True, capability_validator: Any = None,
        priority: ConverterPriority = ConverterPriority.STANDARD, supports_dynamic_shapes: bool = False,
        requires_output_allocator: bool = False, requires_native_multidevice: bool = False,
    ) -> Callable[[Any], Any]:  # fmt: skip
        assert supports_dynamic_shapes

        def add(converter: Callable[..., Any]) -> Callable[..., Any]:
            self.own.setdefault(key, []).insert(0 if priority is ConverterPriority.HIGH else 99, converter)
            return converter

        return add


def _note(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    if target is operator.getitem:
        return args[0][args[1]]
    kind = LayerType.MATRIX_MULTIPLY if target is torch.ops.aten.linear.default else LayerType.ELEMENTWISE
    return ctx.net.add(f"[{kind.name}]-[aten_ops.{target.__name__}]-[{name}]", kind).get_output(0)


def get_trt_tensor(ctx: Any, input_val: Any, name: str, dtype: Any = None, min_rank: int = 1) -> Tensor:
    if isinstance(input_val, torch.Tensor):
        return ctx.net.add(name, LayerType.CONSTANT).get_output(0)
    if isinstance(input_val, Tensor):
        return input_val
    raise AssertionError(f"Cannot convert {input_val} to TRT constant")


@dataclass(frozen=True)
class Input:
    min_shape: tuple[int, ...]
    opt_shape: tuple[int, ...]
    max_shape: tuple[int, ...]
    dtype: torch.dtype
    name: str


class _Logger(ILogger):
    """As `torch_tensorrt.logging` has it."""

    def log(self, severity: Any, message: str) -> None:
        logger = logging.getLogger("torch_tensorrt [TensorRT Conversion Context]")
        logger.log({1: logging.ERROR, 2: logging.WARNING}.get(int(severity), logging.INFO), message)


class TRTInterpreter(Interpreter):
    """`made` has the interpreters of a test."""

    made: list[TRTInterpreter] = []  # noqa: RUF012 emptied by `install`
    registry: Registry

    def __init__(
        self, module: GraphModule, input_specs: Sequence[Input], output_dtypes: Any = None,
        compilation_settings: Any = None, engine_cache: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(module)
        self.builder, self.ctx = Builder(_Logger()), SimpleNamespace(net=Network())
        self.specs, self.settings = list(input_specs), compilation_settings
        self.output_dtypes = output_dtypes
        self._cur_node: Node | None = None
        TRTInterpreter.made.append(self)

    def _construct_trt_network_def(self) -> None:
        super().run()

    def run_node(self, n: Node) -> Any:
        self._cur_node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        self.ctx.net.inputs.append(Tensor(target))
        return self.ctx.net.inputs[-1]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        node = self._cur_node
        assert node is not None
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        name = f"{stack[-1][0]}/{node.name}" if stack else node.name
        return self.registry.get(node)(self.ctx, target, args, kwargs, name)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        for index, tensor in enumerate(args[0]):
            tensor.name = f"output{index}"
            self.ctx.net.outputs.append(tensor)
        return list(args[0])


def install(
    monkeypatch: pytest.MonkeyPatch, version: str = "2.13.0"
) -> tuple[Registry, list[TRTInterpreter]]:
    """Make the modules importable; returns the registry of converters and the interpreters that will be made."""
    registry = Registry()
    monkeypatch.setattr(TRTInterpreter, "registry", registry, raising=False)
    monkeypatch.setattr(TRTInterpreter, "made", [])
    contents: dict[str, dict[str, Any]] = {
        "torch_tensorrt": {"Input": Input},
        "torch_tensorrt.dynamo": {"CompilationSettings": SimpleNamespace},
        "torch_tensorrt.dynamo.lowering": {
            "pre_export_lowering": lambda ep, settings: ep,
            "get_decompositions": lambda *flags: {},
            "post_lowering": lambda gm, settings: gm,
        },
        "torch_tensorrt.dynamo.conversion": {
            "DYNAMO_CONVERTERS": registry, "dynamo_tensorrt_converter": registry.register,
            "ConverterPriority": ConverterPriority, "TRTInterpreter": TRTInterpreter,
        },
        "torch_tensorrt.dynamo.conversion.converter_utils": {"get_trt_tensor": get_trt_tensor},
    }  # fmt: skip
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    pretend_installed(monkeypatch, version)
    trt = _tensorrt()
    monkeypatch.setattr("pelton.compile.targets.torch_tensorrt.load", lambda target: trt)
    return registry, TRTInterpreter.made


def pretend_installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """torch-tensorrt `version` beside a torch that is built for CUDA."""
    monkeypatch.setattr("pelton.compile.targets.torch_tensorrt.metadata.version", lambda name: version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
