"""What quantised weights cost: measured against the original, and refused where it is too much."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from pelton.compile.build_plan import BuildRequest, resolve
from pelton.compile.checkpoint import load_model, load_tokenizer, open_checkpoint
from pelton.compile.quality import QualityGate
from pelton.compile.quantize import Quantization, quantize_linears
from pelton.errors import BuildError
from support.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, QualityGate]:
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    checkpoint = open_checkpoint(str(path))
    model = load_model(checkpoint, torch.float32)
    return path, model, QualityGate(model, load_tokenizer(checkpoint), model.config)


def test_a_model_costs_nothing_against_itself(llama: tuple[Path, nn.Module, QualityGate]) -> None:
    _, model, gate = llama
    report = gate.measure(model, 1e-6)
    assert report.kl_divergence == pytest.approx(0, abs=1e-7)
    assert report.top1_agreement == 1.0
    assert report.perplexity == report.original_perplexity


def test_fewer_bits_cost_more(llama: tuple[Path, nn.Module, QualityGate]) -> None:
    _, model, gate = llama
    costs = []
    for quantization in (
        Quantization("fp8"),
        Quantization("int4", 32),
        Quantization("int4", -1, symmetric=True),
    ):
        rounded = copy.deepcopy(model)
        quantize_linears(rounded, "model.layers", quantization)
        costs.append(gate.measure(rounded, 10).kl_divergence)
    assert 0 < costs[0] < costs[1] < costs[2]


def test_the_numbers_are_those_of_their_definitions(llama: tuple[Path, nn.Module, QualityGate]) -> None:
    """A model that expects all tokens alike: its perplexity is the size of the vocabulary."""
    _, model, gate = llama
    flat = copy.deepcopy(model)
    with torch.no_grad():
        flat.lm_head.weight = nn.Parameter(torch.zeros_like(flat.lm_head.weight))
    report = gate.measure(flat, 10)
    assert report.perplexity == pytest.approx(320, rel=1e-5)
    itself = gate.measure(model, 10)
    entropy_gap = report.kl_divergence - itself.kl_divergence
    assert 0 < entropy_gap < math.log(320)


@pytest.mark.parametrize("broken", ["worse", "not finite"])
def test_what_costs_too_much_is_refused(llama: tuple[Path, nn.Module, QualityGate], broken: str) -> None:
    _, model, gate = llama
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.layers[1].mlp.down_proj.weight *= 50 if broken == "worse" else math.nan
    with pytest.raises(BuildError, match=r"^quantize: KL divergence .* at most 0.001 nats .* --max-kl"):
        gate.measure(damaged, 0.001)


@pytest.mark.parametrize("limit", [math.nan, math.inf, 0.0, -1.0])
def test_a_limit_that_is_no_positive_number_is_refused(
    limit: float, llama: tuple[Path, nn.Module, QualityGate]
) -> None:
    with pytest.raises(BuildError, match=r"^max_kl: .* is not a positive number"):
        resolve(BuildRequest(str(llama[0]), quantize="int4", target="cuda", max_kl=limit))


def test_a_limit_without_anything_to_limit_is_refused(llama: tuple[Path, nn.Module, QualityGate]) -> None:
    path, _, _ = llama
    with pytest.raises(BuildError, match=r"^max_kl: "):
        resolve(BuildRequest(str(path), max_kl=0.1))
