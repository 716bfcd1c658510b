"""`--frontend torch-tensorrt`, as far as a stand-in with torch-tensorrt's signatures shows it. It has run on no GPU."""

from __future__ import annotations

import builtins
import importlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from pelton.compile.build_plan import BuildRequest, resolve
from pelton.compile.bundle import Limits
from pelton.compile.checkpoint import load_model, open_checkpoint
from pelton.compile.export import export, kv_geometry
from pelton.compile.profiles import Profile, ShapeRange, derive_profiles
from pelton.compile.targets.tensorrt import PLAN_FILE, NetworkLayer, TensorRTOptions
from pelton.compile.targets.torch_tensorrt import build_plan, require_torch_tensorrt
from pelton.errors import BuildError
from pelton.plugins_trt import fp8_linear, int4_linear, moe_experts
from pelton.runtime.trt_facts import LOGITS, STEP_INPUTS
from support import fake_torch_tensorrt as fake
from support.checkpoints import tiny_checkpoint

assert fp8_linear.NAME  # importing them registers the operators
assert int4_linear.NAME
assert moe_experts.NAME
LIMITS = Limits(
    max_model_len=512, max_batch_size=8, max_step_tokens=64, block_size=32, kv_cache_bytes=1 << 24
)

Exported = tuple[Any, tuple[Profile, ...]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    directory = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), dtype=torch.float16)
    model = load_model(open_checkpoint(str(directory)), torch.float16)
    return export(model, block_size=32), derive_profiles(LIMITS, kv_geometry(model.config), 100)


def build(exported: Exported, directory: Path, **options: Any) -> Any:
    program, profiles = exported
    return build_plan(program, profiles, TensorRTOptions(workspace_bytes=123), directory, **options)


@dataclass(frozen=True)
class Built:
    interpreter: fake.TRTInterpreter
    layers: tuple[NetworkLayer, ...]
    lines: list[str]
    directory: Path


@pytest.fixture(scope="module")
def built(llama: Exported, tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory, lines = tmp_path_factory.mktemp("built"), []
    (directory / "timing").write_bytes(b"measured")
    with pytest.MonkeyPatch.context() as patch:
        _, made = fake.install(patch)
        layers = build(llama, directory, timing_cache=directory / "timing", on_progress=lines.append)
        (interpreter,) = made
    return Built(interpreter, layers, lines, directory)


def test_the_network_is_the_one_that_executors_know(built: Built) -> None:
    network = built.interpreter.ctx.net
    caches = [f"{kind}_caches_{i}" for kind in "kv" for i in range(2)]
    assert {tensor.name for tensor in network.inputs} == {*STEP_INPUTS, *caches}
    assert [tensor.name for tensor in network.outputs] == [LOGITS, *(f"{name}_out" for name in caches)]


def test_layers_carry_the_names_of_the_hf_modules(built: Built) -> None:
    by_name = {layer.name: layer.kind for layer in built.layers}
    assert [name for name, kind in by_name.items() if kind == "pelton::paged_attention"] == [
        "model.layers.0.self_attn/paged_attention", "model.layers.1.self_attn/paged_attention"
    ]  # fmt: skip
    assert by_name["model.layers.1.mlp.down_proj/matrix_multiply"] == "matrix_multiply"
    assert by_name["lm_head/matrix_multiply"] == "matrix_multiply"
    assert len(by_name) == len(built.layers), "names are not unique"


def test_options_cache_and_progress_are_those_of_the_other_way(built: Built) -> None:
    config = built.interpreter.builder.config
    assert config.preview == {"aliased": True}
    assert config.workspace_bytes == 123
    assert (built.directory / PLAN_FILE).read_bytes() == fake.PLAN
    assert (built.directory / "timing").read_bytes() == b"measured+"
    assert built.lines == ["Building engine (1 of 2)", "Building engine (2 of 2)"]


@pytest.mark.parametrize("timings", [fake.DAMAGED_TIMINGS, fake.OTHER_TIMINGS])
def test_timings_that_tensorrt_refuses_are_replaced(
    timings: bytes, llama: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = fake.install(monkeypatch)
    (tmp_path / "timing").write_bytes(timings)
    build(llama, tmp_path, timing_cache=tmp_path / "timing")
    assert made[0].builder.config.cached is not None, "the builder keeps what it measures"
    assert (tmp_path / "timing").read_bytes() == b"+"


def test_both_profiles_are_built_and_inputs_span_them(built: Built) -> None:
    decode, mixed = (profile.shapes for profile in built.interpreter.builder.config.profiles)
    assert decode["input_ids"] == ((1, 1), (1, 4), (1, 8))
    assert mixed["input_ids"] == ((1, 1), (1, 64), (1, 64))
    specs = {spec.name: spec for spec in built.interpreter.specs}
    assert list(specs) == [tensor.name for tensor in built.interpreter.ctx.net.inputs]
    assert (specs["input_ids"].min_shape, specs["input_ids"].max_shape) == ((1, 1), (1, 64))
    assert specs["input_ids"].dtype == torch.int64
    assert specs["k_caches_1"].dtype == torch.float16
    assert built.interpreter.output_dtypes == [torch.float32, *[torch.float16] * 4]
    assert built.interpreter.settings.assume_dynamic_shape_support


def test_a_plugin_gets_its_tensors_in_order_and_its_fields(built: Built) -> None:
    first = next(layer for layer in built.interpreter.ctx.net.layers if layer.plugin is not None)
    assert [tensor.name for tensor in first.inputs[3:]] == [
        "k_caches_0", "v_caches_0", "block_table", "seq_lens", "query_start_loc"
    ]  # fmt: skip
    assert first.plugin.fields == {
        "scale": 0.25, "window": 0, "soft_cap": 0.0, "k_scale": 1.0, "v_scale": 1.0,
        "has_sinks": 0, "has_alibi_slopes": 0,
    }  # fmt: skip
    assert first.plugin.is_build


class Linear(torch.nn.Module):
    def __init__(self, call: Any, **weights: torch.Tensor) -> None:
        super().__init__()
        self.call = call
        for name, weight in weights.items():
            self.register_buffer(name, weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.call(x, *self.buffers()),)


def quantised(call: Any, **weights: torch.Tensor) -> Exported:
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    x = torch.ones(5, 64).half()
    program = torch.export.export(Linear(call, **weights), (x,), dynamic_shapes=dynamic)
    return program, (Profile("decode", "", {"x": ShapeRange("x", (1, 64), (4, 64), (8, 64))}),)


INT4 = {"qweight": torch.zeros(2, 32, 16, dtype=torch.int8), "scales": torch.ones(2, 32).half()}
FP8 = {"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn), "scale": torch.ones(32)}


@pytest.mark.parametrize(
    ("call", "weights", "tensors", "fields"),
    [
        (
            lambda x, q, s: torch.ops.pelton.int4_linear(x, q, s, None, 32),
            INT4, ["qweight", "scales"], {"group_size": 32},
        ),
        (
            lambda x, q, s, z: torch.ops.pelton.int4_linear(x, q, s, z, 32),
            {**INT4, "zeros": torch.zeros(2, 32, dtype=torch.int8)}, ["qweight", "scales", "zeros"], {"group_size": 32},
        ),
        (
            lambda x, q, s, p: torch.ops.pelton.int4_linear(x, q, s, None, 32, None, p),
            {**INT4, "perm": torch.arange(64).int()}, ["qweight", "scales", "perm"], {"group_size": 32},
        ),
        (
            lambda x, w, s: torch.ops.pelton.fp8_linear(x, w, s, None),
            FP8, ["weight", "weight_scale"], {},
        ),
    ],
    ids=["int4", "int4 with zeros", "int4 in act-order", "fp8"],
)  # fmt: skip
def test_quantised_linears_become_plugins_with_constants(
    call: Any, weights: dict[str, torch.Tensor], tensors: list[str], fields: dict[str, int],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _, made = fake.install(monkeypatch)
    build(quantised(call, **weights), tmp_path)
    (layer,) = [layer for layer in made[0].ctx.net.layers if layer.plugin is not None]
    assert layer.inputs[0].name == "x"
    assert [tensor.name.rpartition(".")[2].removesuffix(":0") for tensor in layer.inputs[1:]] == tensors
    assert layer.plugin.fields == fields


def test_experts_become_a_plugin_with_their_activation_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = fake.install(monkeypatch)
    stacks = {"gate_up": torch.zeros(4, 48, 64).half(), "down": torch.zeros(4, 64, 24).half()}

    def call(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        routes = x[:, :2]
        return torch.ops.pelton.moe_experts(x, routes.float(), routes.int(), gate_up, down, "gelu_tanh")

    build(quantised(call, **stacks), tmp_path)
    (layer,) = [layer for layer in made[0].ctx.net.layers if layer.plugin is not None]
    assert len(layer.inputs) == 5
    names = [tensor.name.rpartition(".")[2].removesuffix(":0") for tensor in layer.inputs[3:]]
    assert names == list(stacks)
    assert layer.plugin.fields == {"activation": 2, "group_size": -1}


def test_an_argument_that_the_plugin_has_no_place_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.install(monkeypatch)
    weights = {**FP8, "input_scale": torch.ones(1)}
    exported = quantised(lambda x, w, s, i: torch.ops.pelton.fp8_linear(x, w, s, i), **weights)
    with pytest.raises(BuildError) as caught:
        build(exported, tmp_path)
    assert str(caught.value) == (
        "fp8_linear: Pelton's plugin does not take input_scale; leave --frontend out"
    )


def test_an_operator_without_converter_is_refused_with_its_layer(
    llama: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, made = fake.install(monkeypatch)
    registry.unknown.add(torch.ops.aten.silu.default)
    with pytest.raises(
        BuildError, match=r"^model\.layers\.0\.mlp\.act_fn/silu: .* no converter for aten\.silu"
    ):
        build(llama, tmp_path)
    assert not made


def test_what_tensorrt_says_is_diagnosed_and_does_not_reach_the_terminal(
    llama: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake.install(monkeypatch)
    refusal = "Could not find any implementation for node {ForeignNode[model.layers.0.mlp.up_proj/matrix_multiply]}."
    monkeypatch.setattr(fake.Builder, "refusal", refusal)
    with pytest.raises(
        BuildError, match=r"^model\.layers\.0\.mlp\.up_proj/matrix_multiply: TensorRT has no kernel"
    ):
        build(llama, tmp_path)
    assert [record for record in caplog.records if record.name.startswith("torch_tensorrt")] == []


def test_a_converter_that_fails_is_named_with_its_layer(
    llama: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, _ = fake.install(monkeypatch)

    def fail(*arguments: Any) -> None:
        raise AssertionError("boom\nand more")

    registry.own[torch.ops.aten.silu.default] = [fail]
    with pytest.raises(BuildError) as caught:
        build(llama, tmp_path)
    assert str(caught.value) == (
        "model.layers.0.mlp.act_fn/silu: torch-tensorrt cannot convert it: boom; leave --frontend out"
    )


def test_a_torch_tensorrt_that_does_not_load_is_one_line(
    llama: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises `AttributeError` and bare `Exception` too."""
    fake.install(monkeypatch)

    def fail(name: str) -> None:
        raise builtins.Exception("import error when try to import _TensorRTProxyModule\nlibnvinfer.so.11")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(
        BuildError, match=r"frontend: torch-tensorrt is installed but cannot be loaded: import error"
    ):
        build(llama, tmp_path)


def test_torch_tensorrt_that_is_not_there_or_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BuildError, match=r"frontend: torch-tensorrt is not installed: `pip install .*==2\.13"
    ):
        require_torch_tensorrt()
    fake.pretend_installed(monkeypatch, "2.12.1")
    with pytest.raises(BuildError, match=r"torch-tensorrt 2\.12\.1 is installed, 2\.13 is needed"):
        require_torch_tensorrt()
    fake.pretend_installed(monkeypatch, "2.13.0")
    assert require_torch_tensorrt() == "2.13.0"
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BuildError, match=r"needs a torch built for CUDA, and this one is"):
        require_torch_tensorrt()


@pytest.mark.parametrize(
    ("target", "frontend", "message"),
    [
        ("cpu", "onnx", "frontend: only --target tensorrt has a choice .* cpu has not"),
        (
            "tensorrt-rtx",
            "torch-tensorrt",
            "frontend: only --target tensorrt has a choice .* tensorrt-rtx has not",
        ),
        ("tensorrt", "tvm", "frontend: 'tvm' is unknown; choose one of onnx, torch-tensorrt"),
        ("tensorrt", "torch-tensorrt", "frontend: torch-tensorrt is not installed"),
    ],
)
def test_where_the_frontend_is_refused(target: str, frontend: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        resolve(BuildRequest("nowhere", target=target, frontend=frontend))


def test_the_frontend_is_part_of_the_key_and_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    fake.pretend_installed(monkeypatch, "2.13.0")
    for module in ("build_plan", "targets.tensorrt_target"):
        monkeypatch.setattr(f"pelton.compile.{module}.require_version", lambda target: "11.0.0")
    monkeypatch.setattr("pelton.compile.targets.tensorrt.machine_gpu", lambda: "9.0")
    checkpoint = str(tiny_checkpoint("llama", tmp_path, dtype=torch.float16))
    theirs, ours, default = (
        resolve(BuildRequest(checkpoint, target="tensorrt", frontend=frontend))
        for frontend in ("torch-tensorrt", "onnx", None)
    )
    assert theirs.target.options()["frontend"] == "torch-tensorrt 2.13.0"
    assert theirs.versions == ours.versions, (
        "the executor compares the compiler with the TensorRT that it finds"
    )
    assert " --frontend torch-tensorrt" in theirs.command
    assert "--frontend" not in ours.command
    assert theirs.content_key != ours.content_key == default.content_key


def test_the_gpu_and_what_makes_the_graph_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    for module in ("build_plan", "targets.tensorrt_target"):
        monkeypatch.setattr(f"pelton.compile.{module}.require_version", lambda target: "11.0.0")
    request = BuildRequest(str(tiny_checkpoint("llama", tmp_path, dtype=torch.float16)), target="tensorrt")
    plans = {}
    for gpu in ("8.0", "9.0"):
        monkeypatch.setattr("pelton.compile.targets.tensorrt.machine_gpu", lambda gpu=gpu: gpu)
        plans[gpu] = resolve(request)
        assert plans[gpu].target.options()["gpus"] == [gpu]
        assert "--gpu" not in plans[gpu].command, "there is no choice"
    assert plans["8.0"].content_key != plans["9.0"].content_key
    assert plans["8.0"].target._timing_cache() != plans["9.0"].target._timing_cache()
    assert resolve(request).content_key == plans["9.0"].content_key
    found = metadata.version
    for package in ("onnx", "onnxscript", "triton"):
        assert plans["9.0"].target.options()["packages"][package] == found(package)
        with monkeypatch.context() as patch:
            patch.setattr(metadata, "version", lambda name, p=package: "0.1" if name == p else found(name))
            assert resolve(request).content_key != plans["9.0"].content_key, package
