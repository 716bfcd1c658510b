"""`pelton::fp8_linear` as a TensorRT plugin; the contract stands in `fp8_linear.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plugin import Buffer, Described, Fields, Launch, Operator, Output

if TYPE_CHECKING:
    from .fp8_linear_tactics import Problem
    from .linear_tactics import Tactic

# Chosen by the shapes of each call; the tactics of fixed tiles follow it.
_BY_SHAPES = 1
_FLOATS = ("float16", "bfloat16", "float32")


def _accepts(inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    x, weight, weight_scale = inputs
    return x in _FLOATS and weight == "float8_e4m3fn" and weight_scale == "float32" and list(outputs) == [x]


def _problem(inputs: Sequence[Described | Buffer]) -> Problem:
    from .fp8_linear_tactics import Problem

    x, weight = inputs[0], inputs[1]
    return Problem(math.prod(x.shape[:-1]), weight.shape[0], x.shape[-1])


def _tactics(inputs: Sequence[Described], fields: Fields) -> list[int]:
    from .fp8_linear_tactics import TACTICS, supports

    problem = _problem(inputs)
    return [
        _BY_SHAPES,
        *(_BY_SHAPES + 1 + i for i, tactic in enumerate(TACTICS) if supports(tactic, problem)),
    ]


def _fixed(tactic: int) -> Tactic | None:
    from .fp8_linear_tactics import TACTICS

    return None if tactic <= _BY_SHAPES else TACTICS[tactic - _BY_SHAPES - 1]


def _workspace(inputs: Sequence[Described], fields: Fields, tactic: int) -> int:
    from .fp8_linear_tactics import workspace_bytes

    return workspace_bytes(_problem(inputs), _fixed(tactic), is_static=False)


def _enqueue(launch: Launch) -> None:
    from .fp8_linear_tactics import default_tactic, workspace_bytes
    from .fp8_linear_triton import fp8_linear

    problem = _problem(launch.inputs)
    tactic = _fixed(launch.tactic) or default_tactic(problem)
    with launch.on_stream():
        x, weight, weight_scale = (buffer.as_tensor() for buffer in launch.inputs)
        fp8_linear(
            x, weight, weight_scale, None,
            tactic=tactic, out=launch.outputs[0].as_tensor(),
            workspace=launch.workspace_block(workspace_bytes(problem, tactic, is_static=False)),
        )  # fmt: skip


FP8_LINEAR_PLUGIN = Operator(
    name="fp8_linear",
    outputs=(Output(dtype_of=0, shape_of=0, last_size_of=(1, 0)),),
    fields={},
    accepts=_accepts,
    tactics=_tactics,
    workspace=_workspace,
    enqueue=_enqueue,
)
