"""`pelton::int4_linear` as a TensorRT plugin; the contract stands in `int4_linear.py`.

Inputs are x, qweight and scales, then zeros and perm if the weight has them: they are told apart by their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plugin import Buffer, Described, Fields, Launch, Operator, Output

if TYPE_CHECKING:
    from torch import Tensor

    from .int4_linear_tactics import Problem
    from .linear_tactics import Tactic

# Chosen by the shapes of each call; the tactics of fixed tiles follow it.
_BY_SHAPES = 1
_FLOATS = ("float16", "bfloat16", "float32")


def _accepts(inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    x, qweight, scales, *options = inputs
    return (
        x in _FLOATS
        and scales in _FLOATS
        and qweight == "int8"
        and options in ([], ["int8"], ["int32"], ["int8", "int32"])
        and list(outputs) == [x]
    )


def _problem(inputs: Sequence[Described | Buffer], fields: Fields) -> Problem:
    import torch

    from .int4_linear_tactics import Problem

    x, qweight = inputs[0], inputs[1]
    rows, in_features = math.prod(x.shape[:-1]), x.shape[-1]
    return Problem(rows, qweight.shape[1], in_features, int(fields["group_size"]), getattr(torch, x.dtype))


def _tactics(inputs: Sequence[Described], fields: Fields) -> list[int]:
    from .int4_linear_tactics import TACTICS, supports

    problem = _problem(inputs, fields)
    return [
        _BY_SHAPES,
        *(_BY_SHAPES + 1 + i for i, tactic in enumerate(TACTICS) if supports(tactic, problem)),
    ]


def by_kind(options: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """zeros and perm, of the inputs that follow the scales."""
    named = {str(option.dtype): option for option in options}
    return named.get("torch.int8"), named.get("torch.int32")


def _fixed(tactic: int) -> Tactic | None:
    from .int4_linear_tactics import TACTICS

    return None if tactic <= _BY_SHAPES else TACTICS[tactic - _BY_SHAPES - 1]


def _workspace(inputs: Sequence[Described], fields: Fields, tactic: int) -> int:
    from .int4_linear_tactics import workspace_bytes

    has_perm = any(option.dtype == "int32" for option in inputs[3:])
    return workspace_bytes(_problem(inputs, fields), _fixed(tactic), has_perm=has_perm)


def _enqueue(launch: Launch) -> None:
    from .int4_linear_tactics import default_tactic, workspace_bytes
    from .int4_linear_triton import int4_linear

    problem = _problem(launch.inputs, launch.fields)
    tactic = _fixed(launch.tactic) or default_tactic(problem)
    with launch.on_stream():
        x, qweight, scales, *options = (buffer.as_tensor() for buffer in launch.inputs)
        zeros, perm = by_kind(options)
        int4_linear(
            x, qweight, scales, zeros, int(launch.fields["group_size"]), perm=perm,
            tactic=tactic, out=launch.outputs[0].as_tensor(),
            workspace=launch.workspace_block(workspace_bytes(problem, tactic, has_perm=perm is not None)),
        )  # fmt: skip


INT4_LINEAR_PLUGIN = Operator(
    name="int4_linear",
    outputs=(Output(dtype_of=0, shape_of=0, last_size_of=(1, 1)),),
    fields={"group_size": int},
    accepts=_accepts,
    tactics=_tactics,
    workspace=_workspace,
    enqueue=_enqueue,
)
