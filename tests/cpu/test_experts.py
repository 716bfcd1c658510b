"""Routed experts on `pelton::moe_experts`: exported families against transformers, quantised, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation

from pelton.compile import experts as experts_module
from pelton.compile.experts import (
    BATCHED,
    MOE_EXPERTS,
    PELTON,
    QuantizedExperts,
    activation_of,
    count_experts,
    experts_of,
)
from pelton.compile.export import export, kv_geometry
from pelton.compile.proof import ProofResult, compare, exported_step, record
from pelton.compile.quantize import Quantization, quantize_linears
from pelton.compile.quantize_experts import quantize_experts
from pelton.errors import BuildError
from pelton.plugins_trt.moe_experts import moe_experts
from support.checkpoints import tiny_model

BLOCK_SIZE = 16
# With the number of layers that have experts.
FAMILIES = {"mixtral": 2, "qwen3_moe": 2, "qwen2_moe": 1, "deepseek_v3": 1}


def proof_of(model: PreTrainedModel, program: torch.export.ExportedProgram) -> ProofResult:
    trace = record(model, windows=[0], block_size=BLOCK_SIZE)
    step = exported_step(program, kv_geometry(model.config), trace, model.dtype)
    return compare(trace, step, "program")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_equals_transformers(family: str) -> None:
    model = tiny_model(family)
    program = export(model, block_size=BLOCK_SIZE, experts=PELTON)
    assert count_experts(program.graph) == FAMILIES[family]
    proof = proof_of(model, program)
    assert proof.relative_error < 1e-5
    assert proof.top1_agreement == 1.0


def test_router_weights_are_float32_for_the_operator_whatever_the_family_passes() -> None:
    """Qwen's router rounds them to the dtype of the model."""
    program = export(tiny_model("qwen3_moe").to(torch.bfloat16), block_size=BLOCK_SIZE, experts=PELTON)
    for node in program.graph.find_nodes(op="call_function", target=MOE_EXPERTS):
        x, weights, ids, gate_up, down = (argument.meta["val"] for argument in node.args[:5])
        assert [t.dtype for t in (x, gate_up, down)] == [torch.bfloat16] * 3
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def test_other_targets_keep_the_experts_of_transformers() -> None:
    program = export(tiny_model("mixtral"), block_size=BLOCK_SIZE, experts=BATCHED)
    assert count_experts(program.graph) == 0


def test_the_proof_compares_with_the_experts_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with what the export swapped in."""
    model = tiny_model("mixtral")

    def wrong(module: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_experts(x, weights, ids.int(), module.gate_up_proj, module.down_proj, "gelu")

    monkeypatch.setattr(experts_module, "_forward", wrong)
    program = export(model, block_size=BLOCK_SIZE, experts=PELTON)
    with pytest.raises(BuildError, match="does not reproduce the original model"):
        proof_of(model, program)


def test_experts_that_bypass_the_interface_are_refused() -> None:
    model = tiny_model("mixtral")
    model.model.layers[0].unused = copy.deepcopy(model.model.layers[0].mlp.experts)
    with pytest.raises(
        BuildError, match="MixtralForCausalLM: 2 of 3 modules of experts call the experts interface"
    ):
        export(model, block_size=BLOCK_SIZE, experts=PELTON)


def test_gpt_oss_is_refused_with_all_its_reasons() -> None:
    model = tiny_model("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    reasons = "with biases, with transposed weights, with the rows of gate and up interleaved, with a gate of their own"
    with pytest.raises(
        BuildError, match=rf"model\.layers\.0\.mlp\.experts: GptOssExperts are experts {reasons}, which"
    ):
        export(model, block_size=BLOCK_SIZE, experts=PELTON)


def module_of(activation: str, **layout: bool) -> nn.Module:
    @use_experts_implementation(**layout)
    class Experts(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.act_fn = ACT2FN[activation]

        def forward(self, *arguments: object) -> None: ...

    return Experts(None)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
    ],
)
def test_activations_are_known_by_their_function(activation: str, expected: str) -> None:
    module = module_of(activation)
    assert activation_of("experts", module) == expected
    x = torch.linspace(-4, 4, 50)[:, None]
    ones = torch.ones(1, 1, 1)
    out = moe_experts(
        x, torch.ones(50, 1), torch.zeros(50, 1, dtype=torch.int32), torch.ones(1, 2, 1), ones, expected
    )
    torch.testing.assert_close(out, module.act_fn(x) * x)


@pytest.mark.parametrize(
    ("activation", "layout", "reason"),
    [
        ("relu", {}, "with ReLU for an activation"),
        ("gelu_10", {}, "with ClippedGELUActivation for an activation"),
        ("silu", {"has_gate": False}, "without a gate"),
        ("silu", {"has_post_expert_norm": True}, "with a norm after each expert"),
        ("silu", {"has_bias": True, "is_transposed": True}, "with biases, with transposed weights"),
    ],
)
def test_what_the_operator_does_not_compute_is_refused(
    activation: str, layout: dict[str, Any], reason: str
) -> None:
    with pytest.raises(
        BuildError, match=f"layers.3.experts: Experts are experts {reason}, which pelton::moe_experts"
    ):
        activation_of("layers.3.experts", module_of(activation, **layout))


@pytest.mark.parametrize(
    ("scheme", "dtype", "error"), [("int4", torch.float32, 1e-5), ("fp8", torch.float16, 0.1)]
)
def test_quantised_experts_are_exported_as_they_are_computed(
    scheme: str, dtype: torch.dtype, error: float
) -> None:
    model = tiny_model("qwen2_moe").to(dtype)
    model.requires_grad_(False)
    original = copy.deepcopy(model)
    quantization = Quantization(scheme, group_size=32)
    assert quantize_experts(model, "model.layers", quantization) == 1
    # Without the gate of the shared expert, one logit for all of it.
    assert quantize_linears(model, "model.layers", quantization) == 2 * 7
    assert isinstance(model.model.layers[1].mlp.shared_expert_gate, torch.nn.Linear)
    assert not experts_of(model)
    block, before = model.model.layers[1].mlp, original.model.layers[1].mlp
    assert torch.equal(block.gate.weight, before.gate.weight)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, weights, ids = before.gate(x)
    exact, rounded = before.experts(x, ids, weights), block.experts(x, ids, weights)
    difference = float((exact - rounded).norm() / exact.norm())
    assert 0.001 < difference < 0.25
    program = export(model, block_size=BLOCK_SIZE, experts=PELTON)
    assert count_experts(program.graph) == 1
    assert proof_of(model, program).relative_error < error


def test_quantised_stacks_are_as_small_as_they_should_be() -> None:
    model = tiny_model("mixtral")
    quantize_experts(model, "model.layers", Quantization("int4", group_size=32))
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, QuantizedExperts)
    assert experts.gate_up.shape == (4, 2, 2 * 96, 16)  # half a byte a weight
    assert experts.down_scales.shape == (4, 3, 64)
    assert sum(parameter.numel() for parameter in experts.parameters()) == 0


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_weights_that_cannot_be_rounded_are_named(scheme: str) -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] = float("nan")
    with pytest.raises(BuildError, match=r"model\.layers\.1\.mlp\.experts: the weight holds NaN"):
        quantize_experts(model, "model.layers", Quantization(scheme))


def test_stacks_of_unknown_modules_are_not_left_unquantised() -> None:
    model = tiny_model("llama")
    model.model.layers[1].stack = nn.Parameter(torch.ones(4, 8, 8))
    with pytest.raises(BuildError, match=r"quantize: model\.layers\.1\.stack is a stack of weights"):
        quantize_experts(model, "model.layers", Quantization("int4"))


def test_experts_that_the_operator_does_not_compute_are_not_quantised() -> None:
    model = tiny_model("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(
        BuildError, match=r"model\.layers\.0\.mlp\.experts: GptOssExperts are experts with biases"
    ):
        quantize_experts(model, "model.layers", Quantization("int4"))


def test_a_cache_of_latent_attention_holds_expanded_heads() -> None:
    geometry = kv_geometry(tiny_model("deepseek_v3").config)
    assert [(g.num_heads, g.head_dim) for g in geometry] == [(4, 24)] * 2
