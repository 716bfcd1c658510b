"""The export proves itself on each family, and refuses what it cannot express."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pelton.compile.checkpoint import load_model, open_checkpoint
from pelton.compile.export import export, kv_geometry
from pelton.compile.passes import optimise
from pelton.compile.proof import compare, exported_step, record
from pelton.compile.segments import PAGED_ATTENTION, attention_of, cut, get_weight, layer_prefix
from pelton.errors import BuildError
from support.checkpoints import FAMILIES, tiny_checkpoint

BLOCK_SIZE = 16


def load(family: str, path: Path, dtype: torch.dtype = torch.float32, **overrides: object) -> torch.nn.Module:
    return load_model(open_checkpoint(str(tiny_checkpoint(family, path / family, **overrides))), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_program_reproduces_the_model(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    program = export(model, block_size=BLOCK_SIZE)
    nodes = list(program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION))
    assert len(nodes) == model.config.num_hidden_layers
    windows = {attention_of(node).window for node in nodes}
    trace = record(model, windows=sorted(windows), block_size=BLOCK_SIZE)
    result = compare(
        trace, exported_step(program, kv_geometry(model.config), trace, torch.float32), "program"
    )
    assert result.relative_error < 1e-5
    assert result.top1_agreement == 1.0


def test_ql_09_local_and_global_layers_keep_their_own_window(tmp_path: Path) -> None:
    program = export(load("gemma3_text", tmp_path), block_size=BLOCK_SIZE)
    nodes = program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION)
    assert [attention_of(node).window for node in nodes] == [8, 0]


def test_gemma_soft_cap_and_query_scale_reach_the_operator(tmp_path: Path) -> None:
    program = export(load("gemma2", tmp_path), block_size=BLOCK_SIZE)
    for node in program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION):
        attention = attention_of(node)
        assert attention.soft_cap == 2.0
        assert attention.scale == pytest.approx(24**-0.5)


def test_a_program_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    model = load("mistral", tmp_path)
    program = export(model, block_size=BLOCK_SIZE)
    trace = record(model, windows=[8], block_size=BLOCK_SIZE)
    for node in program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION):
        node.args = (*node.args[:9], 0, *node.args[10:])  # the window is lost
    program.graph_module.recompile()
    with pytest.raises(BuildError, match="does not reproduce the original model"):
        compare(trace, exported_step(program, kv_geometry(model.config), trace, torch.float32), "program")


def test_a_family_that_bypasses_the_attention_interface_is_refused(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=64)).eval()
    with pytest.raises(BuildError, match=r"cannot be exported|not supported"):
        export(model, block_size=BLOCK_SIZE)


@pytest.mark.parametrize(("family", "num_classes"), [("llama", 1), ("qwen2", 1), ("gemma3_text", 2)])
def test_layers_that_are_alike_are_one_class(family: str, num_classes: int, tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 4}
    if family == "gemma3_text":
        overrides["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = load(family, tmp_path, **overrides)
    graph_module = optimise(export(model, block_size=BLOCK_SIZE).module(check_guards=False))
    segments = cut(graph_module, layer_prefix(model, 4), 4)
    assert [s.name for s in segments] == ["prologue", *(f"layer.{i}" for i in range(4)), "epilogue"]
    layers = [s.signature(graph_module) for s in segments[1:-1]]
    assert len(set(layers)) == num_classes


def test_sibling_linears_are_merged(tmp_path: Path) -> None:
    model = load("qwen2", tmp_path)  # Q/K/V with biases
    graph_module = optimise(export(model, block_size=BLOCK_SIZE).module(check_guards=False))
    linears = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert len(linears) == 2 * 4 + 1  # per layer: QKV, output, gate+up, down; and the head


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = load("gemma2", tmp_path)
    graph_module = optimise(export(model, block_size=BLOCK_SIZE).module(check_guards=False))
    segments = cut(graph_module, layer_prefix(model, 2), 2)
    vocab = model.config.vocab_size
    tables = {
        weight.data_ptr()
        for segment in (segments[0], segments[-1])
        for weight in (get_weight(graph_module, name) for name in segment.weights)
        if weight.dim() == 2 and weight.shape[0] == vocab
    }
    assert len(tables) == 1
