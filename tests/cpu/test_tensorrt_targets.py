"""TensorRT-RTX builds real engines here, with no GPU. `tests/e2e/test_tensorrt_build.py` builds every family."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from pelton.compile.bundle import Limits
from pelton.compile.checkpoint import load_model, open_checkpoint
from pelton.compile.export import export, kv_geometry
from pelton.compile.onnx_graph import GRAPH_FILE, write_onnx
from pelton.compile.profiles import Profile, ShapeRange, derive_profiles
from pelton.compile.targets.tensorrt import (
    PLAN_FILE,
    TensorRTOptions,
    build_plan,
    check_gpus,
    machine_gpu,
)
from pelton.errors import BuildError
from pelton.plugins_trt.fp8_linear import fp8_linear
from pelton.plugins_trt.int4_linear import int4_linear, quantize_int4
from pelton.plugins_trt.tensorrt import TENSORRT, TENSORRT_RTX, find_version
from support.checkpoints import tiny_checkpoint

needs_rtx = pytest.mark.skipif(find_version(TENSORRT_RTX) is None, reason="TensorRT-RTX is not installed")
LIMITS = Limits(
    max_model_len=512, max_batch_size=8, max_step_tokens=64, block_size=32, kv_cache_bytes=1 << 24
)


def write_graph(
    family: str, directory: Path, dtype: torch.dtype = torch.float16
) -> tuple[Path, tuple[Profile, ...]]:
    checkpoint = tiny_checkpoint(family, directory / "checkpoint", dtype=dtype)
    model = load_model(open_checkpoint(str(checkpoint)), dtype)
    program = export(model, block_size=LIMITS.block_size)
    return write_onnx(program, directory), derive_profiles(LIMITS, kv_geometry(model.config), 100)


def test_weights_are_let_go_once_they_are_written(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "checkpoint")
    model = load_model(open_checkpoint(str(checkpoint)), torch.float16)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    program = export(model, block_size=LIMITS.block_size)
    write_onnx(program, tmp_path)
    del model, program
    gc.collect()
    assert [reference for reference in weights if reference() is not None] == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Profile, ...]]:
    return write_graph("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16)


@needs_rtx
def test_layers_carry_the_names_of_the_hf_modules(
    llama: tuple[Path, tuple[Profile, ...]], tmp_path: Path
) -> None:
    layers = build_plan(TENSORRT_RTX, *llama, TensorRTOptions(gpus=("12.0",)), tmp_path)
    by_name = {layer.name: layer for layer in layers}
    assert by_name["model.layers.1.mlp.down_proj/MatMul"].kind == "matrix_multiply"
    assert by_name["model.layers.1.mlp.down_proj/MatMul"].precision == "bf16"
    assert by_name["model.layers.0.self_attn/paged_attention"].kind == "pelton::paged_attention"
    assert "lm_head/MatMul" in by_name


@needs_rtx
def test_a_plugin_without_its_attribute_is_refused(
    llama: tuple[Path, tuple[Profile, ...]], tmp_path: Path
) -> None:
    graph, profiles = llama
    model = onnx.load(graph)
    node = next(n for n in model.graph.node if n.op_type == "paged_attention")
    del node.attribute[:]
    onnx.save(model, tmp_path / GRAPH_FILE)
    with pytest.raises(BuildError, match=r"model\.layers\.0\.self_attn/paged_attention"):
        build_plan(TENSORRT_RTX, tmp_path / GRAPH_FILE, profiles, TensorRTOptions(gpus=("8.9",)), tmp_path)


@needs_rtx
@pytest.mark.parametrize("size", [0, 100])
def test_a_cut_graph_is_refused(size: int, llama: tuple[Path, tuple[Profile, ...]], tmp_path: Path) -> None:
    graph, profiles = llama
    (tmp_path / GRAPH_FILE).write_bytes(graph.read_bytes()[:size])
    with pytest.raises(BuildError, match="cut or damaged"):
        build_plan(TENSORRT_RTX, tmp_path / GRAPH_FILE, profiles, TensorRTOptions(gpus=("8.9",)), tmp_path)


@needs_rtx
def test_a_profile_without_an_input_is_refused(
    llama: tuple[Path, tuple[Profile, ...]], tmp_path: Path
) -> None:
    graph, (decode, _) = llama
    shapes = {name: shape for name, shape in decode.shapes.items() if name != "seq_lens"}
    with pytest.raises(BuildError, match=r"profile decode: has no shapes for the inputs seq_lens"):
        build_plan(
            TENSORRT_RTX, graph, [Profile("decode", "", shapes)], TensorRTOptions(gpus=("8.9",)), tmp_path
        )


@needs_rtx
def test_a_profile_that_does_not_fit_the_graph_is_refused(
    llama: tuple[Path, tuple[Profile, ...]], tmp_path: Path
) -> None:
    graph, (decode, _) = llama
    wrong = ShapeRange("k_caches_0", (1, 16, 2, 16), (100, 16, 2, 16), (100, 16, 2, 16))
    with pytest.raises(BuildError, match="profile"):
        build_plan(
            TENSORRT_RTX, graph, [Profile("decode", "", {**decode.shapes, "k_caches_0": wrong})],
            TensorRTOptions(gpus=("8.9",)), tmp_path,
        )  # fmt: skip


@needs_rtx
def test_an_interrupt_stops_the_builder(llama: tuple[Path, tuple[Profile, ...]], tmp_path: Path) -> None:
    def interrupt(phase: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_plan(TENSORRT_RTX, *llama, TensorRTOptions(gpus=("8.9",)), tmp_path, on_progress=interrupt)
    assert not (tmp_path / PLAN_FILE).exists()


@pytest.mark.parametrize(
    ("target", "gpus", "scheme", "message"),
    [
        (TENSORRT_RTX, ["9.0"], None, r"gpu: '9\.0' is not a compute capability"),
        (TENSORRT_RTX, ["banana"], None, "gpu: 'banana'"),
        (TENSORRT_RTX, ["7.5"], None, r"gpu: 7\.5 is too old"),
        (TENSORRT_RTX, ["8.6"], "fp8", r"gpu: 8\.6 cannot run --quantize fp8: FP8 needs .* 8\.9"),
        (TENSORRT, ["8.9"], None, "gpu: TensorRT builds for the GPU of the machine"),
        (TENSORRT, [], "fp8", r"gpu: this machine's, of compute capability 8\.0, cannot run --quantize fp8"),
    ],
)
def test_gpus_that_cannot_be_built_for(
    target: str, gpus: list[str], scheme: str | None, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        check_gpus(target, gpus, scheme, detect_gpu=lambda: "8.0")


def test_gpus_are_ordered_and_once() -> None:
    given = check_gpus(TENSORRT_RTX, ["12.0", "8.9", "8.9"], detect_gpu=machine_gpu)
    assert given == ("8.9", "12.0")
    assert check_gpus(TENSORRT_RTX, [], "fp8", detect_gpu=machine_gpu) == ("8.9", "12.0", "12.1")
    assert check_gpus(TENSORRT, [], detect_gpu=lambda: "9.0") == ("9.0",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_tensorrt_without_a_gpu_says_what_can_be_built() -> None:
    with pytest.raises(
        BuildError, match=r"target: tensorrt builds for the GPU .* finds none; .*tensorrt-rtx"
    ):
        check_gpus(TENSORRT, [], detect_gpu=machine_gpu)


class _Int4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = quantize_int4(torch.ones(32, 64), 32, symmetric=True)
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)

    def forward(self, x: Tensor, options: dict[str, Tensor]) -> Tensor:
        out: Tensor = int4_linear(x, self.qweight, self.scales, None, 32, **options)
        return out


class _Fp8(nn.Module):
    def forward(self, x: Tensor, options: dict[str, Tensor]) -> Tensor:
        weight = torch.ones(32, 64).to(torch.float8_e4m3fn)
        out: Tensor = fp8_linear(x, weight, torch.ones(1), **{"input_scale": None, **options})
        return out


class _Model(nn.Module):
    """`proj` is a linear layer with tensors that TensorRT's plugins do not take."""

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor, options: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.proj(x, options)
        return out


@pytest.mark.parametrize(
    ("proj", "argument", "size"), [(_Int4, "bias", 32), (_Fp8, "bias", 32), (_Fp8, "input_scale", 1)]
)
def test_tensors_that_the_plugins_do_not_take_are_refused_with_their_layer(
    proj: type[nn.Module], argument: str, size: int, tmp_path: Path
) -> None:
    program = torch.export.export(_Model(proj()), (torch.ones(2, 64), {argument: torch.ones(size)}))
    with pytest.raises(
        BuildError, match=rf"proj: TensorRT's plugin for .*_linear does not take {argument}: use "
    ):
        write_onnx(program, tmp_path)
    assert not list(tmp_path.iterdir())
