"""How a bundle stores the weights of linear layers: as the model has them, rounded by the build, or packed by the
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import BuildError
from .packed_checkpoint import PackedLinears
from .quantize import Quantization, linear_bytes
from .quantize_experts import expert_bytes
from .segments import layer_prefix


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """`quantization`: what the user asked for; `packed`: what the checkpoint stores in 4 bits. Not both (`check`)."""

    quantization: Quantization | None
    packed: PackedLinears | None

    def check(self, source: str, target: str) -> None:
        """Raise `BuildError` if the checkpoint `source` is packed and cannot be built so for `target`."""
        if self.packed is None:
            return
        what = f"{source} holds {self.packed.format.method} weights of 4 bits"
        if target == "cpu":
            raise BuildError(
                f"target: {what}, and the cpu target has no quantised kernels yet; use --target tensorrt-rtx, or the "
                "original checkpoint"
            )
        if self.quantization is not None:
            raise BuildError(
                f"quantize: {what} already; leave --quantize out, or quantise the original checkpoint"
            )

    @property
    def scheme(self) -> str | None:
        """int4, fp8, or None: all weights are in the dtype of the build."""
        if self.packed is not None:
            return "int4"
        return None if self.quantization is None else self.quantization.scheme

    def facts(self) -> dict[str, Any] | None:
        """The scheme and where the quantised weights come from, as JSON: for the manifest and the content key."""
        origin = self.packed or self.quantization
        return None if origin is None else {"scheme": self.scheme, **origin.facts()}

    def __str__(self) -> str:
        return f"{self.scheme}: {self.packed or self.quantization}" if self.scheme else "none"

    def num_bytes(self, model: nn.Module, num_layers: int, dtype: torch.dtype) -> int:
        """Bytes of the weights that the bundle will hold, tied ones once. `model`: not quantised, may be on `meta`."""
        quantized: dict[str, int] = {}
        if self.packed is not None:
            quantized = {f"{module}.weight": size for module, size in self.packed.num_bytes().items()}
        elif self.quantization is not None:
            prefix = layer_prefix(model, num_layers)
            quantized = {
                **linear_bytes(model, prefix, self.quantization),
                **expert_bytes(model, prefix, self.quantization),
            }
        replaced = sum(model.get_parameter(name).numel() for name in quantized)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return (parameters - replaced) * dtype.itemsize + sum(quantized.values())
