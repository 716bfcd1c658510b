"""`int4_linear`: layout, rounding and reference, and each tactic of the kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pelton.plugins_trt import int4_linear as int4
from pelton.plugins_trt.int4_linear_tactics import TACTICS, Problem, default_tactic, supports
from pelton.plugins_trt.linear_tactics import Tactic
from support import kernel_cases, linear_kernels
from support.interpreted import interpreter

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter() as call:
        call(kernel_cases.correct_arithmetic)
        yield call


def name_of(tactic: Tactic) -> str:
    return f"{tactic.block_m}x{tactic.block_n}x{tactic.block_k} split {tactic.split_k}"


@pytest.mark.parametrize("tactic", TACTICS, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_tactic_equals_the_reference(
    interpreted: Callable[..., Any], dtype: str, tactic: Tactic
) -> None:
    if not supports(tactic, Problem(1, 1, 10_000, -1, DTYPES[dtype])):
        assert dtype == "float32"
        return
    count = 2 if dtype == "float32" or tactic.split_k == 8 else 4
    seed = 100 * list(DTYPES).index(dtype) + TACTICS.index(tactic)
    errors = interpreted(linear_kernels.int4_errors, tactic, DTYPES[dtype], seed, count)
    assert len(errors) == count
    assert [case for case in errors if case[1] > 1] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_tactic_equals_the_reference(interpreted: Callable[..., Any], dtype: str) -> None:
    errors = interpreted(linear_kernels.int4_errors, None, DTYPES[dtype], 7, 16)
    assert [case for case in errors if case[1] > 1] == []


def test_there_is_a_tactic_for_every_problem() -> None:
    for dtype in DTYPES.values():
        for group_size in int4.GROUP_SIZES:
            for rows in (1, 16, 17, 100, 5000):
                for in_features in (1, 100, 4096):
                    problem = Problem(rows, 300, in_features, group_size, dtype)
                    tactic = default_tactic(problem)
                    assert supports(tactic, problem)
                    assert tactic.block_m >= min(rows, 64)


def test_few_rows_are_split_until_the_gpu_is_full() -> None:
    assert default_tactic(Problem(1, 4096, 4096, 128, torch.float16)).split_k > 1
    assert default_tactic(Problem(1, 128_000, 4096, 128, torch.float16)).split_k == 1


def test_a_tactic_whose_tile_spans_groups_is_refused() -> None:
    from pelton.plugins_trt import int4_linear_triton

    layer = int4.quantize_int4(torch.randn(8, 128), 32, symmetric=True)
    tactic = next(tactic for tactic in TACTICS if tactic.block_k == 64)
    with pytest.raises(ValueError, match="does not support"):
        int4_linear_triton.int4_linear(
            torch.randn(1, 128), layer.qweight, layer.scales, None, 32, tactic=tactic
        )


def test_bytes_lie_as_the_drawing_says() -> None:
    out_features, in_features = 3, 70
    values = torch.randint(0, 16, (out_features, in_features))
    packed = int4.pack_int4(values)
    assert packed.shape == (3, 3, 16)
    assert packed.dtype == torch.int8
    for n in range(out_features):
        for k in range(in_features):
            block, within = divmod(k, 32)
            byte = int(packed[block, n, within % 16]) & 0xFF
            assert (byte >> (4 if within >= 16 else 0)) & 15 == values[n, k]
    assert torch.equal(int4.unpack_int4(packed, in_features), values.to(torch.uint8))


@pytest.mark.parametrize("group_size", int4.GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_is_within_half_a_step(group_size: int, symmetric: bool) -> None:
    weight = torch.randn(5, 200) * torch.logspace(-3, 1, 5)[:, None] + (0 if symmetric else 0.01)
    layer = int4.quantize_int4(weight, group_size, symmetric)
    assert layer.scales.shape == (int4.num_groups(200, group_size), 5)
    assert (layer.zeros is None) == symmetric
    # Half a step; the ends of the range are cut by at most what rounding the scale to float16 moves them.
    step = layer.scales.float().T.repeat_interleave(200 if group_size == -1 else group_size, 1)[:, :200]
    assert ((int4.dequantize(layer) - weight).abs() <= step * (0.5 + 15 * 2**-11)).all()


def test_asymmetric_rounding_uses_all_levels() -> None:
    weight = torch.linspace(0.5, 4, 64).expand(2, 64)
    layer = int4.quantize_int4(weight, 64, symmetric=False)
    assert (int4.dequantize(layer) - weight).abs().max() < 4 / 15 / 2 * 1.01
    assert (
        int4.dequantize(int4.quantize_int4(weight, 64, symmetric=True)) - weight
    ).abs().max() > 4 / 15 / 2 * 1.5


def test_a_group_of_zeros_stays_zero() -> None:
    for symmetric in (True, False):
        layer = int4.quantize_int4(torch.zeros(2, 64), 32, symmetric)
        assert torch.equal(int4.dequantize(layer), torch.zeros(2, 64))


def test_weights_that_cannot_be_rounded_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size 48"):
        int4.quantize_int4(torch.randn(2, 96), 48, symmetric=True)
    with pytest.raises(ValueError, match="NaN"):
        int4.quantize_int4(torch.tensor([[float("nan")] * 32]), 32, symmetric=True)


def test_the_reference_is_the_contract() -> None:
    torch.manual_seed(0)
    layer = int4.quantize_int4(torch.randn(6, 80), 32, symmetric=False)
    perm = torch.randperm(80).to(torch.int32)
    bias, x = torch.randn(6), torch.randn(2, 3, 80)
    out = int4.int4_linear(x, layer.qweight, layer.scales, layer.zeros, 32, bias, perm)
    assert layer.zeros is not None
    values = int4.unpack_int4(layer.qweight, 80)
    for i, j, n in ((0, 0, 0), (1, 2, 5), (0, 1, 3)):
        total = float(bias[n])
        for k in range(80):
            quantised = int(values[n, k]) - int(layer.zeros[k // 32, n])
            total += float(x[i, j, perm[k]]) * quantised * float(layer.scales[k // 32, n])
        assert float(out[i, j, n]) == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 40), (0, 40), (40,)])
def test_leading_dimensions_are_kept(interpreted: Callable[..., Any], shape: tuple[int, ...]) -> None:
    layer = int4.quantize_int4(torch.randn(6, 40), 32, symmetric=False)
    x = torch.randn(shape)
    expected = int4.int4_linear(x, layer.qweight, layer.scales, layer.zeros, 32)
    assert expected.shape == (*shape[:-1], 6)
    actual = interpreted(linear_kernels.int4_product, None, x, layer)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_the_operator_is_registered_with_its_shapes() -> None:
    layer = int4.quantize_int4(torch.randn(6, 80), 32, symmetric=False)
    torch.library.opcheck(
        int4.int4_linear, (torch.randn(2, 3, 80), layer.qweight, layer.scales, layer.zeros, 32)
    )
