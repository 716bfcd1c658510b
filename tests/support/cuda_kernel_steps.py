"""What the tests of the `cuda` target run in the process whose Triton interprets kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pelton.plugins_trt.cuda_engine import attend_with_kernels
from pelton.plugins_trt.cuda_kernels import register_kernels
from pelton.plugins_trt.fp8_linear import fp8_linear, quantize_fp8
from pelton.plugins_trt.int4_linear import int4_linear, quantize_int4
from pelton.plugins_trt.moe_experts import moe_experts
from pelton.runtime.inputs import StepInputs

from .cuda_bundle import open_on_host


def run_steps(bundle: Path, steps: list[StepInputs], with_kernels: bool) -> list[np.ndarray]:
    """Logits of the bundle's executor; `with_kernels` all of Pelton's operators run their Triton kernels."""
    if with_kernels:
        register_kernels("cpu")
    executor = open_on_host(bundle, attend=attend_with_kernels if with_kernels else None)
    return [torch.as_tensor(executor.execute(step).logits).numpy().copy() for step in steps]


def run_operators(with_kernels: bool) -> dict[str, Tensor]:
    """A result of each operator that has a kernel of its own on a GPU, called by its name as compiled code does."""
    if with_kernels:
        register_kernels("cpu")
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    x = normal(5, 64).half()
    int4, fp8 = (
        quantize_int4(normal(24, 64), 32, symmetric=False),
        quantize_fp8(normal(24, 64), per_channel=True),
    )
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]], dtype=torch.int32)
    return {
        "int4_linear": int4_linear(x, int4.qweight, int4.scales, int4.zeros, 32),
        "fp8_linear": fp8_linear(x, fp8.weight, fp8.scale, None),
        "moe_experts": moe_experts(
            x,
            torch.full((5, 2), 0.5),
            ids,
            normal(3, 32, 64).half() / 8,
            normal(3, 64, 16).half() / 4,
            "silu",
        ),
    }


def launched_operators() -> list[str]:
    """Names of the modules of kernels that have been imported in this process, without their ending."""
    suffix, prefix = "_triton", "pelton.plugins_trt."
    modules = [name for name in sys.modules if name.startswith(prefix) and name.endswith(suffix)]
    names = {name.removeprefix(prefix).removesuffix(suffix) for name in modules}
    return sorted(names & {"int4_linear", "fp8_linear", "moe_experts"})
