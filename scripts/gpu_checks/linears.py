"""Cases of `int4_linear` and `fp8_linear`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...plugins_trt import fp8_linear as fp8
from ...plugins_trt import fp8_linear_tactics, int4_linear_tactics
from ...plugins_trt import int4_linear as int4
from .call import Call, default_first, on_cpu
from .measure import arch_of, float8_product, name_of
from .roofline import Work, int4_scale_bytes, linear_work
from .units import Unavailable


@dataclass(frozen=True, slots=True)
class Int4Case:
    rows: int
    out_features: int
    in_features: int
    group_size: int = 128
    has_zeros: bool = True
    has_bias: bool = False
    has_perm: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def products(self) -> str:
        return name_of(self.dtype)

    @property
    def name(self) -> str:
        flags = [flag for flag in ("zeros", "bias", "perm") if getattr(self, f"has_{flag}")]
        sizes = f"{self.rows} x {self.in_features} -> {self.out_features}"
        return ", ".join([f"int4_linear: {sizes}, group {self.group_size}, {name_of(self.dtype)}", *flags])

    @property
    def bound(self) -> float:
        """The output is rounded to the dtype; products of 4 and 16 bits are exact, sums float32."""
        return torch.finfo(self.dtype).eps

    def work(self) -> Work:
        scales = int4_scale_bytes(
            self.out_features, self.in_features, self.group_size, has_zeros=self.has_zeros
        )
        return linear_work(
            self.rows, self.out_features, self.in_features,
            weight_bits=4, activation_bytes=self.dtype.itemsize, scale_bytes=scales,
        )  # fmt: skip

    def tactics(self) -> list[Any]:
        problem = int4_linear_tactics.Problem(
            self.rows, self.out_features, self.in_features, self.group_size, self.dtype
        )
        usable = [t for t in int4_linear_tactics.TACTICS if int4_linear_tactics.supports(t, problem)]
        return default_first(int4_linear_tactics.default_tactic(problem), _worthwhile(usable, self.rows))

    def prepare(self, device: torch.device) -> Call:
        from ...plugins_trt.int4_linear_triton import int4_linear

        random = torch.Generator(device).manual_seed(0)
        weight = self._weight(random, device)
        x = torch.randn(self.rows, self.in_features, generator=random, device=device).to(self.dtype)
        bias = torch.randn(self.out_features, generator=random, device=device).to(self.dtype)
        parts = weight.qweight, weight.scales, weight.zeros, self.group_size
        options = bias if self.has_bias else None, weight.perm
        whole = cache(lambda: int4.dequantize(weight).to(self.dtype))  # [N, K]
        out = x.new_empty(self.rows, self.out_features)
        return Call(
            out=out,
            compute=lambda tactic: int4_linear(x, *parts, *options, tactic=tactic, out=out),
            reference=lambda: int4.int4_linear(x.cpu().double(), *on_cpu(parts), *on_cpu(options)),
            expected=lambda: x.float() @ int4.dequantize(weight).T + (bias.float() if self.has_bias else 0),
            others={f"cublas ({name_of(self.dtype)} weights)": lambda: x @ whole().T},
        )

    def _weight(self, random: torch.Generator, device: torch.device) -> int4.Int4Weight:
        n, k = self.out_features, self.in_features
        groups = int4.num_groups(k, self.group_size)
        blocks = -(-k // int4.FEATURES_PER_BLOCK)
        packed = torch.randint(-128, 128, (blocks, n, 16), generator=random, device=device, dtype=torch.int8)
        zeros = torch.randint(0, 16, (groups, n), generator=random, device=device, dtype=torch.int8)
        perm = torch.randperm(k, generator=random, device=device).to(torch.int32)
        return int4.Int4Weight(
            qweight=packed,
            scales=(torch.rand(groups, n, generator=random, device=device) * 0.02 + 0.001).half(),
            zeros=zeros if self.has_zeros else None,
            group_size=self.group_size,
            in_features=k,
            perm=perm if self.has_perm else None,
        )


@dataclass(frozen=True, slots=True)
class Fp8Case:
    rows: int
    out_features: int
    in_features: int
    is_static: bool = False
    per_channel: bool = True
    has_bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def products(self) -> str:
        return name_of(torch.float8_e4m3fn)

    @property
    def name(self) -> str:
        parts = [f"fp8_linear: {self.rows} x {self.in_features} -> {self.out_features}"]
        parts += [
            "static" if self.is_static else "dynamic",
            "per channel" if self.per_channel else "per tensor",
        ]
        return ", ".join([*parts, name_of(self.dtype), *(["bias"] if self.has_bias else [])])

    @property
    def bound(self) -> float:
        """Rounding of the output, and what Hopper drops of sums within 128 products."""
        return torch.finfo(self.dtype).eps + 2**-8

    def work(self) -> Work:
        return linear_work(
            self.rows, self.out_features, self.in_features,
            weight_bits=8, activation_bytes=self.dtype.itemsize,
            scale_bytes=4 * (self.out_features if self.per_channel else 1),
        )  # fmt: skip

    def tactics(self) -> list[Any]:
        problem = fp8_linear_tactics.Problem(self.rows, self.out_features, self.in_features)
        usable = [t for t in fp8_linear_tactics.TACTICS if fp8_linear_tactics.supports(t, problem)]
        return default_first(fp8_linear_tactics.default_tactic(problem), _worthwhile(usable, self.rows))

    def prepare(self, device: torch.device) -> Call:
        from ...plugins_trt.fp8_linear_triton import fp8_linear

        if device.type == "cuda":
            reason = fp8.unsupported_reason(arch_of(device))
            if reason is not None:
                raise Unavailable(reason)
        random = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.rows, self.in_features, generator=random, device=device).to(self.dtype)
        matrix = torch.randn(self.out_features, self.in_features, generator=random, device=device)
        weight = fp8.quantize_fp8(matrix, self.per_channel)
        bias = torch.randn(self.out_features, generator=random, device=device).to(self.dtype)
        scale = x.float().abs().amax().view(1) / fp8.LARGEST / 2  # some activations saturate
        arguments = (
            weight.weight,
            weight.scale,
            scale if self.is_static else None,
            bias if self.has_bias else None,
        )
        quantised = fp8.quantize_activations(x, None)[0]
        whole = matrix.to(self.dtype)
        out = x.new_empty(self.rows, self.out_features)
        return Call(
            out=out,
            compute=lambda tactic: fp8_linear(x, *arguments, tactic=tactic, out=out),
            reference=lambda: fp8.fp8_linear(x.cpu().double(), *on_cpu(arguments)),
            expected=lambda: _dequantised_product(x, *arguments),
            others={
                "cublas (float8, activations quantised before)": float8_product(
                    quantised, weight.weight, self.dtype
                ),
                f"cublas ({name_of(self.dtype)} weights)": lambda: x @ whole.T,
            },
        )


def _worthwhile(tactics: Sequence[Any], rows: int) -> list[Any]:
    """Without tiles that are far larger than all rows, and small ones for many rows."""
    return [tactic for tactic in tactics if min(rows, 32) <= tactic.block_m <= max(rows, 32)]


def _dequantised_product(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    quantised, scale = fp8.quantize_activations(x, input_scale)
    product = quantised.float() @ weight.float().T * scale * weight_scale
    return product if bias is None else product + bias.float()
