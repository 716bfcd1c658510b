"""`fp8_linear`: rounding and reference, and each tactic of the kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pelton.plugins_trt import fp8_linear as fp8
from pelton.plugins_trt.fp8_linear_tactics import TACTICS, Problem, default_tactic, supports
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
    count = 2 if dtype == "float32" or tactic.split_k == 8 else 4
    seed = 100 * list(DTYPES).index(dtype) + TACTICS.index(tactic)
    errors = interpreted(linear_kernels.fp8_errors, tactic, DTYPES[dtype], seed, count)
    assert len(errors) == count
    assert [case for case in errors if case[1] > 1] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_tactic_equals_the_reference(interpreted: Callable[..., Any], dtype: str) -> None:
    errors = interpreted(linear_kernels.fp8_errors, None, DTYPES[dtype], 7, 12)
    assert [case for case in errors if case[1] > 1] == []


def test_there_is_a_tactic_for_every_problem() -> None:
    for rows in (1, 16, 17, 100, 5000):
        for in_features in (1, 100, 4096):
            problem = Problem(rows, 300, in_features)
            tactic = default_tactic(problem)
            assert supports(tactic, problem)
            assert tactic.block_m >= min(rows, 128)


def test_activations_are_rounded_to_even_and_saturate(interpreted: Callable[..., Any]) -> None:
    codes = torch.arange(127, dtype=torch.uint8)  # 0 to 448; code 127 is NaN
    levels = codes.view(torch.float8_e4m3fn).float()
    middles = (levels[1:] + levels[:-1]) / 2
    even = torch.where(codes[1:] % 2 == 0, codes[1:], codes[:-1])
    x = torch.cat((levels, middles, -middles, torch.tensor([449.0, 1e4, -1e4]))) * 0.25
    expected = torch.cat((codes, even, even | 128, torch.tensor([126, 126, 126 | 128], dtype=torch.uint8)))
    actual, scale = interpreted(linear_kernels.fp8_quantised, x[None], torch.tensor([0.25]))
    assert torch.equal(actual[0], expected)
    assert scale.tolist() == [0.25]
    reference, _ = fp8.quantize_activations(x, torch.tensor([0.25]))
    assert torch.equal(reference.view(torch.uint8), expected)


@pytest.mark.parametrize("in_features", [1, 700, 1024, 1500])
def test_each_row_has_the_scale_of_its_largest_magnitude(
    interpreted: Callable[..., Any], in_features: int
) -> None:
    x = torch.randn(3, in_features).half()
    x[1] = 0
    x[2, -1] = -100
    _, scale = interpreted(linear_kernels.fp8_quantised, x, None)
    assert scale.tolist() == pytest.approx([float(x[0].abs().max()) / 448, 1.0, 100 / 448])


@pytest.mark.parametrize("per_channel", [True, False])
def test_rounding_of_weights_is_within_half_a_step(per_channel: bool) -> None:
    weight = torch.randn(5, 300) * torch.logspace(-2, 1, 5)[:, None]
    weight[3] = 0
    rounded = fp8.quantize_fp8(weight, per_channel)
    assert rounded.scale.shape == ((5,) if per_channel else (1,))
    restored = rounded.weight.float() * rounded.scale[:, None]
    # Three bits of mantissa; below 2^-6 the steps are 2^-9.
    allowed = (weight.abs() * 2**-4).maximum(rounded.scale[:, None] * 2**-10)
    assert ((restored - weight).abs() <= allowed * (1 + 1e-6)).all()


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        fp8.quantize_fp8(torch.tensor([[1.0, float("inf")]]), per_channel=True)


def test_the_reference_is_the_contract() -> None:
    torch.manual_seed(0)
    weight = fp8.quantize_fp8(torch.randn(4, 50), per_channel=True)
    x, bias = torch.randn(2, 3, 50), torch.randn(4)
    for input_scale in (None, torch.tensor([0.01])):
        out = fp8.fp8_linear(x, weight.weight, weight.scale, input_scale, bias)
        for i, j, n in ((0, 0, 0), (1, 2, 3)):
            scale = float(x[i, j].abs().max()) / 448 if input_scale is None else 0.01
            rounded = (x[i, j] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            total = float(rounded @ weight.weight[n].float()) * scale * float(weight.scale[n]) + float(
                bias[n]
            )
            assert float(out[i, j, n]) == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize(("arch", "works"), [(80, False), (86, False), (89, True), (90, True), (120, True)])
def test_architectures_without_fp8_are_refused_with_a_reason(arch: int, works: bool) -> None:
    reason = fp8.unsupported_reason(arch)
    assert (reason is None) == works
    if reason is not None:
        assert f"{arch / 10:.1f}" in reason
        assert "8.9" in reason


def test_the_operator_is_registered_with_its_shapes() -> None:
    weight = fp8.quantize_fp8(torch.randn(4, 50), per_channel=False)
    for input_scale in (None, torch.tensor([0.01])):
        arguments = torch.randn(2, 3, 50), weight.weight, weight.scale, input_scale
        # The test of the schema alters its inputs arithmetically, which torch cannot do to e4m3.
        torch.library.opcheck(
            fp8.fp8_linear, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic")
        )
