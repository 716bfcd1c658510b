"""Graphs cut where they attend: which nodes a piece has, which pieces are alike, what is refused."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import GraphModule

from pelton.compile.experts import PELTON
from pelton.compile.export import KVGeometry, export, kv_geometry
from pelton.compile.kernel_checks import check_attention
from pelton.compile.merge_quantized import merge_quantized_siblings
from pelton.compile.passes import merge_equal_nodes, optimise
from pelton.compile.piecewise import Piece, cut_at_attention, move_to_device
from pelton.compile.quantize import Quantization, quantize_linears
from pelton.compile.segments import PAGED_ATTENTION, layer_prefix
from pelton.errors import BuildError
from support.checkpoints import FAMILIES, MOE_FAMILIES, MORE_FAMILIES, tiny_model

BLOCK_SIZE = 16


def graph_of(family: str, *, scheme: str | None = None, num_layers: int = 3) -> GraphModule:
    options = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"][:num_layers]}
    model = tiny_model(
        family, num_hidden_layers=num_layers, **(options if family.startswith("gemma") else {})
    )
    if scheme is not None:
        quantize_linears(model, layer_prefix(model, num_layers), Quantization(scheme))
    program = export(model, block_size=BLOCK_SIZE, experts=PELTON)
    merge_quantized_siblings(program)
    graph_module = optimise(program.module(check_guards=False))
    merge_equal_nodes(graph_module)
    return graph_module


def classes(graph_module: GraphModule, pieces: list[Piece]) -> list[int]:
    """For each piece the first one that it is alike."""
    signatures = [piece.segment.signature(graph_module, by_content=False) for piece in pieces]
    return [signatures.index(signature) for signature in signatures]


# GPT-OSS has experts that no target with pieces takes.
@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE_FAMILIES, *MOE_FAMILIES} - {"gpt_oss"}))
def test_every_family_has_a_piece_before_and_after_each_attention(family: str) -> None:
    graph_module = graph_of(family)
    pieces = cut_at_attention(graph_module)
    assert [[call.layer for call in piece.attentions] for piece in pieces] == [[0], [1], [2], []]
    known = {node.name for node in graph_module.graph.find_nodes(op="placeholder")}
    for piece in pieces:  # what a piece reads is there when it runs
        assert {node.name for node in piece.segment.inputs} <= known
        assert not any(node.target is PAGED_ATTENTION for node in piece.segment.nodes)
        known |= {node.name for node in piece.segment.outputs}
        for call in piece.attentions:
            assert {call.query.name, call.key.name, call.value.name} <= known
            known.add(call.output.name)
    (logits,) = pieces[-1].segment.outputs
    assert tuple(logits.meta["val"].shape)[1] == 320
    same = classes(graph_module, pieces)
    has_dense_first_layer = family in ("qwen2_moe", "deepseek_v3")
    assert (same[1] == same[2]) != has_dense_first_layer


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_quantised_layers_are_alike_whatever_their_packed_weights(scheme: str) -> None:
    graph_module = graph_of("llama", scheme=scheme)
    assert classes(graph_module, cut_at_attention(graph_module)) == [0, 1, 1, 3]


def test_pages_that_are_read_by_the_graph_are_refused() -> None:
    graph_module = graph_of("llama", num_layers=1)
    (attention,) = graph_module.graph.find_nodes(op="call_function", target=PAGED_ATTENTION)
    cache = next(user for user in attention.users if user.args[1] == 1)
    with graph_module.graph.inserting_after(cache):
        graph_module.graph.call_function(torch.ops.aten.neg.default, (cache,))
    with pytest.raises(BuildError, match="its pages are read by more than the next step"):
        cut_at_attention(graph_module)


def test_attention_over_another_layers_pages_is_refused() -> None:
    graph_module = graph_of("llama", num_layers=2)
    first, second = graph_module.graph.find_nodes(op="call_function", target=PAGED_ATTENTION)
    second.args = (*second.args[:4], first.args[4], *second.args[5:])
    with pytest.raises(BuildError, match="pages that are not the step's own"):
        cut_at_attention(graph_module)


def make_graph() -> GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    created = graph.call_function(aten.arange.default, (4,), {"device": torch.device("cpu")})
    twice = [graph.call_function(aten.unsqueeze.default, (x, 0)) for _ in range(2)]
    random = [graph.call_function(aten.rand_like.default, (x,)) for _ in range(2)]
    sums = graph.call_function(operator.add, (twice[0], twice[1]))
    graph.output((created, sums, *random))
    return GraphModule(torch.nn.Module(), graph)


def test_what_a_graph_creates_is_moved_to_the_device() -> None:
    graph_module = make_graph()
    move_to_device(graph_module, torch.device("meta"))
    created, *_ = graph_module(torch.zeros(4, device="meta"))
    assert created.device.type == "meta"


def test_equal_nodes_are_one_but_for_random_ones() -> None:
    graph_module = make_graph()
    before = graph_module(torch.ones(4))[1]
    merge_equal_nodes(graph_module)
    graph_module.recompile()
    assert (
        len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.unsqueeze.default)) == 1
    )
    assert (
        len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.rand_like.default)) == 2
    )
    assert torch.equal(graph_module(torch.ones(4))[1], before)


def test_heads_that_the_kernels_cannot_compute_are_refused_with_their_layer() -> None:
    model = tiny_model("llama").half()
    first, second = kv_geometry(model.config)
    graph = optimise(export(model, block_size=BLOCK_SIZE).module(check_guards=False)).graph
    check_attention(graph, (first, second), torch.float16, BLOCK_SIZE, (80, 90))
    odd = (first, KVGeometry(second.num_heads, 24))
    with pytest.raises(
        BuildError, match=r"^layer 1: attention .* 8\.0: heads must have a multiple of 16 .*--target cpu$"
    ):
        check_attention(graph, odd, torch.float16, BLOCK_SIZE, (80, 90))
    with pytest.raises(BuildError, match=r"^layer 0: .*queries must be float16 or bfloat16"):
        check_attention(graph, (first, second), torch.float32, BLOCK_SIZE, (90,))
