"""AWQ and GPTQ layers repacked, against dequantisation written here from the formats' definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pelton.compile.packed_weights import PackedFormat, read_format, repack
from pelton.errors import BuildError
from pelton.plugins_trt.int4_linear import dequantize, int4_linear
from pelton.plugins_trt.int4_linear_tactics import TACTICS, Problem, supports
from support import kernel_cases, linear_kernels
from support.interpreted import interpreter
from support.packed import Layer, as_awq, as_gptq


def layer(
    in_features: int = 128,
    out_features: int = 24,
    group_size: int = 32,
    *,
    symmetric: bool = False,
    act_order: bool = False,
) -> Layer:
    """Random; zero points 1..15 unless symmetric."""
    random = np.random.default_rng(in_features + group_size)
    size = in_features if group_size == -1 else group_size
    groups = -(-in_features // size)
    group_of = np.arange(in_features) // size
    return Layer(
        q=random.integers(0, 16, (in_features, out_features)),
        zeros=np.full((groups, out_features), 8)
        if symmetric
        else random.integers(1, 16, (groups, out_features)),
        scales=random.uniform(0.01, 0.1, (groups, out_features)).astype(np.float16),
        group_of=random.permutation(group_of) if act_order else group_of,
    )


def assert_restored(
    original: Layer, tensors: dict[str, torch.Tensor], packed: PackedFormat
) -> tuple[str, ...]:
    repacked = repack("model.layers.0.mlp.up_proj", tensors, packed)
    assert torch.equal(dequantize(repacked.weight, torch.float64), original.weight)
    return repacked.warnings


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter() as call:
        call(kernel_cases.correct_arithmetic)
        yield call


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_ql_01_act_order_with_groups(interpreted: Callable[..., Any], group_size: int) -> None:
    original = layer(256, 40, group_size, act_order=True)
    repacked = repack("layer", as_gptq(original, 1), PackedFormat("gptq", group_size)).weight
    assert (repacked.perm is None) == (group_size == -1)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).half()
    expected = x.double() @ original.weight.T
    arguments = repacked.qweight, repacked.scales, repacked.zeros, group_size, None, repacked.perm
    torch.testing.assert_close(int4_linear(x.double(), *arguments), expected)
    tactics = [tactic for tactic in TACTICS if supports(tactic, Problem(5, 40, 256, group_size, x.dtype))]
    assert {tactic.split_k for tactic in tactics} >= {1, 2}
    for rows in (x, x.repeat(4, 1)):  # permuted in the kernel, and before it
        for tactic in tactics:
            actual = interpreted(linear_kernels.int4_product, tactic, rows, repacked)
            assert (actual[-5:].double() - expected).norm() <= 1e-3 * expected.norm(), tactic


@pytest.mark.parametrize(
    ("g_idx", "reason"),
    [
        (torch.arange(128) // 16, r"groups 0\.\.7 where 0\.\.3 exist"),
        ((torch.arange(128) // 32).clamp(max=2), "groups of other sizes"),
        (torch.arange(128) // 32 - 1, r"groups -1\.\.2"),
        (torch.arange(64) // 32, "128 integers"),
    ],
)
def test_ql_01_act_order_that_cannot_be_honoured_is_refused(g_idx: torch.Tensor, reason: str) -> None:
    tensors = as_gptq(layer(), 1) | {"g_idx": g_idx.int()}
    with pytest.raises(BuildError, match=r"^layer\.g_idx: .*" + reason):
        repack("layer", tensors, PackedFormat("gptq", 32))


def test_ql_01_features_in_order_need_no_permutation() -> None:
    tensors = as_gptq(layer(), 2)
    missing = {leaf: tensor for leaf, tensor in tensors.items() if leaf != "g_idx"}
    for given in (tensors, missing, missing | {"g_idx": torch.empty(0, dtype=torch.int32)}):
        assert repack("layer", given, PackedFormat("gptq_v2", 32)).weight.perm is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("in_features", "group_size"), [(128, 32), (192, 128), (128, -1), (72, 64)])
@pytest.mark.parametrize("act_order", [True, False])
def test_ql_02_gptq_versions(
    version: int, symmetric: bool, in_features: int, group_size: int, act_order: bool
) -> None:
    original = layer(in_features, 24, group_size, symmetric=symmetric, act_order=act_order)
    packed = PackedFormat("gptq" if version == 1 else "gptq_v2", group_size, symmetric)
    assert assert_restored(original, as_gptq(original, version), packed) == ()
    weight = repack("layer", as_gptq(original, version), packed).weight
    assert (weight.zeros is None) == symmetric


@pytest.mark.parametrize(("written", "label"), [(2, "gptq"), (1, "gptq_v2")])
@pytest.mark.parametrize("says_symmetric", [True, None])
def test_ql_02_a_wrong_version_label_is_seen_in_symmetric_weights(
    written: int, label: str, says_symmetric: bool | None
) -> None:
    original = layer(symmetric=True)
    (warning,) = assert_restored(
        original, as_gptq(original, written), PackedFormat(label, 32, says_symmetric)
    )
    assert warning.startswith("model.layers.0.mlp.up_proj.qzeros: ")
    assert f"stored as {6 + written}" in warning


def test_ql_02_asymmetric_weights_are_what_their_label_says() -> None:
    original = replace(layer(), zeros=np.full((4, 24), 8))  # by chance all 8: no sign of v1 or v2
    for version, label in ((1, "gptq"), (2, "gptq_v2")):
        assert assert_restored(original, as_gptq(original, version), PackedFormat(label, 32, False)) == ()
    seven = replace(original, zeros=np.full((4, 24), 7))
    assert assert_restored(seven, as_gptq(seven, 2), PackedFormat("gptq_v2", 32, False)) == ()


def test_ql_02_symmetric_in_name_only_is_a_warning() -> None:
    original = layer()
    (warning,) = assert_restored(original, as_gptq(original, 2), PackedFormat("gptq_v2", 32, True))
    assert "says sym" in warning


def test_ql_02_a_zero_point_of_0_survives_v1() -> None:
    original = layer()
    original.zeros[0, :8] = [0, 5, 0, 0, 1, 15, 3, 0]  # each 0 borrows from its neighbour
    original.zeros[1, 8:16] = 0
    (warning,) = assert_restored(original, as_gptq(original, 1), PackedFormat("gptq", 32, False))
    assert "zero point of 0" in warning
    assert assert_restored(original, as_gptq(original, 2), PackedFormat("gptq_v2", 32, False)) == ()


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_ql_02_awq_zero_points_do_not_wrap(group_size: int) -> None:
    original = layer(256, 40, group_size)
    original.zeros[0, ::3] = 0
    original.zeros[0, 1::3] = 15
    packed = PackedFormat("awq", group_size)
    assert assert_restored(original, as_awq(original), packed) == ()
    zeros = repack("layer", as_awq(original), packed).weight.zeros
    assert zeros is not None
    assert torch.equal(zeros.long(), torch.from_numpy(original.zeros))


def test_awq_with_all_zero_points_8_becomes_symmetric() -> None:
    original = layer(symmetric=True)
    assert repack("layer", as_awq(original), PackedFormat("awq", 32)).weight.zeros is None


@pytest.mark.parametrize("make", [as_awq, lambda layer: as_gptq(layer, 1)], ids=["awq", "gptq"])
@pytest.mark.parametrize(
    ("leaf", "change", "reason"),
    [
        ("scales", lambda t: t[:-1], r"shape \[3, 24\]"),
        ("scales", lambda t: t.int(), "floating-point"),
        ("qzeros", lambda t: t[:, :-1], r"shape \[4, 2\]"),
        ("qzeros", lambda t: t.to(torch.int16), "int32 matrix"),
        ("qweight", lambda t: t[0], "int32 matrix"),
        ("qweight", lambda t: None, "missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(make: Any, leaf: str, change: Any, reason: str) -> None:
    tensors = make(layer())
    tensors[leaf] = change(tensors[leaf])
    with pytest.raises(BuildError, match=rf"^layer\.{leaf}: .*{reason}"):
        repack("layer", tensors, PackedFormat("awq" if make is as_awq else "gptq", 32))


def test_a_group_size_that_the_scales_do_not_have_is_refused() -> None:
    for group_size in (64, 128, -1):
        with pytest.raises(BuildError, match=rf"^layer\.scales: .*groups of {group_size} "):
            repack("layer", as_awq(layer()), PackedFormat("awq", group_size))


def test_output_features_that_do_not_fill_words_are_refused() -> None:
    tensors = as_gptq(layer(out_features=24), 1)
    tensors["qweight"], tensors["scales"] = tensors["qweight"][:, :20], tensors["scales"][:, :20]
    with pytest.raises(BuildError, match=r"^layer\.qzeros"):
        repack("layer", tensors, PackedFormat("gptq", 32))


def test_act_order_in_awq_is_refused() -> None:
    with pytest.raises(BuildError, match=r"^layer\.g_idx: "):
        repack("layer", as_awq(layer()) | {"g_idx": torch.zeros(128)}, PackedFormat("awq", 32))


def test_formats_are_read_from_the_config() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
    assert read_format(awq) == PackedFormat("awq", 128)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": True}
    assert read_format(gptq) == PackedFormat("gptq", -1, True, act_order=True)
    other = gptq | {"checkpoint_format": "gptq_v2", "sym": False, "desc_act": False}
    assert read_format(other) == PackedFormat("gptq_v2", -1, False)
    plain = awq | {"modules_not_to_convert": ["lm_head"]}
    assert read_format(plain) == PackedFormat("awq", 128, plain=("lm_head",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"bits": 8}, "bits 8"),
        ({"bits": None}, "bits None"),
        ({"group_size": 16}, "group_size 16"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"is_marlin_format": True}, "'marlin'"),
        ({"pack_dtype": "int16"}, "pack_dtype int16"),
        ({"dynamic": {"-:lm_head": {}}}, "dynamic"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
    ],
)
def test_formats_that_cannot_be_repacked_are_refused(change: dict[str, Any], reason: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128} | change
    with pytest.raises(BuildError, match=f"^quantization_config: .*{reason}"):
        read_format(config)
