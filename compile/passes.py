"""Graph passes on the exported program. They know operators and shapes, no family names."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .segments import get_weight

aten = torch.ops.aten

_INERT = frozenset(
    {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg}
)
# Aliases of a value that the exporter leaves behind where a module asked for what already held.
_NO_OPS = frozenset({aten.detach_.default, aten.detach.default, aten.alias.default})


def optimise(graph_module: GraphModule) -> GraphModule:
    """Apply all passes in place and return `graph_module`."""
    drop_inert(graph_module)
    fold_constants(graph_module)
    merge_sibling_linears(graph_module)
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


def drop_inert(graph_module: GraphModule) -> None:
    """Drop assertions about dtypes and devices, and operators that return their argument."""
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in _INERT:
            graph_module.graph.erase_node(node)
        elif node.op == "call_function" and node.target in _NO_OPS:
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)


def fold_constants(graph_module: GraphModule) -> None:
    """Compute now what depends on weights alone (such as Gemma's `1 + weight`)."""
    graph = graph_module.graph
    values: dict[Node, Tensor] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            values[node] = get_weight(graph_module, str(node.target))
            continue
        inputs = node.all_input_nodes
        is_foldable = node.op == "call_function" and inputs and all(i in values for i in inputs)
        if not is_foldable or node.is_impure():
            continue
        arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
        keywords = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
        result = node.target(*arguments, **keywords)
        if isinstance(result, Tensor):
            values[node] = result
    for index, node in enumerate(n for n in list(graph.nodes) if n in values and n.op != "get_attr"):
        if all(user in values for user in node.users):
            continue
        if values[node].untyped_storage().data_ptr() in {
            values[n].untyped_storage().data_ptr() for n in values if n.op == "get_attr"
        }:
            continue  # a view of a weight: as cheap as the weight, and it keeps tied weights tied
        with graph.inserting_before(node):
            folded = graph.get_attr(_register(graph_module, f"folded_{index}", values[node].contiguous()))
            folded.meta = dict(node.meta)
        node.replace_all_uses_with(folded)
    graph.eliminate_dead_code()


def merge_sibling_linears(graph_module: GraphModule) -> None:
    """Linears that read one tensor (Q/K/V, gate/up) become one with their rows stacked."""
    graph = graph_module.graph
    siblings: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        source, *parameters = node.args
        if isinstance(source, Node) and all(_is_weight(p) for p in parameters if p is not None):
            siblings[source].append(node)
    for index, (source, linears) in enumerate(siblings.items()):
        has_bias = {len(n.args) > 2 and n.args[2] is not None for n in linears}
        if len(linears) < 2 or len(has_bias) > 1:
            continue
        weights = [_parameter(graph_module, n, 1) for n in linears]
        arguments = [_register(graph_module, f"merged_weight_{index}", torch.cat(weights))]
        if has_bias.pop():
            biases = [_parameter(graph_module, n, 2) for n in linears]
            arguments.append(_register(graph_module, f"merged_bias_{index}", torch.cat(biases)))
        with graph.inserting_before(linears[0]):
            attributes = [graph.get_attr(name) for name in arguments]
            merged = graph.call_function(aten.linear.default, (source, *attributes))
            parts = graph.call_function(
                aten.split_with_sizes.default, (merged, [w.shape[0] for w in weights], -1)
            )
            outputs = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(linears))]
        for new in (*attributes, merged, parts, *outputs):
            new.meta["nn_module_stack"] = linears[0].meta.get("nn_module_stack", {})
        for linear, output in zip(linears, outputs, strict=True):
            output.meta["val"] = linear.meta.get("val")
            linear.replace_all_uses_with(output)
            graph.erase_node(linear)
    graph.eliminate_dead_code()


def merge_equal_nodes(graph_module: GraphModule) -> None:
    """Nodes that compute the same of the same values become the first of them (the rotary tables that each layer
    unsqueezes for itself).
    """
    graph = graph_module.graph
    first: dict[object, Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not (
            isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
        ):
            continue
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or node.is_impure():
            continue
        key = (target, repr(node.args), repr(node.kwargs))
        if (same := first.setdefault(key, node)) is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _is_weight(argument: object) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _parameter(graph_module: GraphModule, node: Node, index: int) -> Tensor:
    argument = node.args[index]
    assert isinstance(argument, Node)
    return get_weight(graph_module, str(argument.target))


def _register(graph_module: GraphModule, name: str, value: Tensor) -> str:
    graph_module.register_buffer(name, value)
    return name
