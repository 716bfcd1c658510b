"""Cut an exported model where it attends, for targets whose attention runs between compiled pieces.

    piece 0          embedding, rotary tables, layer 0 up to its queries, keys and values
      attention 0    in place on the pages
    piece 1          the rest of layer 0, layer 1 up to its queries, keys and values
      ...
    piece L          the rest of the last layer, final norm, head

A piece holds what depends on exactly so many attentions, so no names of modules are needed, and what stands on both
sides of a layer's border is compiled, and fused, as one. Pieces between layers that are alike are alike too.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import BuildError
from .segments import PAGED_ATTENTION, Segment, is_tensor_valued, make_segment, step_results

_STEP_INPUTS = ("block_table", "seq_lens", "query_start_loc")


@dataclass(frozen=True)
class AttentionCall:
    """One attention: the values it reads, the value that later pieces read of it, and its other arguments by name.

    `cache_dtype` is that of the pages, as exported.
    """

    layer: int
    cache_dtype: torch.dtype
    query: Node
    key: Node
    value: Node
    output: Node
    options: dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A compiled piece and the attentions that run after it: one, or none after the last."""

    segment: Segment
    attentions: tuple[AttentionCall, ...]


def cut_at_attention(graph_module: GraphModule) -> list[Piece]:
    """The pieces in order. Raises `BuildError` where the graph does something else with pages than to attend."""
    depth: dict[Node, int] = {}  # attentions that a value depends on
    cores: dict[int, list[Node]] = {}
    attentions: dict[int, list[AttentionCall]] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or not is_tensor_valued(node):
            continue
        depth[node] = max((depth[source] for source in node.all_input_nodes if source in depth), default=0)
        if node.target is PAGED_ATTENTION:
            attentions.setdefault(depth[node], []).append(_attention_call(node))
        elif (index := _attention_output(node)) is None:
            cores.setdefault(depth[node], []).append(node)
        elif index == 0:
            depth[node] += 1
    results = step_results(graph_module)
    last = max(depth.values(), default=0)
    return [
        Piece(make_segment(f"piece_{i}", cores.get(i, []), results), tuple(attentions.get(i, ())))
        for i in range(last + 1)
    ]


def _attention_output(node: Node) -> int | None:
    """Which output of an attention `node` is, if it is one: the result, or a cache."""
    if node.target is not operator.getitem:
        return None
    source, index = node.args
    if not isinstance(source, Node) or source.target is not PAGED_ATTENTION:
        return None
    assert isinstance(index, int)
    if index and any(user.op != "output" for user in node.users):
        raise BuildError(f"{source.name}: its pages are read by more than the next step: not supported")
    return index


def _attention_call(node: Node) -> AttentionCall:
    arguments: dict[str, Any] = {
        argument.name: node.args[i]
        if i < len(node.args)
        else node.kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(PAGED_ATTENTION._schema.arguments)
    }
    k_cache, v_cache = arguments.pop("k_cache"), arguments.pop("v_cache")
    layer = int(k_cache.name.rpartition("_")[2]) if k_cache.op == "placeholder" else -1
    expected = (f"k_caches_{layer}", f"v_caches_{layer}")
    read = [arguments.pop(name) for name in _STEP_INPUTS]
    if (k_cache.name, v_cache.name) != expected or [n.name for n in read] != list(_STEP_INPUTS):
        raise BuildError(f"{node.name}: it attends over pages that are not the step's own: not supported")
    outputs = [user for user in node.users if _attention_output(user) == 0]
    if len(outputs) != 1:
        raise BuildError(f"{node.name}: its result is read {len(outputs)} times as exported: not supported")
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    return AttentionCall(layer, k_cache.meta["val"].dtype, query, key, value, outputs[0], arguments)


def move_to_device(graph_module: GraphModule, device: torch.device) -> None:
    """Make what the graph creates there, and not where it was exported, on `device`. In place.

    Devices stand in arguments only: a model is exported on one, so nothing is copied between two.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, (list, tuple)):
            return type(value)(moved(v) for v in value)
        return value

    for node in graph_module.graph.nodes:
        node.args = tuple(moved(a) for a in node.args)
        node.kwargs = {name: moved(a) for name, a in node.kwargs.items()}
    graph_module.recompile()
