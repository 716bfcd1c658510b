"""Cut an exported model into segments, one per decoder layer, and find those that are alike.

Layers of a class have the same graph and differ only in their weights, so a target compiles each class once: the
time of a build does not grow with the number of layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ..errors import BuildError
from ..plugins_trt.paged_attention import paged_attention

PAGED_ATTENTION = torch.ops.pelton.paged_attention.default
assert paged_attention is not None  # imported to register the operator


@dataclass(frozen=True)
class Attention:
    """How one layer attends: what the operator's contract has besides the step and its pages."""

    scale: float
    window: int
    soft_cap: float
    sinks: Node | None
    alibi_slopes: Node | None
    k_scale: float
    v_scale: float


_DEFAULTS = (0, 0.0, None, None, 1.0, 1.0)  # of the operator's arguments after `scale`


def attention_of(node: Node) -> Attention:
    """Of a `PAGED_ATTENTION` node."""
    given: tuple[Any, ...] = node.args[8:]
    arguments: tuple[Any, ...] = (*given, *_DEFAULTS[len(given) - 1 :])
    scale, window, soft_cap, sinks, alibi_slopes, k_scale, v_scale = arguments
    return Attention(
        float(scale), int(window), float(soft_cap), sinks, alibi_slopes, float(k_scale), float(v_scale)
    )


def with_scales(node: Node, k_scale: float, v_scale: float) -> None:
    """Let a `PAGED_ATTENTION` node hold its pages by these scales; the graph module must be recompiled."""
    a = attention_of(node)
    node.args = (
        *node.args[:8], a.scale, a.window, a.soft_cap, a.sinks, a.alibi_slopes, k_scale, v_scale,
    )  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """A run of nodes. `inputs` are values from outside, `outputs` those that other segments (or the caller) read.

    `weights` are attribute names in order of first use.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    weights: tuple[str, ...]

    def attention(self) -> Iterator[Node]:
        return (node for node in self.nodes if node.target is PAGED_ATTENTION)

    def signature(self, graph_module: GraphModule, *, by_content: bool = True) -> Hashable:
        """Equal for segments that compute the same function of their inputs and weights.

        With `by_content` weights that are not floats must also be equal: the compiler may have seen them.
        """
        names: dict[Node, Hashable] = {
            node: ("input", i, _fake_signature(node)) for i, node in enumerate(self.inputs)
        }
        for i, node in enumerate(self.nodes):
            names[node] = ("node", i)
        order = {weight: i for i, weight in enumerate(self.weights)}
        rows: list[Hashable] = []
        for node in self.nodes:
            if node.op == "get_attr":
                value = get_weight(graph_module, str(node.target))
                form = (tuple(value.shape), str(value.dtype))
                is_free = value.is_floating_point() or not by_content
                content = None if is_free else tuple(value.flatten().tolist())
                rows.append(("weight", order[str(node.target)], form, content))
            else:
                rows.append((str(node.target), _freeze(node.args, names), _freeze(node.kwargs, names)))
        return (tuple(rows), tuple(names[node] for node in self.outputs))


def layer_prefix(model: nn.Module, num_layers: int) -> str:
    """Qualified name of the list of decoder layers: the module list with as many entries as layers."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not names:
        raise BuildError(f"{type(model).__name__}: no list of {num_layers} decoder layers found")
    return str(min(names, key=lambda name: name.count(".")))


def cut(graph_module: GraphModule, prefix: str, num_layers: int) -> list[Segment]:
    """Prologue, layers in order, epilogue; every node is in one segment, but sizes, which each computes for itself."""
    last_segment = num_layers + 1
    place: dict[Node, int] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or not is_tensor_valued(node):
            continue
        own = _layer_of(node, prefix)
        floor = max((place[i] for i in _tensor_sources(node) if i in place), default=0)
        if own is not None and own + 1 < floor:
            raise BuildError(f"layer {own} reads a value of a later layer: {node.name}")
        place[node] = own + 1 if own is not None else (last_segment if floor else 0)
    results = step_results(graph_module)
    segments = []
    for index in range(last_segment + 1):
        name = "prologue" if index == 0 else "epilogue" if index == last_segment else f"layer.{index - 1}"
        core = [n for n, p in place.items() if p == index]
        segments.append(make_segment(name, core, results))
    return segments


def make_segment(name: str, core: list[Node], results: list[Node]) -> Segment:
    """The nodes of `core` with the weights and sizes that they read; `results` are values that the caller wants."""
    members = set(core)
    pending = list(core)
    while pending:  # sizes and weights are cloned into each segment that reads them
        for source in _sources(pending.pop()):
            is_shared = source.op == "get_attr" or (
                source.op == "call_function" and not is_tensor_valued(source)
            )
            if is_shared and source not in members:
                members.add(source)
                pending.append(source)
    nodes = tuple(n for n in core[0].graph.nodes if n in members) if core else ()
    inputs: dict[Node, None] = {}
    weights: dict[str, None] = {}
    for node in nodes:
        if node.op == "get_attr":
            weights[str(node.target)] = None
        for source in _sources(node):
            if source not in members:
                inputs[source] = None
    outputs = tuple(
        n
        for n in nodes
        if n in core and (n in results or any(u.op != "output" and u not in members for u in n.users))
    )
    return Segment(name, nodes, tuple(inputs), outputs, tuple(weights))


class SegmentModule(nn.Module):
    """A segment as a module of its own, with `attention(index, query, key, value, node)` in place of the operator.

    `weights` stand in order for `segment.weights`. `forward(inputs, extras)` takes the segment's inputs and whatever
    `attention` needs besides.
    """

    def __init__(
        self,
        segment: Segment,
        weights: Sequence[Tensor],
        attention: Callable[[Node, dict[Node, Any], tuple[Tensor, ...]], Tensor],
    ) -> None:
        super().__init__()
        self.segment = segment
        self._attention = attention
        for index, weight in enumerate(weights):
            self.register_buffer(f"weight_{index}", weight)

    def forward(self, inputs: list[Tensor], extras: list[Tensor]) -> list[Tensor]:
        weights = [getattr(self, f"weight_{i}") for i in range(len(self.segment.weights))]
        return evaluate(
            self.segment, inputs, weights, lambda node, values: self._attention(node, values, tuple(extras))
        )


def evaluate(
    segment: Segment,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    attention: Callable[[Node, dict[Node, Any]], Tensor],
) -> list[Tensor]:
    """The outputs of `segment`, contiguous; `inputs` and `weights` stand in its order."""
    values: dict[Node, Any] = dict(zip(segment.inputs, inputs, strict=True))
    by_name = dict(zip(segment.weights, weights, strict=True))
    for node in segment.nodes:
        if node.op == "get_attr":
            values[node] = by_name[str(node.target)]
        elif node.target is PAGED_ATTENTION:
            values[node] = (attention(node, values), None, None)
        else:
            arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
            keywords = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
            function = cast("Callable[..., Any]", node.target)
            values[node] = function(*arguments, **keywords)
    return [values[node].contiguous() for node in segment.outputs]


def get_weight(graph_module: GraphModule, name: str) -> Tensor:
    value: object = graph_module
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value.detach()


def _sources(node: Node) -> list[Node]:
    """What a segment reads to compute `node`: of paged attention only what the target's own form needs."""
    if node.target is PAGED_ATTENTION:
        return [a for a in (*node.args[:5], attention_of(node).sinks) if isinstance(a, Node)]
    return node.all_input_nodes


def _tensor_sources(node: Node) -> list[Node]:
    return [source for source in _sources(node) if source.op != "get_attr"]


def is_tensor_valued(node: Node) -> bool:
    """Whether `node` is a tensor, or several, and not a size."""
    value = node.meta.get("val")
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _layer_of(node: Node, prefix: str) -> int | None:
    """Index of the decoder layer whose modelling code made `node`."""
    marker = f"{prefix}."
    for name, *_ in node.meta.get("nn_module_stack", {}).values():
        _, found, rest = str(name).partition(marker)
        if found:
            head = rest.split(".")[0]
            if head.isdigit():
                return int(head)
    return None


def step_results(graph_module: GraphModule) -> list[Node]:
    """What a caller reads of a step: the logits, then the hidden states of a graph exported with them.

    The graph returns its caches between them, which engines write in place.
    """
    leaves = torch.utils._pytree.tree_leaves(graph_module.graph.output_node().args)
    return [leaf for leaf in leaves if isinstance(leaf, Node) and not _is_cache(leaf)]


def _is_cache(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.target is PAGED_ATTENTION


def _fake_signature(node: Node) -> Hashable:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(s if isinstance(s, int) else "dynamic" for s in value.shape))
    return str(type(value))


def _freeze(value: Any, names: dict[Node, Hashable]) -> Hashable:
    if isinstance(value, Node):
        return names.get(value, "unread")
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v, names) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v, names)) for k, v in value.items())
    return repr(value)
