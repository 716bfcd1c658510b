"""`pelton::fp8_linear` as a TensorRT plugin; the contract stands in `fp8_linear.py`.

Parts of a split product come from torch's caching allocator, which knows when a graph is being captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .fp8_linear_tactics import TACTICS, Problem, supports
from .plugin import Described, Fields, Launch, Operator, Output

# Chosen by the shapes of each call; the tactics of fixed tiles follow it.
_BY_SHAPES = 1
_FLOATS = ("float16", "bfloat16", "float32")


def _accepts(inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    x, weight, weight_scale = inputs
    return x in _FLOATS and weight == "float8_e4m3fn" and weight_scale == "float32" and list(outputs) == [x]


def _tactics(inputs: Sequence[Described], fields: Fields) -> list[int]:
    x, weight = inputs[0], inputs[1]
    problem = Problem(math.prod(x.shape[:-1]), weight.shape[0], x.shape[-1])
    return [
        _BY_SHAPES,
        *(_BY_SHAPES + 1 + i for i, tactic in enumerate(TACTICS) if supports(tactic, problem)),
    ]


def _enqueue(launch: Launch) -> None:
    from .fp8_linear_triton import fp8_linear

    with launch.on_stream():
        x, weight, weight_scale = (buffer.as_tensor() for buffer in launch.inputs)
        fp8_linear(
            x, weight, weight_scale, None,
            tactic=None if launch.tactic <= _BY_SHAPES else TACTICS[launch.tactic - 2],
            out=launch.outputs[0].as_tensor(),
        )  # fmt: skip


FP8_LINEAR_PLUGIN = Operator(
    name="fp8_linear",
    outputs=(Output(dtype_of=0, shape_of=0, last_size_of=(1, 0)),),
    fields={},
    accepts=_accepts,
    tactics=_tactics,
    workspace=lambda inputs, fields, tactic: 0,
    enqueue=_enqueue,
)
