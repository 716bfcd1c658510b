"""`--frontend torch-tensorrt`: torch-tensorrt's converters make the network, in place of ONNX and TensorRT's parser.

    exported program -> its lowering passes -> its converters, and ours for the `pelton` operators -> network

From the network on everything is as in `tensorrt.py`. torch-tensorrt's own entry
(`dynamo.convert_exported_program_to_serialized_trt_engine`) goes on to the engine, but with one profile, no outputs
that alias inputs and outputs called output0, output1, ...; so what that function does up to the network is done here,
with the same parts. They are not all public, hence the pinned release.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ...errors import BuildError
from ...plugins_trt.messages import make_log
from ...plugins_trt.moe_experts import ACTIVATIONS
from ...plugins_trt.plugin import register
from ...plugins_trt.tensorrt import TENSORRT, collector_held, load
from ..diagnose import diagnose
from ..export import first_line
from ..profiles import Profile, ShapeRange
from .tensorrt import PLUGINS, NetworkLayer, TensorRTOptions, build_network

TORCH_TENSORRT = "torch-tensorrt"
_RELEASE = "2.13"
_LOGGERS = ("torch_tensorrt", "torch_tensorrt [TensorRT Conversion Context]")
_INSTALL = (
    f"`pip install torch-tensorrt=={_RELEASE}.*` beside a torch built for CUDA, or leave --frontend out"
)

# By operator: its tensors, in the order of its plugin's inputs. Its other arguments are the plugin's fields, beside
# `has_TENSOR` for those tensors that may be left out and that the plugin could not tell apart.
_TENSORS: Mapping[str, tuple[str, ...]] = {
    "paged_attention": (
        "query", "key", "value", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc", "sinks",
        "alibi_slopes",
    ),
    "int4_linear": ("x", "qweight", "scales", "zeros", "perm"),
    "fp8_linear": ("x", "weight", "weight_scale"),
    "moe_experts": (
        "x", "router_weights", "expert_ids", "gate_up", "down", "gate_up_scales", "down_scales", "gate_up_zeros",
        "down_zeros",
    ),
}  # fmt: skip


def require_torch_tensorrt() -> str:
    """Version of torch-tensorrt. Raises `BuildError` saying what is missing; torch-tensorrt is not imported.

    It cannot be: without CUDA its import fails halfway, after having printed to stdout.
    """
    try:
        version = metadata.version("torch-tensorrt")
    except metadata.PackageNotFoundError:
        raise BuildError(f"frontend: torch-tensorrt is not installed: {_INSTALL}") from None
    if not version.startswith(f"{_RELEASE}."):
        raise BuildError(f"frontend: torch-tensorrt {version} is installed, {_RELEASE} is needed: {_INSTALL}")
    if torch.version.cuda is None:
        raise BuildError(
            f"frontend: torch-tensorrt needs a torch built for CUDA, and this one is {torch.__version__}: {_INSTALL}"
        )
    return version


@collector_held()
def build_plan(
    program: ExportedProgram,
    profiles: Sequence[Profile],
    options: TensorRTOptions,
    directory: Path,
    *,
    timing_cache: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[NetworkLayer, ...]:
    """As `tensorrt.build_plan`, from the exported program."""
    require_torch_tensorrt()
    trt = load(TENSORRT)
    try:
        conversion = importlib.import_module("torch_tensorrt.dynamo.conversion")
    except Exception as error:  # it raises anything, of the bare `Exception` too
        raise BuildError(
            f"frontend: torch-tensorrt is installed but cannot be loaded: {first_line(error)}; "
            "mend its installation, or leave --frontend out"
        ) from error
    creators = {plugin.name: register(trt, plugin) for plugin in PLUGINS}
    log = make_log(trt)
    with _captured(trt, log):
        _register_converters(conversion, creators)
        interpreter = _interpret(conversion, program, profiles, log)
        network = interpreter.ctx.net
        _name_outputs(network)
        _name_layers(network)
        # The interpreter holds the weights that the network points to.
        return build_network(
            trt, TENSORRT, interpreter.builder, network, log, profiles, options, directory,
            timing_cache=timing_cache, on_progress=on_progress,
        )  # fmt: skip


def _interpret(conversion: Any, program: ExportedProgram, profiles: Sequence[Profile], log: Any) -> Any:
    """An interpreter whose network is complete."""
    dynamo = importlib.import_module("torch_tensorrt.dynamo")
    # Sizes are dynamic throughout, and what a converter says of them is for the sizes that it was tested with.
    settings = dynamo.CompilationSettings(assume_dynamic_shape_support=True, require_full_compilation=True)
    interpreter = None
    try:
        graph = _lower(program, settings)
        conversion.DYNAMO_CONVERTERS.set_compilation_settings(settings)
        _check_converters(conversion, graph)
        interpreter = conversion.TRTInterpreter(
            graph, _inputs(graph, profiles), _output_dtypes(graph), compilation_settings=settings
        )
        interpreter._construct_trt_network_def()
    except BuildError as error:  # to which the interpreter has added where it was
        raise BuildError(first_line(error)) from error
    except Exception as error:
        layer = _hf_name(interpreter._cur_node) if interpreter and interpreter._cur_node else None
        where = f"{layer}: " if layer else ""
        said = (
            str(diagnose(list(log.errors), warnings=list(log.warnings))) if log.errors else first_line(error)
        )
        raise BuildError(f"{where}torch-tensorrt cannot convert it: {said}; leave --frontend out") from error
    return interpreter


def _lower(program: ExportedProgram, settings: Any) -> GraphModule:
    lowering = importlib.import_module("torch_tensorrt.dynamo.lowering")
    program = lowering.pre_export_lowering(program, settings)
    program = program.run_decompositions(lowering.get_decompositions())
    graph: GraphModule = lowering.post_lowering(program.module(check_guards=False), settings)
    return graph


def _check_converters(conversion: Any, graph: GraphModule) -> None:
    """Raise `BuildError` naming the first layer that has no converter."""
    for node in graph.graph.nodes:
        if node.op.startswith("call_") and conversion.DYNAMO_CONVERTERS.get(node) is None:
            raise BuildError(
                f"{_hf_name(node)}: torch-tensorrt has no converter for {node.target}; leave --frontend out"
            )


def _inputs(graph: GraphModule, profiles: Sequence[Profile]) -> list[Any]:
    """torch-tensorrt's specifications: a size is dynamic if it is not the same in all profiles."""
    specification = importlib.import_module("torch_tensorrt").Input
    inputs = []
    for node in graph.graph.find_nodes(op="placeholder"):
        ranges = [profile.shapes[node.target] for profile in profiles if node.target in profile.shapes]
        if len(ranges) < len(profiles):
            raise BuildError(f"the profiles have no shapes for the input {node.target}")
        span = _span(ranges)
        inputs.append(
            specification(
                min_shape=span.min, opt_shape=span.opt, max_shape=span.max,
                dtype=node.meta["val"].dtype, name=node.target,
            )
        )  # fmt: skip
    return inputs


def _span(ranges: Sequence[ShapeRange]) -> ShapeRange:
    """The smallest range that holds all `ranges` of an input."""
    lows, highs = zip(*(r.min for r in ranges), strict=True), zip(*(r.max for r in ranges), strict=True)
    return ShapeRange(ranges[0].name, tuple(map(min, lows)), ranges[0].opt, tuple(map(max, highs)))


def _output_dtypes(graph: GraphModule) -> list[torch.dtype]:
    (output,) = graph.graph.find_nodes(op="output")
    return [node.meta["val"].dtype for node in output.args[0]]


def _register_converters(conversion: Any, creators: Mapping[str, Any]) -> None:
    """Tell torch-tensorrt how the operators become plugins.

    Its registry is the process's: the converters of an earlier build stay there, behind these.
    """
    for name in _TENSORS:
        operator = getattr(torch.ops.pelton, name).default
        conversion.dynamo_tensorrt_converter(
            operator, priority=conversion.ConverterPriority.HIGH, supports_dynamic_shapes=True
        )(_Converter(creators[name]))


@dataclass(frozen=True, slots=True)
class _Converter:
    """An operator -> a plugin layer. Called by torch-tensorrt with its context and the node's arguments."""

    creator: Any

    def __call__(
        self, ctx: Any, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
    ) -> Any:
        utils = importlib.import_module("torch_tensorrt.dynamo.conversion.converter_utils")
        operator = self.creator.operator
        path = name.rpartition("/")[0]
        given = dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | dict(kwargs)
        names = _TENSORS[operator.name]
        arguments = {}
        for argument in target._schema.arguments:
            value = given.get(argument.name, argument.default_value)
            if argument.name in names or argument.name in operator.fields:
                arguments[argument.name] = value
            elif value != argument.default_value:
                raise BuildError(
                    f"{_join(path, operator.name)}: Pelton's plugin does not take {argument.name}; "
                    "leave --frontend out"
                )
        tensors = [
            utils.get_trt_tensor(ctx, arguments[tensor], f"{path}/{operator.name}.{tensor}")
            for tensor in names
            if arguments[tensor] is not None
        ]
        arguments |= {f"has_{tensor}": arguments[tensor] is not None for tensor in names}
        if "activation" in arguments:
            arguments["activation"] = ACTIVATIONS.index(arguments["activation"])
        fields = {field: kind(arguments[field]) for field, kind in operator.fields.items()}
        plugin = self.creator.make_plugin(fields, is_build=True)
        layer = ctx.net.add_plugin_v3(tensors, [], plugin)
        layer.name = f"{path}/{operator.name}"
        outputs = tuple(layer.get_output(i) for i in range(layer.num_outputs))
        return outputs[0] if len(outputs) == 1 else outputs


def _name_outputs(network: Any) -> None:
    """The names that executors know, which the ONNX graph has from the start."""
    num_layers = (network.num_outputs - 1) // 2
    names = ["logits", *(f"{kind}_caches_{i}_out" for kind in "kv" for i in range(num_layers))]
    if len(names) != network.num_outputs:
        raise BuildError(f"torch-tensorrt made {network.num_outputs} outputs; leave --frontend out")
    for index, name in enumerate(names):
        network.get_output(index).name = name


def _name_layers(network: Any) -> None:
    """`[MATRIX_MULTIPLY]-[aten_ops.linear.default]-[model.model.layers.0.mlp.up_proj/linear_4]` becomes
    `model.layers.0.mlp.up_proj/matrix_multiply`; what stands around it, constants and plugins have no brackets.
    """
    seen: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if found := re.search(r"\[([\w.]+)/[^\]]*\]$", layer.name):
            name = _join(found[1], layer.type.name.lower())
        elif found := re.fullmatch(r"([\w.]+)/([\w.]+)", layer.name):
            name = _join(found[1], found[2])
        else:
            continue
        seen[name] += 1
        layer.name = name if seen[name] == 1 else f"{name}_{seen[name] - 1}"


def _hf_name(node: Node) -> str:
    """`model.layers.3.mlp.up_proj/linear`, as `onnx_graph` names nodes."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    operator = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return _join(stack[-1][0] if stack else "", operator)


def _join(path: str, operator: str) -> str:
    """The HF module of `path` and the operator. The exported module holds the model as `model`; passes that make nodes
    leave a path that is none.
    """
    module = "" if path.startswith("_empty_nn_module_stack") else path.removeprefix("model.")
    return f"{module}/{operator}" if module else operator


@contextmanager
def _captured(trt: Any, log: Any) -> Iterator[None]:
    """What torch-tensorrt's logger hears from TensorRT goes to `log`, and what it has to say itself to nobody."""
    severity = trt.ILogger.Severity

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                is_error = record.levelno >= logging.ERROR
                log.log(severity.ERROR if is_error else severity.WARNING, record.getMessage())

    handler, loggers = Handler(), [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
