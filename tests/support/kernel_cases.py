"""What tests of kernels share in the interpreter's process: its arithmetic repaired, poisoned buffers, error bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GUARD = 64


def correct_arithmetic() -> None:
    """Repair what Triton 3.7's interpreter gets wrong; call once per process, before any kernel.

    bfloat16 is kept as uint16: sums and differences are taken of the bit patterns, and it has no constants. Casts to
    e4m3 lose the carry when the mantissa rounds up to the next power of two (1.97 becomes 1.0) and round ties up.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    # Whatever is allocated without being filled holds NaN.
    torch.use_deterministic_algorithms(True)
    builder, handle_type = interpreter.InterpreterBuilder, interpreter.TensorHandle
    own_binary, own_convert = builder.binary_op, interpreter._convert_float

    def widened(handle: Any) -> Any:
        return handle_type((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return own_binary(self, left, right, operation)
        wide = own_binary(self, widened(left), widened(right), operation)
        return self.cast_impl(wide, tl.bfloat16)

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(data))
        if (source, target) == (tl.float32, tl.float8e4nv):
            bits = bits.masked_fill(bits.abs() > 448, float("nan"))  # not every cast saturates
            return bits.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.float8e4nv, tl.float16):  # right as it is, but slow
            return bits.view(torch.float8_e4m3fn).half().numpy()
        return own_convert(data, source, target, rounding)

    def get_bf16(self: Any, value: float) -> Any:
        bits = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint16).numpy()
        return handle_type(bits, tl.bfloat16)

    builder.binary_op, interpreter._convert_float, builder.get_bf16 = binary_op, convert, get_bf16


class Poisoned:
    """An output buffer `view` `[rows, columns]` full of NaN, with NaN around it that must stay."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat = torch.full((rows * columns + 2 * GUARD,), float("nan"), dtype=dtype)
        self.view = self._flat[GUARD:-GUARD].view(rows, columns)

    def error(self, expected: Tensor, summed: Tensor, rounded: Tensor | float = 0.0) -> float:
        """The largest error in units of what is allowed, so that more than 1 is a failure whatever the sizes.

        Allowed is half a last place of the dtype, 16 of float32 for sums of `summed` (sums of magnitudes), and
        `rounded`.
        """
        around = torch.cat((self._flat[:GUARD], self._flat[-GUARD:]))
        assert around.isnan().all(), "written outside of the output"
        limits = torch.finfo(self._dtype)
        allowed = limits.eps / 2 * expected.abs() + 16 * 2**-24 * summed + rounded
        allowed += limits.smallest_normal * limits.eps
        errors = (self.view.double() - expected).abs() / allowed
        return float(errors.nan_to_num(nan=float("inf")).max())


def guarded(tensor: Tensor) -> Tensor:
    """The same values with NaN before and after them in memory."""
    flat = torch.full((tensor.numel() + 2 * GUARD,), float("nan"), dtype=tensor.dtype)
    flat[GUARD:-GUARD] = tensor.flatten()
    return flat[GUARD:-GUARD].view(tensor.shape)


def integer(random: torch.Generator, low: int, high: int) -> int:
    """Uniform in low..high, both included."""
    return int(torch.randint(low, high + 1, (), generator=random))
