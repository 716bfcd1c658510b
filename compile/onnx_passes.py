"""What is made of a converted graph before TensorRT's parser reads it.

The parser refuses sizes that only fold to constants, so constants are folded and the shapes of reshapes written out.
The rules are those of onnxscript that match something in a decoder: its whole set costs more than the conversion
itself, because one of its rules (slices that become a split) walks all nodes again for each node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir
from onnx_ir.passes import common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions
from onnxscript.rewriter.rules import common as rules

_RULES = (
    rules.materialize_reshape_shape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.reshape_reshape_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.transpose_transpose_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.no_op_transpose_rule,
    rules.mul_by_1_rule,
    rules.add_0_rule,
)
# A rule can make constants, and a constant can let a rule match: nothing is left to do after the second round.
_ROUNDS = 2


def simplify(model: onnx_ir.Model) -> None:
    """Fold, rewrite and fuse (RMS norms become one node) in place."""
    optimizer.inline(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        rewriter.rewrite(model, _RULES)
    for graph_pass in (
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.NameFixPass(),
    ):
        graph_pass(model)
    onnx_fusions.fuse(model)


@contextmanager
def released_weights(model: onnx_ir.Model) -> Iterator[None]:
    """Drop the weights that `model` holds before and after the body, once that has saved it.

    onnxscript's rules are global and keep the last graph that they looked at.
    """
    values = list(model.graph.initializers.values())
    try:
        yield
    finally:
        for value in (*values, *model.graph.initializers.values()):
            value.const_value = None
