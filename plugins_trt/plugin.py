"""An operator of the `pelton` domain as a TensorRT plugin: `Operator` says what it is, `register` makes it known.

TensorRT calls a plugin in this order (IPluginV3):

    build    creator.create_plugin(fields) -> types, shapes and aliases of outputs -> formats -> configure
             -> valid tactics -> (each is timed where there is a GPU) -> fields to serialise into the plan
    run      creator.create_plugin(fields of the plan) -> attach_to_context -> set_tactic -> on_shape_change -> enqueue

An output that aliases an input is written in place: that is how the KV pages stay where they are.
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/extending-custom-layers.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

NAMESPACE = "pelton"
VERSION = "1"

FieldValue = float | int
Fields = Mapping[str, FieldValue]


@dataclass(frozen=True, slots=True)
class Output:
    """One output: dtype of input `dtype_of`, shape of input `shape_of` with the last size taken from
    `(input, axis)` where `last_size_of` says so; `alias` is the input that it is written into.
    """

    dtype_of: int
    shape_of: int
    last_size_of: tuple[int, int] | None = None
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class Described:
    """An input as the builder knows it: the largest shape of the profile, and the dtype as in `Buffer`."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """A device buffer as TensorRT hands it over. `dtype` is numpy's or torch's name, such as `bfloat16`."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str

    def as_tensor(self) -> Tensor:
        """A view of the buffer on the current CUDA device; nothing is copied or owned."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.as_tensor(_CudaArray(self.pointer, self.shape, dtype.itemsize), device="cuda").view(
            dtype
        )


class _CudaArray:
    """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, as integers of the right size: it knows
    neither bfloat16 nor fp8.
    """

    def __init__(self, pointer: int, shape: tuple[int, ...], itemsize: int) -> None:
        typestr = "|i1" if itemsize == 1 else f"<i{itemsize}"
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": shape, "typestr": typestr, "strides": None, "version": 3,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """One execution of an operator. `stream` is a cudaStream_t, `workspace` a device pointer.

    `is_timing`: the builder measures a tactic; what the inputs hold is then whatever was in memory.
    """

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    fields: Fields
    tactic: int
    workspace: int
    stream: int
    is_timing: bool

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make TensorRT's stream torch's (and so Triton's) current one."""
        import torch

        external = torch.cuda.ExternalStream(self.stream)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(external):
            yield

    def workspace_block(self, num_bytes: int) -> Tensor | None:
        """The first bytes of the workspace, as uint8; None for none."""
        return Buffer(self.workspace, (num_bytes,), "uint8").as_tensor() if num_bytes else None

    def workspace_tensor(self, num_elements: int) -> Tensor:
        """The first elements of the workspace, as float32."""
        return Buffer(self.workspace, (num_elements,), "float32").as_tensor()


@dataclass(frozen=True, slots=True)
class Operator:
    """`fields` are the node's attributes with their types. `accepts(inputs, outputs)` says whether they may have these
    dtypes. `tactics(inputs, fields)` are ids above 0, of which the first is right without any timing;
    `workspace(inputs, fields, tactic)` gives the bytes that a tactic needs.
    """

    name: str
    outputs: tuple[Output, ...]
    fields: Mapping[str, type[FieldValue]]
    accepts: Callable[[Sequence[str], Sequence[str]], bool]
    tactics: Callable[[Sequence[Described], Fields], Sequence[int]]
    workspace: Callable[[Sequence[Described], Fields, int], int]
    enqueue: Callable[[Launch], None]

    def workspace_bytes(self, inputs: Sequence[Described], fields: Fields, tactic: int) -> int:
        """Of `tactic`; 0: TensorRT asks before it has chosen one, so enough for any, as nothing checks it later."""
        tactics = [tactic] if tactic else self.tactics(inputs, fields)
        return max(self.workspace(inputs, fields, each) for each in tactics)


def register(trt: Any, operator: Operator) -> Any:
    """Register `operator` with the plugin registry of `trt`; returns its creator, which the caller must keep.

    A creator of this name that is there already (of another build in this process) is replaced.
    """
    registry = trt.get_plugin_registry()
    known = registry.get_creator(operator.name, VERSION, NAMESPACE)
    if known is not None:
        registry.deregister_creator(known)
    creator = _creator_class(trt)(trt, operator, _plugin_class(trt))
    if not registry.register_creator(creator, NAMESPACE):
        raise RuntimeError(f"TensorRT refused the plugin {NAMESPACE}::{operator.name}")
    return creator


def _field_collection(trt: Any, values: Mapping[str, Any], types: Mapping[str, type[FieldValue]]) -> Any:
    kinds = {float: (np.float32, trt.PluginFieldType.FLOAT32), int: (np.int32, trt.PluginFieldType.INT32)}
    return trt.PluginFieldCollection(
        [trt.PluginField(name, np.array(values.get(name, []), kinds[kind][0]).reshape(-1), kinds[kind][1])
         for name, kind in types.items()]
    )  # fmt: skip


def dtype_name(trt: Any, dtype: Any) -> str:
    """torch's name of a TensorRT dtype."""
    names = {
        trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16", trt.fp8: "float8_e4m3fn",
        trt.int8: "int8", trt.int32: "int32", trt.int64: "int64", trt.bool: "bool",
    }  # fmt: skip
    return names.get(dtype, str(dtype))


class _BuildMethods:
    """What the builder asks a node: IPluginV3OneBuildV2. Method names and arguments are TensorRT's."""

    trt: Any
    operator: Operator
    fields: Fields
    tactic: int
    num_outputs: int
    described: list[Described]

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [input_types[output.dtype_of] for output in self.operator.outputs]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Any, builder: Any) -> list[Any]:
        shapes = []
        for output in self.operator.outputs:
            dims = self.trt.DimsExprs(inputs[output.shape_of])
            if output.last_size_of is not None:
                index, axis = output.last_size_of
                dims[len(dims) - 1] = inputs[index][axis]
            shapes.append(dims)
        return shapes

    def get_aliased_input(self, output: int) -> int:
        alias = self.operator.outputs[output].alias
        return -1 if alias is None else alias

    def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
        if tensors[position].desc.format != self.trt.TensorFormat.LINEAR:
            return False
        # Formats are asked for one position after the other; the last question sees them all.
        is_last = position == num_inputs + self.num_outputs - 1
        names = [dtype_name(self.trt, tensor.desc.type) for tensor in tensors[: position + 1]]
        return not is_last or self.operator.accepts(names[:num_inputs], names[num_inputs:])

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.described = _described(self.trt, inputs)

    def get_valid_tactics(self) -> list[int]:
        return list(self.operator.tactics(self.described, self.fields))

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return self.operator.workspace_bytes(_described(self.trt, inputs), self.fields, self.tactic)


class _RunMethods:
    """What happens where an engine runs, and where the builder times a tactic: IPluginV3OneRuntime."""

    trt: Any
    operator: Operator
    fields: Fields
    tactic: int
    is_build: bool

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None: ...

    def set_tactic(self, tactic: int) -> None:
        self.tactic = tactic

    def get_fields_to_serialize(self) -> Any:
        return _field_collection(self.trt, self.fields, self.operator.fields)

    def enqueue(
        self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
    ) -> None:
        self.operator.enqueue(
            Launch(
                _buffers(self.trt, input_desc, inputs), _buffers(self.trt, output_desc, outputs),
                self.fields, self.tactic, workspace, stream, self.is_build,
            )
        )  # fmt: skip


def _plugin_class(trt: Any) -> Any:
    """The class of all plugins: TensorRT's interfaces are only known once it is loaded."""
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class Plugin(_BuildMethods, _RunMethods, *bases):  # type: ignore[misc]
        """One node."""

        def __init__(self, operator: Operator, fields: Fields, is_build: bool, tactic: int = 0) -> None:
            for base in bases:
                base.__init__(self)
            # TensorRT deletes its plugins. When it deletes one that it has not asked for an interface yet, as it does
            # when a build fails, the bindings drop the last reference, and Python deletes it once more. So it is
            # never Python's to delete: an object of few hundred bytes is left behind.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            self.trt, self.operator, self.fields = trt, operator, fields
            self.is_build, self.tactic = is_build, tactic
            self.plugin_name, self.plugin_version, self.plugin_namespace = operator.name, VERSION, NAMESPACE
            self.num_outputs = len(operator.outputs)
            self.described = []
            # Nodes with equal fields share their timings in the timing cache.
            self.timing_cache_id = ",".join(f"{name}={fields[name]}" for name in sorted(fields))

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def clone(self) -> Any:
            return Plugin(self.operator, self.fields, self.is_build, self.tactic)

    return Plugin


def _described(trt: Any, inputs: Sequence[Any]) -> list[Described]:
    return [Described(tuple(tensor.max), dtype_name(trt, tensor.desc.type)) for tensor in inputs]


def _buffers(trt: Any, descriptions: Sequence[Any], pointers: Sequence[int]) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(pointer, tuple(description.dims), dtype_name(trt, description.type))
        for description, pointer in zip(descriptions, pointers, strict=True)
    )


def _creator_class(trt: Any) -> Any:
    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        """`faults`: why nodes could not be made, which TensorRT does not pass on."""

        def __init__(self, trt: Any, operator: Operator, plugin_class: Any) -> None:
            super().__init__()
            self.operator, self.plugin_class = operator, plugin_class
            self.name, self.plugin_namespace, self.plugin_version = operator.name, NAMESPACE, VERSION
            self.field_names = _field_collection(trt, {}, operator.fields)
            self.faults: list[str] = []

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            types = self.operator.fields
            values = {f.name: types[f.name](f.data[0]) for f in fields if f.name in types}
            missing = sorted(set(types) - set(values))
            if missing:
                self.faults.append(
                    f"could not create the plugin: the node has no attribute {', '.join(missing)}"
                )
                return None
            return self.make_plugin(values, is_build=phase == trt.TensorRTPhase.BUILD)

        def make_plugin(self, values: Fields, *, is_build: bool) -> Any:
            """A plugin for a network that is put together layer by layer."""
            return self.plugin_class(self.operator, values, is_build)

    return Creator
