"""The `cuda` target: AOTInductor packages between the attentions, for the device that they are compiled on.

What it writes into a directory is described in `plugins_trt/cuda_engine.py`. Weights are inputs of a package, not its
constants: pieces that differ in their weights alone share one, and the file of weights is read once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from ...errors import BuildError
from ...plugins_trt.cuda_engine import ENGINE_FILE, WEIGHTS_FILE, AttentionProgram, CudaProgram, PieceProgram
from ..export import KVGeometry, first_line
from ..kernel_checks import check_attention
from ..passes import merge_equal_nodes, optimise
from ..piecewise import AttentionCall, cut_at_attention, move_to_device
from ..segments import Segment, evaluate, get_weight

_INDUCTOR_OPTIONS: dict[str, Any] = {
    "assert_indirect_indexing": False,  # indices come from the block tables that we made
    "cpp.dynamic_threads": True,  # the number of threads is the runtime's choice
}


def lower(
    program: ExportedProgram,
    geometry: tuple[KVGeometry, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    arch: int | None,
    directory: Path,
    facts: dict[str, Any],
    on_progress: Callable[[str], None] = lambda _: None,
) -> CudaProgram:
    """Compile `program` for `device` into `directory`; `facts` is what else `engine.json` holds.

    `arch` is the architecture that attention's kernels are for (`plugins_trt/architectures.py`); None: the reference
    attends. Raises `BuildError` naming the layer whose attention they do not compute, or the piece that Inductor
    refuses.
    """
    graph_module = optimise(program.module(check_guards=False))
    merge_equal_nodes(graph_module)
    move_to_device(graph_module, device)
    store = _WeightStore(graph_module)
    packages: dict[Hashable, str] = {}
    cut = cut_at_attention(graph_module)
    if arch is not None:
        check_attention(graph_module.graph, geometry, dtype, block_size, (arch,))
    pieces = []
    for piece in cut:
        segment = piece.segment
        signature = segment.signature(graph_module, by_content=False)
        if signature not in packages:
            on_progress(f"compiling {segment.name}")
            packages[signature] = f"{segment.name}.pt2"
            _compile(graph_module, segment, device, directory / packages[signature])
        pieces.append(
            PieceProgram(
                package=packages[signature],
                inputs=tuple(node.name for node in segment.inputs),
                weights=tuple(store.add(name) for name in segment.weights),
                outputs=tuple(node.name for node in segment.outputs),
                attentions=tuple(_attention_program(call, store) for call in piece.attentions),
            )
        )
    save_file(store.tensors, directory / WEIGHTS_FILE)
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors creates it for its owner alone
    (cache_dtype,) = {call.cache_dtype for piece in cut for call in piece.attentions}
    engine = CudaProgram(
        cache_dtype=str(cache_dtype).removeprefix("torch."),
        block_size=block_size,
        kv_heads=tuple(g.num_heads for g in geometry),
        head_dims=tuple(g.head_dim for g in geometry),
        pieces=tuple(pieces),
    )
    (directory / ENGINE_FILE).write_text(json.dumps({**facts, **engine.to_json()}, indent=1) + "\n")
    return engine


class _WeightStore:
    """Weights of a graph by their names in the file, each content once: tied weights stay tied."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Hashable, str] = {}

    def add(self, attribute: str) -> str:
        weight = get_weight(self._graph_module, attribute)
        key = (weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype)
        if key not in self._names:
            name = self._names[key] = f"w{len(self.tensors)}"
            owns_storage = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
            self.tensors[name] = weight if owns_storage else weight.contiguous().clone()
        return self._names[key]


class _PieceModule(nn.Module):
    """A segment as a function of its inputs and its weights."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self._segment = segment

    def forward(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        return evaluate(self._segment, inputs, weights, _no_attention)


def _no_attention(node: Node, values: dict[Node, Any]) -> Tensor:
    raise AssertionError(f"{node.name}: pieces end where the graph attends")


def _compile(graph_module: GraphModule, segment: Segment, device: torch.device, path: Path) -> None:
    inputs, shapes = _example_inputs(segment, device)
    # Real values are not looked at: a piece is compiled for all of its class.
    weights = [
        torch.empty_like(get_weight(graph_module, name), device=device, memory_format=torch.contiguous_format)
        for name in segment.weights
    ]
    static: list[dict[int, Any]] = [{} for _ in weights]
    try:
        with torch.no_grad():
            exported = torch.export.export(
                _PieceModule(segment), (inputs, weights), dynamic_shapes=(shapes, static), strict=False
            )
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs=dict(_INDUCTOR_OPTIONS)
            )
    except Exception as error:
        raise BuildError(f"Inductor refused {_describe(segment)}: {first_line(error)}") from error


def _example_inputs(segment: Segment, device: torch.device) -> tuple[list[Tensor], list[dict[int, Any]]]:
    """Sizes are those of the exported program's own example: none is 1, no two are equal by accident."""
    tensors, shapes = [], []
    for node in segment.inputs:
        fake = node.meta["val"]
        sizes = [s if isinstance(s, int) else s.node.hint for s in fake.shape]
        tensors.append(torch.zeros(sizes, dtype=fake.dtype, device=device))
        shapes.append({i: Dim.DYNAMIC for i, s in enumerate(fake.shape) if not isinstance(s, int)})
    return tensors, shapes


def _describe(segment: Segment) -> str:
    """`segment` with the modules of the model that it computes."""
    names: dict[str, None] = {}
    for node in segment.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if stack:
            names[str(stack[-1][0]).removeprefix("L['self'].model.")] = None
    modules = list(names)
    return f"{segment.name} ({modules[0]} to {modules[-1]})" if modules else segment.name


def _attention_program(call: AttentionCall, store: _WeightStore) -> AttentionProgram:
    options = dict(call.options)
    for name in ("sinks", "alibi_slopes"):
        node = options[name]
        if node is None:
            continue
        if node.op != "get_attr":
            raise BuildError(
                f"layer {call.layer}: the {name} of its attention are not constant: not supported"
            )
        options[name] = store.add(str(node.target))
    for name in ("scale", "soft_cap", "k_scale", "v_scale"):
        options[name] = float(options[name])
    return AttentionProgram(
        layer=call.layer,
        query=call.query.name,
        key=call.key.name,
        value=call.value.name,
        output=call.output.name,
        **options,
    )
