"""What the tests of the quantised linear layers run in the interpreter's process: random cases of one tactic each.

Every function returns numbers, not tensors: the largest error of each case, in units of the error that the dtype
allows, so that more than 1 is a failure whatever the sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pelton.plugins_trt import fp8_linear as fp8
from pelton.plugins_trt import int4_linear as int4
from pelton.plugins_trt.linear_tactics import Tactic

from .kernel_cases import Poisoned, guarded, integer


def int4_errors(tactic: Tactic | None, dtype: torch.dtype, seed: int, count: int) -> list[tuple[str, float]]:
    """(case, error) of `count` random calls with `tactic`, or with the default one if it is None."""
    from pelton.plugins_trt import int4_linear_triton as kernels

    random = torch.Generator().manual_seed(seed)
    tile = tactic or Tactic(16, 64, 64, 1, 4, 4)
    groups = [size for size in int4.GROUP_SIZES if size == -1 or size % tile.block_k == 0]
    errors = []
    for _ in range(count):
        rows, out_features, in_features = _sizes(random, tile)
        group_size = groups[integer(random, 0, len(groups) - 1)]
        has_zeros, has_bias, has_perm = (bool(integer(random, 0, 1)) for _ in range(3))
        x, layer, bias = _int4_case(
            random, (rows, out_features, in_features), group_size, has_zeros, has_perm
        )
        x = x.to(dtype)
        bias = bias.to(dtype) if has_bias else None
        out = Poisoned(rows, out_features, dtype)
        arguments = layer.qweight, layer.scales, layer.zeros, group_size, bias, layer.perm
        kernels.int4_linear(guarded(x), *arguments, tactic=tactic, out=out.view)
        expected = int4.int4_linear(x.double(), *arguments)
        weight = int4.dequantize(layer, torch.float64)
        magnitude = x.double().abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
        flags = f"zeros {has_zeros} bias {has_bias} perm {has_perm}"
        case = f"M {rows} N {out_features} K {in_features} group {group_size} {flags}"
        errors.append((case, out.error(expected, magnitude)))
    return errors


def _int4_case(
    random: torch.Generator, sizes: tuple[int, int, int], group_size: int, has_zeros: bool, has_perm: bool
) -> tuple[Tensor, int4.Int4Weight, Tensor]:
    rows, out_features, in_features = sizes
    groups = int4.num_groups(in_features, group_size)
    scales = torch.rand(groups, out_features, generator=random) * 0.2 - 0.02  # GPTQ's may be negative
    zeros = torch.randint(0, 16, (groups, out_features), generator=random, dtype=torch.int8)
    perm = torch.randperm(in_features, generator=random).to(torch.int32)
    layer = int4.Int4Weight(
        qweight=int4.pack_int4(torch.randint(0, 16, (out_features, in_features), generator=random)),
        scales=guarded(scales.half()),
        zeros=zeros if has_zeros else None,
        group_size=group_size,
        in_features=in_features,
        perm=perm if has_perm else None,
    )
    x = torch.randn(rows, in_features, generator=random)
    return x, layer, torch.randn(out_features, generator=random)


def int4_product(tactic: Tactic | None, x: Tensor, layer: int4.Int4Weight) -> Tensor:
    from pelton.plugins_trt import int4_linear_triton as kernels

    return kernels.int4_linear(
        x, layer.qweight, layer.scales, layer.zeros, layer.group_size, None, layer.perm, tactic=tactic
    )


def fp8_errors(tactic: Tactic | None, dtype: torch.dtype, seed: int, count: int) -> list[tuple[str, float]]:
    """(case, error) of `count` random calls with `tactic`, or with the default one if it is None."""
    from pelton.plugins_trt import fp8_linear_triton as kernels

    random = torch.Generator().manual_seed(seed)
    tile = tactic or Tactic(16, 64, 128, 1, 4, 4)
    errors = []
    for _ in range(count):
        rows, out_features, in_features = _sizes(random, tile)
        is_static, per_channel, has_bias = (bool(integer(random, 0, 1)) for _ in range(3))
        x = torch.randn(rows, in_features, generator=random) * 10 ** integer(random, -3, 2)
        x[integer(random, 0, rows - 1)] = 0  # a row without a largest magnitude
        x = x.to(dtype)
        weight = fp8.quantize_fp8(torch.randn(out_features, in_features, generator=random), per_channel)
        # Half of what would keep everything: some activations saturate.
        input_scale = (
            (x.float().abs().amax().clamp(min=1e-3) / fp8.LARGEST / 2).view(1) if is_static else None
        )
        bias = torch.randn(out_features, generator=random).to(dtype) if has_bias else None
        out = Poisoned(rows, out_features, dtype)
        arguments = weight.weight, weight.scale, input_scale, bias
        kernels.fp8_linear(guarded(x), *arguments, tactic=tactic, out=out.view)
        expected = fp8.fp8_linear(x.double(), *arguments)
        quantised, scale = fp8.quantize_activations(x, input_scale)
        magnitude = (quantised.double().abs() * scale) @ (
            weight.weight.double().abs() * weight.scale[:, None]
        ).T
        magnitude += 0 if bias is None else bias.double().abs()
        case = f"M {rows} N {out_features} K {in_features} static {is_static} per_channel {per_channel} bias {has_bias}"
        errors.append((case, out.error(expected, magnitude)))
    return errors


def fp8_quantised(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(e4m3 as uint8, scale) of the kernel that quantises activations."""
    from pelton.plugins_trt import fp8_linear_triton as kernels

    quantised = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(x.shape[0]) if input_scale is None else input_scale
    kernels.quantize_rows(x, input_scale, quantised, scale)
    return quantised.view(torch.uint8), scale


def _sizes(random: torch.Generator, tile: Tactic) -> tuple[int, int, int]:
    """(M, N, K): mostly part of one tile of rows and output features, sometimes two; as many tiles of K as splits."""
    rows, out_features = (
        integer(random, 1, size // 2) if integer(random, 0, 3) else size + integer(random, 1, 20)
        for size in (tile.block_m, tile.block_n)
    )
    most_tiles = tile.split_k + (tile.split_k < 8)  # with 5 tiles in 4 splits the last split is empty
    in_features = integer(random, 1 + (tile.split_k - 1) * tile.block_k, most_tiles * tile.block_k)
    return rows, out_features, in_features
