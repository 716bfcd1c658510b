"""Pelton's operators in an engine of the `cuda` target: compiled pieces call them by name, and their Triton
kernels run, under the interpreter here. The model has routed experts, whose weights are quantised too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pelton.compile.bundle import read_manifest
from support import cuda_kernel_steps, kernel_cases
from support.checkpoints import tiny_checkpoint
from support.cuda_bundle import build_on_host
from support.interpreted import interpreter
from support.trt_steps import step

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    with interpreter() as call:
        call(kernel_cases.correct_arithmetic)
        yield call


@pytest.fixture(scope="module")
def cuda_int4_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tiny_checkpoint(
        "mixtral", tmp_path_factory.mktemp("mixtral"), dtype=torch.float16, num_hidden_layers=1
    )
    return build_on_host(checkpoint, ARTIFACTS / "tiny-cuda-int4", dtype="float16", quantize="int4")


def test_a_quantised_engine_is_proved(cuda_int4_bundle: Path) -> None:
    manifest = read_manifest(cuda_int4_bundle)
    assert [proof["subject"] for proof in manifest.quality["proofs"]] == ["exported graph", "compiled engine"]
    assert manifest.engine["quantization"]["scheme"] == "int4"


def test_an_engine_on_kernels_computes_what_it_computes_on_references(
    call: Callable[..., Any], cuda_int4_bundle: Path
) -> None:
    """A prompt beside a shorter one, a chunk, decodes padded to a captured size, then one step from the graph."""
    steps = [
        step((list(range(30, 50)), 0, [3, 1]), ([7, 8, 9], 0, [2])),
        step(([11], 20, [3, 1]), ([12, 13, 14], 3, [2])),
        *(step(([15 + i], 21 + i, [3, 1]), ([16], 6 + i, [2]), ([40], i, [0])) for i in range(2)),
    ]
    expected = cuda_kernel_steps.run_steps(cuda_int4_bundle, steps, False)
    actual = call(cuda_kernel_steps.run_steps, cuda_int4_bundle, steps, True)
    for got, wanted in zip(actual, expected, strict=True):
        assert np.abs(got - wanted).max() < 0.005 * np.abs(wanted).max()
        assert not np.array_equal(got, wanted)  # which says that the kernels ran


def test_each_operator_reaches_its_kernel(call: Callable[..., Any]) -> None:
    expected = cuda_kernel_steps.run_operators(False)
    actual, launched = call(cuda_kernel_steps.run_operators, True), call(cuda_kernel_steps.launched_operators)
    assert launched == sorted(expected)
    for name, wanted in expected.items():
        assert torch.allclose(actual[name], wanted, rtol=2e-3, atol=2e-3), name
