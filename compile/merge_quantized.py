"""Quantised linears that read one tensor (Q/K/V, gate/up) become one, on the exported program.

Compilers may do this for plain products, but `int4_linear` and `fp8_linear` are opaque to them, and a decode step costs
one launch for each. Like `passes.py` this knows operators and shapes, no family names.

Weights are joined along the output features, so each output is the same sum over the same numbers as before. Layers are
merged only if whatever is not per output feature agrees: group size, zero points or none, the order of the features,
the scale of the activations.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from ..plugins_trt import fp8_linear as _fp8_linear
from ..plugins_trt import int4_linear as _int4_linear

# Imported to register the operators.
assert _fp8_linear.NAME
assert _int4_linear.NAME


@dataclass(frozen=True, slots=True)
class _Operator:
    """Arguments by position: `joined` ones have output features along an axis, `shared` ones must be equal.

    `weight` is the joined one that tells the number of output features. A joined argument of one element is a scale of
    all output features, where `scale` names it.
    """

    target: Any
    weight: int
    joined: Mapping[int, int]
    shared: tuple[int, ...]
    scale: int | None = None


_OPERATORS = (
    # x, qweight [B, N, 16], scales [G, N], zeros [G, N], group_size, bias [N], perm [K]
    _Operator(torch.ops.pelton.int4_linear.default, 1, {1: 1, 2: 1, 3: 1, 5: 0}, (4, 6)),
    # x, weight [N, K], weight_scale [1] or [N], input_scale, bias [N]
    _Operator(torch.ops.pelton.fp8_linear.default, 1, {1: 0, 2: 0, 4: 0}, (3,), scale=2),
)


def merge_quantized_siblings(program: ExportedProgram) -> int:
    """Merge in place; returns how many linears have gone.

    The tensors of the modules that were exported become views of the joined ones, so no weight is held twice.
    """
    weights = _Weights(program)
    count = 0
    for kind in _OPERATORS:
        groups: list[list[Node]] = []
        for node in program.graph.find_nodes(op="call_function", target=kind.target):
            if not weights.are_own(node):
                continue
            fitting = (g for g in groups if weights.are_siblings(kind, g[0], node))
            group = next(fitting, None)
            groups.append([node]) if group is None else group.append(node)
        for group in groups:
            if len(group) > 1:
                _merge(program, weights, kind, group)
                count += len(group) - 1
    program.graph_module.recompile()
    return count


class _Weights:
    """The parameters and buffers of a program, by the placeholder nodes that stand for them."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._specs = {s.arg.name: s for s in program.graph_signature.input_specs if s.target is not None}

    def __contains__(self, node: Node) -> bool:
        return node.op == "placeholder" and self._specs.get(node.name) is not None

    def __getitem__(self, node: Node) -> Tensor:
        tensor = self._program.state_dict[self._target(node)]
        assert isinstance(tensor, Tensor)
        return tensor

    def are_own(self, node: Node) -> bool:
        """All tensors of a linear but x are weights that nothing else reads."""
        source, *others = node.args
        tensors = [argument for argument in others if isinstance(argument, Node)]
        return (
            isinstance(source, Node)
            and not node.kwargs
            and all(
                t in self and len(t.users) == 1 and self._target(t) in self._program.state_dict
                for t in tensors
            )
        )

    def are_siblings(self, kind: _Operator, first: Node, second: Node) -> bool:
        if first.args[0] is not second.args[0]:
            return False
        joined = all(self._can_join(_argument(first, i), _argument(second, i)) for i in kind.joined)
        return joined and all(self._equal(_argument(first, i), _argument(second, i)) for i in kind.shared)

    def replace(self, node: Node, tensor: Tensor) -> None:
        self._program.state_dict[self._target(node)] = tensor
        node.meta = {"val": node.meta["val"].new_empty(tensor.shape)}

    def drop(self, node: Node) -> None:
        """Take a weight that nothing reads any more out of the program."""
        spec = self._specs.pop(node.name)
        self._program.graph_signature.input_specs.remove(spec)
        if all(other.target != spec.target for other in self._specs.values()):
            del self._program.state_dict[self._target_of(spec)]
        self._program.graph.erase_node(node)

    def _can_join(self, first: Any, second: Any) -> bool:
        if first is None or second is None:
            return first is second
        return self[first].dtype == self[second].dtype

    def _equal(self, first: Any, second: Any) -> bool:
        if isinstance(first, Node) and isinstance(second, Node):
            return torch.equal(self[first], self[second])
        return bool(first == second)

    def _target(self, node: Node) -> str:
        return self._target_of(self._specs[node.name])

    @staticmethod
    def _target_of(spec: Any) -> str:
        return str(spec.target)


def _merge(program: ExportedProgram, weights: _Weights, kind: _Operator, group: Sequence[Node]) -> None:
    first = group[0]
    values = [node.meta["val"] for node in group]
    sizes = [int(value.shape[-1]) for value in values]
    for index, axis in kind.joined.items():
        places = [_argument(node, index) for node in group]
        if places[0] is None:
            continue
        tensors = [weights[place] for place in places]
        if index == kind.scale:
            tensors = [tensor.expand(size) for tensor, size in zip(tensors, sizes, strict=True)]
        joined = torch.cat([tensor.detach() for tensor in tensors], axis)
        if index != kind.scale:
            for tensor, part in zip(tensors, torch.split(joined, sizes, axis), strict=True):
                tensor.data = part
        weights.replace(places[0], joined)
    graph = program.graph
    with graph.inserting_after(first):
        parts = graph.call_function(torch.ops.aten.split_with_sizes.default, (first, sizes, -1))
    outputs: list[Node] = []
    for index, node in enumerate(group):
        with graph.inserting_after(outputs[-1] if outputs else parts):
            outputs.append(graph.call_function(operator.getitem, (parts, index)))
        outputs[-1].meta = _origin(node) | {"val": values[index]}
    parts.meta = _origin(first) | {"val": values}
    first.meta = _origin(first) | {"val": values[0].new_empty((*values[0].shape[:-1], sum(sizes)))}
    for node, output in zip(group, outputs, strict=True):
        node.replace_all_uses_with(output, delete_user_cb=lambda user: user is not parts)
        program.graph_signature.replace_all_uses(node.name, output.name)
    for node in group[1:]:
        own = [argument for argument in node.args[1:] if isinstance(argument, Node)]
        graph.erase_node(node)
        for argument in own:
            weights.drop(argument)


def _argument(node: Node, index: int) -> Any:
    """By position; what was left out is None."""
    return node.args[index] if index < len(node.args) else None


def _origin(node: Node) -> dict[str, Any]:
    """What names the module that made `node`."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "torch_fn") if key in node.meta}
