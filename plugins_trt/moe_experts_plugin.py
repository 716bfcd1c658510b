"""`pelton::moe_experts` as a TensorRT plugin; the contract stands in `moe_experts.py`.

Field `activation` is an index into ACTIVATIONS. Inputs are the contract's tensors without those that the form of the
stacks has not: 5 for float, 7 for fp8 and symmetric int4, 9 for int4 with zero points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plugin import Buffer, Described, Fields, Launch, Operator, Output

if TYPE_CHECKING:
    from torch import Tensor

    from .moe_experts_tactics import Problem, Tactic

# Chosen by the shapes of each call; the tactics of fixed tiles follow it.
_BY_SHAPES = 1
_EXPERT_IDS, _GATE_UP = 2, 3  # among the inputs
_FLOATS = ("float16", "bfloat16", "float32")


def _accepts(inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    x, router_weights, expert_ids, gate_up, down, *quantised = inputs
    scales, zeros = quantised[:2], quantised[2:]
    if (router_weights, expert_ids) != ("float32", "int32") or gate_up != down or x not in _FLOATS:
        return False
    if gate_up == "int8":
        is_form = len(scales) == 2 and set(scales) <= set(_FLOATS) and zeros in ([], ["int8"] * 2)
    elif gate_up == "float8_e4m3fn":
        is_form = quantised == ["float32"] * 2
    else:
        is_form = gate_up == x and not quantised
    return is_form and list(outputs) == [x]


def _problem(inputs: Sequence[Described | Buffer], fields: Fields) -> Problem:
    import torch

    from .moe_experts import FLOAT, FP8, INT4
    from .moe_experts_tactics import Problem

    x, _, expert_ids, gate_up, *_ = inputs
    return Problem(
        num_tokens=expert_ids.shape[0],
        top_k=expert_ids.shape[1],
        num_experts=gate_up.shape[0],
        hidden_size=x.shape[1],
        intermediate_size=gate_up.shape[-2] // 2,
        dtype=getattr(torch, x.dtype),
        form={"int8": INT4, "float8_e4m3fn": FP8}.get(gate_up.dtype, FLOAT),
        group_size=int(fields["group_size"]),
    )


def _tactics(inputs: Sequence[Described], fields: Fields) -> list[int]:
    from .moe_experts_tactics import TACTICS, supports

    problem = _problem(inputs, fields)
    return [
        _BY_SHAPES,
        *(_BY_SHAPES + 1 + i for i, tactic in enumerate(TACTICS) if supports(tactic, problem)),
    ]


def _fixed(tactic: int) -> Tactic | None:
    from .moe_experts_tactics import TACTICS

    return None if tactic <= _BY_SHAPES else TACTICS[tactic - _BY_SHAPES - 1]


def _workspace(inputs: Sequence[Described], fields: Fields, tactic: int) -> int:
    from .moe_experts_tactics import workspace_bytes

    return workspace_bytes(_problem(inputs, fields), _fixed(tactic))


def _enqueue(launch: Launch) -> None:
    from .moe_experts_tactics import default_tactic, workspace_bytes

    problem = _problem(launch.inputs, launch.fields)
    tactic = _fixed(launch.tactic) or default_tactic(problem)
    with launch.on_stream():
        tensors = [buffer.as_tensor() for buffer in launch.inputs]
        if launch.is_timing:
            tensors[_EXPERT_IDS] = _typical_routes(tensors[_EXPERT_IDS], tensors[_GATE_UP].shape[0])
        workspace = launch.workspace_block(workspace_bytes(problem, tactic))
        run(tensors, launch.fields, tactic, launch.outputs[0].as_tensor(), workspace)


def run(
    tensors: Sequence[Tensor], fields: Fields, tactic: Tactic, out: Tensor, workspace: Tensor | None
) -> None:
    """The operator on the plugin's inputs, with its fields."""
    from .moe_experts import ACTIVATIONS, Stack
    from .moe_experts_triton import moe_experts

    x, router_weights, expert_ids, gate_up, down, *optional = tensors
    scales, zeros = optional[:2] or (None, None), optional[2:] or (None, None)
    group_size = int(fields["group_size"])
    moe_experts(
        x, router_weights, expert_ids,
        Stack(gate_up, scales[0], zeros[0], group_size), Stack(down, scales[1], zeros[1], group_size),
        ACTIVATIONS[int(fields["activation"])],
        tactic=tactic, out=out, workspace=workspace,
    )  # fmt: skip


def _typical_routes(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Rows shared out evenly: the work follows the ids, so they must not be garbage when a tactic is timed."""
    import torch

    rows = torch.arange(expert_ids.numel(), dtype=torch.int32, device=expert_ids.device)
    return rows.remainder(num_experts).view_as(expert_ids)


MOE_EXPERTS_PLUGIN = Operator(
    name="moe_experts",
    outputs=(Output(dtype_of=0, shape_of=0),),
    fields={"activation": int, "group_size": int},
    accepts=_accepts,
    tactics=_tactics,
    workspace=_workspace,
    enqueue=_enqueue,
)
