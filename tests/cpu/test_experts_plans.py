"""TensorRT-RTX builds engines of models with routed experts: one plugin a layer of experts, in each form of weights."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from pelton.compile.bundle import Limits
from pelton.compile.experts import PELTON
from pelton.compile.export import export, kv_geometry
from pelton.compile.onnx_graph import GRAPH_FILE, write_onnx
from pelton.compile.profiles import Profile, derive_profiles
from pelton.compile.quantize import Quantization, quantize_linears
from pelton.compile.quantize_experts import quantize_experts
from pelton.compile.targets.tensorrt import TensorRTOptions, build_plan
from pelton.errors import BuildError
from pelton.plugins_trt.tensorrt import TENSORRT_RTX, find_version
from support.checkpoints import tiny_model

needs_rtx = pytest.mark.skipif(find_version(TENSORRT_RTX) is None, reason="TensorRT-RTX is not installed")
LIMITS = Limits(
    max_model_len=512, max_batch_size=8, max_step_tokens=64, block_size=32, kv_cache_bytes=1 << 24
)
OPTIONS = TensorRTOptions(gpus=("8.9",))


def write_graph(family: str, scheme: str | None, directory: Path) -> tuple[Path, tuple[Profile, ...]]:
    model = tiny_model(family).half().requires_grad_(False)
    if scheme is not None:
        quantize_linears(model, "model.layers", Quantization(scheme))
        quantize_experts(model, "model.layers", Quantization(scheme))
    program = export(model, block_size=LIMITS.block_size, experts=PELTON)
    return write_onnx(program, directory), derive_profiles(LIMITS, kv_geometry(model.config), 100)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Profile, ...]]:
    return write_graph("mixtral", None, tmp_path_factory.mktemp("mixtral"))


@needs_rtx
@pytest.mark.parametrize(
    ("family", "scheme", "num_inputs", "layers"),
    [
        ("mixtral", None, 5, (0, 1)),
        ("mixtral", "int4", 9, (0, 1)),
        ("mixtral", "fp8", 7, (0, 1)),
        ("deepseek_v3", None, 5, (1,)),
    ],
)
def test_a_plan_has_one_plugin_a_layer_of_experts(
    family: str,
    scheme: str | None,
    num_inputs: int,
    layers: tuple[int, ...],
    mixtral: tuple[Path, tuple[Profile, ...]],
    tmp_path: Path,
) -> None:
    is_mixtral = (family, scheme) == ("mixtral", None)
    graph, profiles = mixtral if is_mixtral else write_graph(family, scheme, tmp_path)
    nodes = [
        node
        for node in onnx.load(graph, load_external_data=False).graph.node
        if node.op_type == "moe_experts"
    ]
    assert [len(node.input) for node in nodes] == [num_inputs] * len(layers)
    built = build_plan(TENSORRT_RTX, graph, profiles, OPTIONS, tmp_path)
    names = [layer.name for layer in built if layer.kind == "pelton::moe_experts"]
    assert names == [f"model.layers.{layer}.mlp.experts/moe_experts" for layer in layers]


@needs_rtx
def test_experts_without_their_attributes_are_refused_with_the_layer(
    mixtral: tuple[Path, tuple[Profile, ...]], tmp_path: Path
) -> None:
    graph, profiles = mixtral
    model = onnx.load(graph)
    node = next(node for node in model.graph.node if node.op_type == "moe_experts")
    del node.attribute[:]
    onnx.save(model, tmp_path / GRAPH_FILE)
    with pytest.raises(BuildError, match=r"model\.layers\.0\.mlp\.experts/moe_experts"):
        build_plan(TENSORRT_RTX, tmp_path / GRAPH_FILE, profiles, OPTIONS, tmp_path)
