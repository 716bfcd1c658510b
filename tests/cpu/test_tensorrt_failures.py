"""TensorRT-RTX is made to fail, for real: each failure names the layer, the cause and the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pelton.compile.profiles import Profile, ShapeRange
from pelton.compile.targets.tensorrt import PLAN_FILE, TensorRTOptions, build_plan
from pelton.errors import BuildError
from pelton.plugins_trt.tensorrt import TENSORRT_RTX, find_version

pytestmark = pytest.mark.skipif(find_version(TENSORRT_RTX) is None, reason="TensorRT-RTX is not installed")

LAYER = "model.layers.3.mlp.up_proj"
WIDTH = 64


def weights(name: str, *shape: int, dtype: type = np.float16) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, dtype), name)


def fp8(name: str, shape: Sequence[int]) -> onnx.TensorProto:
    return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, shape, [1.0] * int(np.prod(shape)))


def node(operator: str, inputs: Sequence[str], output: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], name=f"{LAYER}/{operator}", **attributes)


def write(
    directory: Path,
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto] = (),
    dtype: int = TensorProto.FLOAT16,
    inputs: Sequence[onnx.ValueInfoProto] = (),
) -> Path:
    """A graph with the input `x` [tokens, WIDTH] and the output `y`."""
    x = helper.make_tensor_value_info("x", dtype, ["tokens", WIDTH])
    y = helper.make_tensor_value_info("y", dtype, None)
    graph = helper.make_graph(nodes, "graph", [x, *inputs], [y], list(initializers))
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("pelton", 1)]
    onnx.save(helper.make_model(graph, opset_imports=domains), directory / "model.onnx")
    return directory / "model.onnx"


def profile(**shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> Profile:
    given = {"x": ((1, WIDTH), (8, WIDTH), (16, WIDTH)), **shapes}
    return Profile("decode", "", {name: ShapeRange(name, *shape) for name, shape in given.items()})


def refusal(
    graph: Path, *, gpu: str = "8.9", profiles: Sequence[Profile] | None = None, workspace: int = 1 << 30
) -> str:
    options = TensorRTOptions(gpus=(gpu,), workspace_bytes=workspace)
    with pytest.raises(BuildError) as caught:
        build_plan(TENSORRT_RTX, graph, profiles or [profile()], options, graph.parent)
    assert not (graph.parent / PLAN_FILE).exists()
    said = str(caught.value)
    assert "\n" not in said
    return said


def fp8_plugin_graph(directory: Path) -> Path:
    nodes = [node("fp8_linear", ["x", "w", "s"], domain="pelton")]
    return write(directory, nodes, [fp8("w", [32, WIDTH]), weights("s", 32, dtype=np.float32)])


def test_the_graphs_of_these_tests_build_where_they_should(tmp_path: Path) -> None:
    build_plan(
        TENSORRT_RTX, fp8_plugin_graph(tmp_path), [profile()], TensorRTOptions(gpus=("8.9",)), tmp_path
    )
    assert (tmp_path / PLAN_FILE).stat().st_size > 10_000


def test_fp8_on_a_gpu_that_has_none(tmp_path: Path) -> None:
    said = refusal(fp8_plugin_graph(tmp_path), gpu="8.6")
    assert said.startswith("FP8 is not supported on this GPU; FP8 needs compute capability 8.9 or later")
    assert "--quantize int4 (TensorRT: IBuilder::buildSerializedNetwork: " in said


def test_bfloat16_on_a_gpu_that_has_none(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, [node("Mul", ["x", "x"])], dtype=TensorProto.BFLOAT16), gpu="7.5")
    assert said.startswith("bfloat16 is not supported on this GPU; ")
    assert "--dtype float16" in said


def test_an_operator_without_plugin(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, [node("Frobnicate", ["x"], domain="pelton")]))
    assert said.startswith(f"{LAYER}/Frobnicate: the operator is neither TensorRT's nor one of Pelton's")
    assert "--target cpu" in said
    assert "(Frobnicate, INVALID_NODE)" in said


def test_an_operator_that_the_parser_refuses_without_a_word(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, [node("Unique", ["x"])]))
    assert said.startswith(f"{LAYER}/Unique: TensorRT does not support this operator in this form; ")
    assert "(TensorRT: false (Unique, UNSUPPORTED_NODE))" in said


def test_a_plugin_whose_node_lacks_an_attribute(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = [node("int4_linear", ["x", "q", "s"], domain="pelton")]
    said = refusal(write(tmp_path, nodes, [weights("q", 2, 32, 16, dtype=np.int8), weights("s", 2, 32)]))
    assert said.startswith(f"{LAYER}/int4_linear: Pelton's plugin does not take this node")
    assert "Traceback" not in capfd.readouterr().err


def test_a_plugin_with_a_dtype_that_it_does_not_take(tmp_path: Path) -> None:
    """TensorRT deletes plugins that it has never asked for an interface."""
    nodes = [node("int4_linear", ["x", "q", "s"], domain="pelton", group_size=32)]
    said = refusal(write(tmp_path, nodes, [weights("q", 2, 32, 16, dtype=np.int32), weights("s", 2, 32)]))
    assert "Pelton's plugin does not take this node as it stands in the graph; try the other --dtype" in said


def test_operands_of_different_types(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, [node("MatMul", ["x", "w"])], [weights("w", WIDTH, 8, dtype=np.float32)]))
    assert said.startswith(f"{LAYER}/MatMul: its inputs do not go together (types or sizes); ")


def test_operands_of_different_sizes(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, [node("MatMul", ["x", "w"])], [weights("w", WIDTH // 2, 8)]))
    assert said.startswith(f"{LAYER}/MatMul: its inputs do not go together (types or sizes); ")


def test_a_size_that_is_only_known_at_run_time(tmp_path: Path) -> None:
    axes = helper.make_tensor_value_info("axes", TensorProto.INT64, [1])
    said = refusal(write(tmp_path, [node("ReduceSum", ["x", "axes"])], inputs=[axes]))
    assert said.startswith(
        f"{LAYER}/ReduceSum: a size is computed at run time where TensorRT needs a constant"
    )


def test_a_layer_that_needs_more_scratch_memory_than_there_is(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, [node("MatMul", ["x", "w"])], [weights("w", WIDTH, 8)]), workspace=0)
    assert "it needs more scratch memory than a layer may have; " in said
    assert "lower --max-step-tokens or --max-batch-size" in said


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 32), (8, 32), (16, 32)), "has min=32, opt=32, max=32 but tensor has 64"),
        (((1,), (8,), (16,)), "has 2 dimensions but profile 0 has 1"),
    ],
)
def test_a_profile_that_does_not_go_with_the_input(
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    graph = write(tmp_path, [node("Mul", ["x", "x"])])
    said = refusal(graph, profiles=[profile(x=shapes)])
    assert said.startswith(
        "input x: the shapes of the optimisation profile do not go with the network's input; "
    )
    assert message in said


def test_sizes_that_must_be_equal_and_are_not(tmp_path: Path) -> None:
    other = helper.make_tensor_value_info("z", TensorProto.FLOAT16, ["tokens", WIDTH])
    graph = write(tmp_path, [node("Mul", ["x", "z"])], inputs=[other])
    said = refusal(graph, profiles=[profile(z=((1, WIDTH), (9, WIDTH), (17, WIDTH)))])
    assert "the shapes of the optimisation profile do not go with the network's input; " in said


def test_a_range_that_tensorrt_refuses(tmp_path: Path) -> None:
    """`ShapeRange` refuses it first; this is what remains if it did not."""
    wrong = profile()
    object.__setattr__(wrong.shapes["x"], "opt", (99, WIDTH))
    said = refusal(write(tmp_path, [node("Mul", ["x", "x"])]), profiles=[wrong])
    assert said.startswith("profile decode: input x: the shapes of the optimisation profile do not go with")
    assert "MIN<=OPT<=MAX" in said


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda data: data.write_bytes(data.read_bytes()[:50]), f"{LAYER}.weight: "),
        (lambda data: data.unlink(), f"{LAYER}.weight: "),
    ],
    ids=["cut", "missing"],
)
def test_weights_that_are_cut_or_missing(change: object, where: str, tmp_path: Path) -> None:
    name = f"model.{LAYER}.weight"  # as the exporter names the weights of a wrapped model
    graph = write(tmp_path, [node("MatMul", ["x", name])], [weights(name, WIDTH, 64)])
    model = onnx.load(graph)
    onnx.save(model, graph, save_as_external_data=True, location="weights", size_threshold=0)
    change(tmp_path / "weights")  # type: ignore[operator]
    said = refusal(graph)
    assert said.startswith(f"{where}the ONNX file is cut or damaged; free some disk space and build again")


@pytest.mark.parametrize("size", [0, 100])
def test_a_graph_that_is_cut(size: int, tmp_path: Path) -> None:
    graph = write(tmp_path, [node("MatMul", ["x", "w"])], [weights("w", WIDTH, 64)])
    graph.write_bytes(graph.read_bytes()[:size])
    assert refusal(graph).startswith("the ONNX file is cut or damaged; ")


_OUT_OF_MEMORY = """
import resource, sys
from pathlib import Path
import psutil
from pelton.compile.profiles import Profile, ShapeRange
from pelton.compile.targets.tensorrt import TensorRTOptions, build_plan
from pelton.errors import BuildError
from pelton.plugins_trt.tensorrt import load
load("tensorrt-rtx")
directory = Path(sys.argv[1])
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
shapes = ShapeRange("x", (1, 64), (8, 64), (16, 64))
try:
    build_plan("tensorrt-rtx", directory / "model.onnx", [Profile("decode", "", {"x": shapes})],
               TensorRTOptions(gpus=("8.9",)), directory)
except BuildError as error:
    print(error)
"""


def test_a_machine_that_runs_out_of_memory(tmp_path: Path) -> None:
    """The address space of the process is limited, so that reading 128 MiB of weights fails."""
    write(tmp_path, [node("MatMul", ["x", "w"])], [weights("w", WIDTH, 1 << 20)])
    done = subprocess.run(
        [sys.executable, "-c", _OUT_OF_MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("memory ran out; lower --max-step-tokens or --max-batch-size, or build on")
