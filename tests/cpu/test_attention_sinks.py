"""Attention sinks from the model to the operator, and families whose attention cannot be taken over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.export import Dim
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pelton.compile.build_plan import BuildRequest, resolve
from pelton.compile.export import KVGeometry, export, kv_geometry
from pelton.compile.memory import plan_memory
from pelton.compile.passes import optimise
from pelton.compile.proof import compare, exported_step, record
from pelton.compile.segments import PAGED_ATTENTION, attention_of, cut, get_weight
from pelton.compile.targets import cpu
from pelton.errors import BuildError
from pelton.plugins_trt.paged_attention import paged_attention
from support.checkpoints import tiny_checkpoint, tiny_model

BLOCK_SIZE = 16
LOCAL_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def with_sinks(family: str) -> PreTrainedModel:
    return tiny_model(family, **({} if family == "gpt_oss" else LOCAL_GLOBAL))


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa"])
def test_a_model_with_sinks_is_exported_as_it_is(family: str) -> None:
    model = with_sinks(family)
    program = export(model, block_size=BLOCK_SIZE)
    nodes = list(program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION))
    assert [attention_of(node).window for node in nodes] == [8, 0]
    assert all(attention_of(node).sinks is not None for node in nodes)
    trace = record(model, windows=[0, 8], block_size=BLOCK_SIZE)
    geometry = kv_geometry(model.config)
    result = compare(trace, exported_step(program, geometry, trace, torch.float32), "program")
    assert result.relative_error < 1e-5
    assert result.top1_agreement == 1.0

    for node in nodes:
        node.args = (*node.args[:11], None)
    program.graph_module.recompile()
    with pytest.raises(BuildError, match="does not reproduce the original model"):
        compare(trace, exported_step(program, geometry, trace, torch.float32), "program")


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, pages: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out, _, _ = paged_attention(x, x[:, :2], x[:, 2:], *pages, 0.25, 0, 0.0, self.sinks)
        return x + out


class _Model(nn.Module):
    """Two layers of attention [T, 4, 16] and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer()])

    def forward(
        self,
        x: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> torch.Tensor:
        for layer, *caches in zip(self.layers, k_caches, v_caches, strict=True):
            x = layer(x, (*caches, block_table, seq_lens, query_start_loc))
        return x


@pytest.mark.skipif(not os.environ.get("PELTON_FULL_TESTS"), reason="compiles for half a minute")
def test_the_cpu_compiler_takes_sinks_as_a_weight_of_each_layer(tmp_path: Path) -> None:
    """A class of layers is compiled once: a constant that is made of one layer's sinks would be all layers'."""
    shape = (11, BLOCK_SIZE, 2, 16)
    arguments = (
        torch.zeros(7, 4, 16),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.full((3,), 2, dtype=torch.int32),
        torch.tensor([0, 2, 4, 7], dtype=torch.int32),
        [torch.zeros(shape), torch.zeros(shape)],
        [torch.zeros(shape), torch.zeros(shape)],
    )
    dynamic = ({0: Dim("T")}, {0: Dim("B"), 1: Dim("M")}, None, None, *[[{0: Dim("P")}] * 2] * 2)
    exported = torch.export.export(_Model(), arguments, dynamic_shapes=dynamic, strict=False)
    graph_module = optimise(exported.module(check_guards=False))
    segments = cut(graph_module, "layers", 2)
    program = cpu.lower(
        graph_module, segments, (KVGeometry(2, 16), KVGeometry(2, 16)),
        dtype=torch.float32, block_size=BLOCK_SIZE, num_threads=2, directory=tmp_path,
    )  # fmt: skip
    first, second = (segment.library for segment in program.segments)
    assert first.file == second.file
    (one,), (other,) = first.weights.values(), second.weights.values()
    stored = load_file(tmp_path / "weights.safetensors")
    for name, layer in ((one, 0), (other, 1)):
        torch.testing.assert_close(stored[name], get_weight(graph_module, f"layers.{layer}.sinks"))


def test_sinks_are_planned_without_tiles(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("granite_swa", tmp_path / "checkpoint", **LOCAL_GLOBAL)
    plan = resolve(BuildRequest(str(checkpoint), tmp_path / "bundle", dtype="bfloat16"))
    for has_tiles in (False, True):
        expected = plan_memory(plan.facts, plan.limits, torch.bfloat16, is_tied=False, has_tiles=has_tiles)
        assert (plan.memory == expected) is not has_tiles


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4}),
        ("falcon", {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}),
        ("falcon", {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}),
    ],
)
def test_families_with_an_attention_of_their_own_are_refused(family: str, options: dict[str, object]) -> None:
    config = AutoConfig.for_model(family, hidden_size=64, vocab_size=320, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BuildError, match=r"0 of 2 layers call the attention interface.*attention of its own"):
        export(model, block_size=BLOCK_SIZE)


def test_layers_with_other_heads_than_the_config_says_are_refused() -> None:
    model = tiny_model("mimo_v2_flash", **LOCAL_GLOBAL, num_experts=4, num_experts_per_tok=2, v_head_dim=16)
    with pytest.raises(
        BuildError, match=r"layer 0 of MiMoV2FlashAttention has 4 KV heads .* its config says 2"
    ):
        export(model, block_size=BLOCK_SIZE)
