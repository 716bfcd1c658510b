"""An exported program -> an ONNX file with the operators of the `pelton` domain, its nodes named after HF modules.

The one owner of the ONNX exporter. Weights stand in a file of their own beside the graph (a protobuf holds 2 GiB).
"""

from __future__ import annotations

import ast
import errno
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..errors import BuildError
from ..plugins_trt import fp8_linear as _fp8_linear
from ..plugins_trt import int4_linear as _int4_linear
from ..plugins_trt.moe_experts import ACTIVATIONS
from ..plugins_trt.plugin import NAMESPACE
from .experts import MOE_EXPERTS
from .export import first_line
from .onnx_passes import released_weights, simplify
from .segments import PAGED_ATTENTION

# Imported to register the operators.
assert _fp8_linear.NAME
assert _int4_linear.NAME

OPSET = 23
GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"


@dataclass(frozen=True, slots=True)
class NodeSchema:
    """A node type of the `pelton` domain: tensors as (name, type variable), and attributes with their ONNX types.

    Tensors of one type variable have one dtype; the type of an output must be that of an input.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    attributes: Mapping[str, onnx.defs.OpSchema.AttrType]
    num_required: int | None = None  # inputs from here on may be left out


_FLOAT, _INT = onnx.defs.OpSchema.AttrType.FLOAT, onnx.defs.OpSchema.AttrType.INT
_SCHEMAS = (
    # Sinks and slopes follow each other without a gap, which TensorRT's parser would not take: attributes say which of
    # them there are.
    NodeSchema(
        "paged_attention",
        (
            ("query", "T"), ("key", "T"), ("value", "T"), ("k_cache", "C"), ("v_cache", "C"),
            ("block_table", "I"), ("seq_lens", "I"), ("query_start_loc", "I"), ("per_head_0", "H"), ("per_head_1", "H"),
        ),
        (("out", "T"), ("k_cache_out", "C"), ("v_cache_out", "C")),
        {
            "scale": _FLOAT, "window": _INT, "soft_cap": _FLOAT, "k_scale": _FLOAT, "v_scale": _FLOAT,
            "has_sinks": _INT, "has_alibi_slopes": _INT,
        },
        num_required=8,
    ),
    # The options are zeros, perm, both or none, as the weight has them: TensorRT refuses a plugin's input that is left
    # out before another one.
    NodeSchema(
        "int4_linear",
        (("x", "T"), ("qweight", "Q"), ("scales", "S"), ("option_0", "A"), ("option_1", "B")),
        (("out", "T"),),
        {"group_size": _INT},
        num_required=3,
    ),
    NodeSchema(
        "fp8_linear", (("x", "T"), ("weight", "W"), ("weight_scale", "S")), (("out", "T"),), {}
    ),
    # Stacks of floats have neither scales nor zeros, those of fp8 and of symmetric int4 have no zeros.
    NodeSchema(
        "moe_experts",
        (
            ("x", "T"), ("router_weights", "R"), ("expert_ids", "I"), ("gate_up", "W"), ("down", "W"),
            ("gate_up_scales", "S"), ("down_scales", "S"), ("gate_up_zeros", "Z"), ("down_zeros", "Z"),
        ),
        (("out", "T"),),
        {"activation": _INT, "group_size": _INT},
        num_required=5,
    ),
)  # fmt: skip


def write_onnx(program: ExportedProgram, directory: Path) -> Path:
    """Convert `program` and write it into `directory`; returns the graph's path.

    Raises `BuildError` naming what the converter does not know, or the layer that Pelton's plugins do not compute.
    """
    _check_arguments(program)
    translations = _translations(_register(_SCHEMAS))
    try:
        with _quiet():
            converted = torch.onnx.export(
                program,
                dynamo=True,
                custom_translation_table=translations,
                optimize=False,
                verify=False,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:
        raise _not_convertible(error) from error
    assert converted is not None
    with released_weights(converted.model):
        try:
            simplify(converted.model)
        except Exception as error:
            raise _not_convertible(error) from error
        _name(converted.model.graph)
        path = directory / GRAPH_FILE
        try:
            converted.save(path, external_data=True)
        except OSError as error:
            if error.errno is not None:
                raise
            # numpy says only how many bytes of a weight it could write.
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {error}") from error
    return path


def _check_arguments(program: ExportedProgram) -> None:
    """Raise `BuildError` naming the layer if an operator has a tensor that its node type has not."""
    pelton = torch.ops.pelton
    for operator, refused in (
        (pelton.int4_linear.default, ("bias",)),
        (pelton.fp8_linear.default, ("input_scale", "bias")),
    ):
        names = [argument.name for argument in operator._schema.arguments]
        for node in program.graph.find_nodes(op="call_function", target=operator):
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            for name in refused:
                if given.get(name) is not None:
                    raise BuildError(
                        f"{_module(node)}: TensorRT's plugin for {operator._schema.name} does not take {name}: "
                        "use --target cuda, or the original weights"
                    )


def _module(node: Node) -> str:
    """Name of the HF module that `node` computes; its own where none was noted."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].model.") if stack else node.name


def _not_convertible(error: Exception) -> BuildError:
    return BuildError(f"the exported graph cannot be converted to ONNX: {first_line(error)}")


def _name(graph: Any) -> None:
    """Name nodes after HF modules, and outputs after what they are."""
    for node in graph:
        node.name = _hf_name(node) or node.name
    _make_names_unique(graph)
    num_layers = (len(graph.outputs) - 1) // 2
    names = ["logits", *(f"{kind}_caches_{i}_out" for kind in "kv" for i in range(num_layers))]
    for output, name in zip(graph.outputs, names, strict=True):
        output.name = name


def _translations(opset: Any) -> dict[Callable[..., Any], Callable[..., Any]]:
    """How each operator of the exported graph is written as a node, once `_check_arguments` has passed."""

    def paged_attention(
        query: Any, key: Any, value: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any,
        query_start_loc: Any, scale: float, window: int = 0, soft_cap: float = 0.0, sinks: Any = None,
        alibi_slopes: Any = None, k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> Any:  # fmt: skip
        return opset.paged_attention(
            query, key, value, k_cache, v_cache, block_table, seq_lens, query_start_loc,
            *(tensor for tensor in (sinks, alibi_slopes) if tensor is not None),
            scale=scale, window=window, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
            has_sinks=int(sinks is not None), has_alibi_slopes=int(alibi_slopes is not None),
        )  # fmt: skip

    def int4_linear(
        x: Any, qweight: Any, scales: Any, zeros: Any, group_size: int, bias: None = None, perm: Any = None
    ) -> Any:
        options = [option for option in (zeros, perm) if option is not None]
        return opset.int4_linear(x, qweight, scales, *options, group_size=group_size)

    def fp8_linear(x: Any, weight: Any, weight_scale: Any, input_scale: None) -> Any:
        return opset.fp8_linear(x, weight, weight_scale)

    def moe_experts(
        x: Any, router_weights: Any, expert_ids: Any, gate_up: Any, down: Any, activation: str,
        gate_up_scales: Any = None, down_scales: Any = None, gate_up_zeros: Any = None, down_zeros: Any = None,
        group_size: int = -1,
    ) -> Any:  # fmt: skip
        optional = (gate_up_scales, down_scales, gate_up_zeros, down_zeros)
        return opset.moe_experts(
            x, router_weights, expert_ids, gate_up, down, *(tensor for tensor in optional if tensor is not None),
            activation=ACTIVATIONS.index(activation), group_size=group_size,
        )  # fmt: skip

    pelton = torch.ops.pelton
    return {
        PAGED_ATTENTION: paged_attention,
        pelton.int4_linear.default: int4_linear,
        pelton.fp8_linear.default: fp8_linear,
        MOE_EXPERTS: moe_experts,
    }


def _register(schemas: tuple[NodeSchema, ...]) -> onnxscript.values.Opset:
    """Make the node types known to ONNX; the exporter checks its output against them."""
    types = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(float8e4m3fn)", "tensor(int8)",
             "tensor(int32)"]  # fmt: skip
    for schema in schemas:
        if onnx.defs.has(schema.name, NAMESPACE):
            continue
        parameter, option = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption
        required = len(schema.inputs) if schema.num_required is None else schema.num_required
        variables = sorted({variable for _, variable in (*schema.inputs, *schema.outputs)})
        onnx.defs.register_schema(
            onnx.defs.OpSchema(
                schema.name,
                NAMESPACE,
                1,
                inputs=[
                    parameter(*tensor, param_option=option.Single if i < required else option.Optional)
                    for i, tensor in enumerate(schema.inputs)
                ],
                outputs=[parameter(*tensor) for tensor in schema.outputs],
                type_constraints=[(variable, types, "") for variable in variables],
                attributes=[
                    onnx.defs.OpSchema.Attribute(name, kind, required=True)
                    for name, kind in schema.attributes.items()
                ],
            )
        )
    return onnxscript.values.Opset(NAMESPACE, 1)


def _hf_name(node: Any) -> str | None:
    """`model.layers.3.mlp.up_proj/MatMul`, from the modules that the exporter noted; None where it noted none."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if scopes is None:
        return None
    modules = [str(scope) for scope in ast.literal_eval(scopes)][:-1]  # the last is the operator's own name
    if not modules or not modules[-1]:
        return None
    return f"{modules[-1].removeprefix('model.')}/{node.op_type}"


def _make_names_unique(graph: Any) -> None:
    seen: dict[str, int] = {}
    for node in graph:
        count = seen.get(node.name, 0)
        seen[node.name] = count + 1
        if count:
            node.name = f"{node.name}_{count}"


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of what is none of the user's business (no torchvision, deprecated internals)."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
