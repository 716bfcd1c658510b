"""TensorRT-RTX takes the whole attention operator: one-byte pages, sinks and ALiBi slopes, in real builds and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from torch.export import Dim

from pelton.compile.build import build
from pelton.compile.build_plan import BuildRequest, resolve
from pelton.compile.onnx_graph import write_onnx
from pelton.compile.profiles import Profile, ShapeRange
from pelton.compile.progress import Progress
from pelton.compile.targets.tensorrt import TensorRTOptions, build_plan
from pelton.plugins_trt.paged_attention import paged_attention
from pelton.plugins_trt.tensorrt import TENSORRT_RTX, find_version
from pelton.runtime.trt_facts import EngineFacts
from pelton.runtime.trt_memory import plan_memory
from support.checkpoints import tiny_checkpoint

needs_rtx = pytest.mark.skipif(find_version(TENSORRT_RTX) is None, reason="TensorRT-RTX is not installed")


@needs_rtx
@pytest.mark.parametrize(("name", "dtype"), [("fp8", "float8_e4m3fn"), ("int8", "int8")])
def test_a_bundle_with_pages_of_one_byte_says_so_everywhere(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = tiny_checkpoint("llama", tmp_path / "checkpoint", dtype=torch.bfloat16)
    # 8.0 has no arithmetic on fp8: its kernels decode these pages with integers.
    request = BuildRequest(
        str(checkpoint), tmp_path / "bundle", target=TENSORRT_RTX, gpus=("8.0",), kv_cache_dtype=name,
        max_batch_size=4, max_step_tokens=16, kv_cache_bytes=1 << 20,
    )  # fmt: skip
    plan = resolve(request)
    assert f"--kv-cache-dtype {name}" in plan.command
    plain = resolve(replace(request, kv_cache_dtype="auto"))
    assert plain.content_key != plan.content_key
    assert plan.memory.num_blocks == 2 * plain.memory.num_blocks
    manifest, _ = build(plan, Progress())

    cache = manifest.engine["kv_cache"]
    assert cache["dtype"] == dtype
    nodes = len(cache["k_scales"]), len(cache["v_scales"])
    assert nodes == (2, 2)
    graph, quantised = manifest.quality["proofs"]
    assert graph["relative_error"] <= graph["tolerance"]
    assert quantised["subject"] == f"{name} KV cache"
    assert 0 < quantised["kl_divergence"] < 0.01
    facts = EngineFacts.read(tmp_path / "bundle", "rebuild it")
    assert facts.cache_dtype == dtype
    assert facts.dtype == "bfloat16"
    memory = plan_memory(facts, manifest.limits, kv_cache_bytes=None, activation_bytes=0, free_bytes=1 << 30)
    assert memory.num_blocks == plan.memory.num_blocks
    assert memory.kv_bytes == plan.memory.kv_pages


class _Attention(torch.nn.Module):
    """The operator alone, with sinks and slopes where they are given: as many outputs as a model of one layer."""

    def __init__(self, sinks: torch.Tensor | None, slopes: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("sinks", sinks)
        self.register_buffer("slopes", slopes)

    def forward(
        self,
        x: torch.Tensor,  # [T, 4, 16]
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        out, k_cache, v_cache = paged_attention(
            x, x[:, :2], x[:, 2:], k_caches[0], v_caches[0], block_table, seq_lens, query_start_loc,
            0.25, 0, 0.0, self.sinks, self.slopes, 0.5, 0.25,
        )  # fmt: skip
        return out, [k_cache], [v_cache]


@needs_rtx
@pytest.mark.parametrize(("has_sinks", "has_alibi"), [(True, True), (False, True)])
def test_sinks_and_slopes_are_inputs_of_the_plugin(has_sinks: bool, has_alibi: bool, tmp_path: Path) -> None:
    module = _Attention(torch.randn(4) if has_sinks else None, torch.rand(4) if has_alibi else None)
    page = (16, 2, 16)
    arguments = (
        torch.zeros(7, 4, 16).half(),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.full((3,), 2, dtype=torch.int32),
        torch.tensor([0, 2, 4, 7], dtype=torch.int32),
        [torch.zeros(11, *page, dtype=torch.int8)],
        [torch.zeros(11, *page, dtype=torch.int8)],
    )
    dynamic = ({0: Dim("T")}, {0: Dim("B"), 1: Dim("M")}, None, None, [{0: Dim("P")}], [{0: Dim("P")}])
    graph = write_onnx(torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False), tmp_path)
    (node,) = (node for node in onnx.load(graph).graph.node if node.op_type == "paged_attention")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert len(node.input) == 8 + has_sinks + has_alibi
    assert attributes == {
        "scale": 0.25, "window": 0, "soft_cap": 0.0, "k_scale": 0.5, "v_scale": 0.25,
        "has_sinks": has_sinks, "has_alibi_slopes": has_alibi,
    }  # fmt: skip

    ranges = {
        "x": ((1, 4, 16), (8, 4, 16)), "block_table": ((1, 1), (4, 4)), "seq_lens": ((3,), (3,)),
        "query_start_loc": ((4,), (4,)),
        "k_caches_0": ((1, *page), (20, *page)), "v_caches_0": ((1, *page), (20, *page)),
    }  # fmt: skip
    shapes = {name: ShapeRange(name, low, high, high) for name, (low, high) in ranges.items()}
    layers = build_plan(
        TENSORRT_RTX, graph, [Profile("all", "", shapes)], TensorRTOptions(gpus=("8.9",)), tmp_path
    )
    assert sum("paged_attention" in layer.name for layer in layers) == 1
