"""What goes wrong with the TensorRT targets is one line: the layer or field, the cause, the remedy; exit code 2."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest
import torch
from click.testing import Result
from conftest import pelton, pelton_here

from pelton.compile.bundle import read_manifest, record_files, write_manifest
from pelton.compile.onnx_graph import GRAPH_FILE, write_onnx
from pelton.compile.targets import tensorrt_target
from pelton.plugins_trt.tensorrt import TENSORRT, TENSORRT_RTX, find_version
from support.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.skipif(find_version(TENSORRT_RTX) is None, reason="TensorRT-RTX is not installed")
RTX = ("--target", "tensorrt-rtx", "--kv-cache-memory", "4MiB")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "bundle"
    built = pelton_here("build", checkpoint, *RTX, "--gpu", "8.9", "-o", path)
    assert built.exit_code == 0, built.stderr
    return path


def refusal(done: Result | subprocess.CompletedProcess[str]) -> str:
    """The one line that a command ended with."""
    status = done.exit_code if isinstance(done, Result) else done.returncode
    assert status == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("pelton: ")]
    assert lines == done.stderr.splitlines()[-1:]
    return lines[0]


@pytest.mark.skipif(find_version(TENSORRT) is not None, reason="TensorRT is installed")
def test_tensorrt_that_is_not_installed_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    said = refusal(pelton("build", checkpoint, "--target", "tensorrt", "-o", tmp_path / "out"))
    assert said == (
        "pelton: target: TensorRT is not installed: `pip install tensorrt` on a machine with an NVIDIA GPU; "
        "`--target tensorrt-rtx` can be built on this one"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "8.6", "--quantize", "fp8"], "gpu: 8.6 cannot run --quantize fp8: FP8 needs tensor cores"),
        (["--gpu", "9.0"], "gpu: '9.0' is not a compute capability that TensorRT-RTX builds for; choose among 8.0,"),
        (["--gpu", "7.5"], "gpu: 7.5 is too old for Pelton's kernels, which need 8.0 or later"),
        (["--dtype", "float32"], "dtype: float32 is not supported on tensorrt-rtx; choose float16 or bfloat16"),
        (["--kv-cache-memory", "900GiB"], "kv_cache_bytes: 117964800 blocks are more than the 2097151 that one"),
        (["--max-batch-size", "600"], "max_step_tokens: 512 is below max_batch_size 600"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_built_name_the_option(
    options: list[str], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    done = pelton_here("build", checkpoint, *RTX, "-o", tmp_path / "out", *options)
    assert refusal(done).startswith(f"pelton: {message}")
    assert "load weights" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("bloom", {}, "0 of 2 layers call the attention interface"),
        ("falcon", {"head_dim": None, "num_key_value_heads": None}, "0 of 2 layers call the attention interface"),
        # GPT-2 has as many KV heads as heads, whatever else its config says.
        ("gpt2", {}, "layer 0 of GPT2Attention has 4 KV heads with keys of 16 elements, but its config says 2 heads"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "LlamaForCausalLM cannot be exported",
        ),
        ("llama", {"head_dim": 72}, "layer 0: attention on a GPU of compute capability 8.9: heads must have"),
        ("llama", {"head_dim": 512}, "at most 256, not 512; use --target cpu"),
        ("llama", {"hidden_act": "mish"}, "model.layers.0.mlp.act_fn/Mish: TensorRT has this operator in float16 and"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_lowered_are_refused_with_the_reason(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16, **overrides)
    done = pelton_here("build", model, *RTX, "--gpu", "8.9", "-o", tmp_path / "out")
    assert message in refusal(done)
    assert not (tmp_path / "out").exists()


def unknown_operator(directory: Path) -> None:
    model = onnx.load(directory / GRAPH_FILE, load_external_data=False)
    next(n for n in model.graph.node if n.name == "model.layers.1.mlp.up_proj/MatMul").op_type = "Frobnicate"
    onnx.save(model, directory / GRAPH_FILE)


def unknown_plugin(directory: Path) -> None:
    model = onnx.load(directory / GRAPH_FILE, load_external_data=False)
    next(n for n in model.graph.node if n.op_type == "paged_attention").op_type = "tree_attention"
    onnx.save(model, directory / GRAPH_FILE)


def cut_graph(directory: Path) -> None:
    os.truncate(directory / GRAPH_FILE, 5000)


def lost_weights(directory: Path) -> None:
    os.truncate(directory / "model.onnx.data", 5000)


@pytest.mark.parametrize(
    ("damage", "layer", "cause", "remedy"),
    [
        (unknown_operator, "model.layers.1.mlp.up_proj/MatMul: ", "neither TensorRT's nor one", "--target cpu"),
        (unknown_plugin, "model.layers.0.self_attn/paged_attention: ", "neither TensorRT's nor one", "--target cpu"),
        (cut_graph, "", "the ONNX file is cut or damaged", "build again"),
        (lost_weights, "", "the ONNX file is cut or damaged", "build again"),
    ],
)  # fmt: skip
def test_graphs_that_tensorrt_does_not_take_are_explained(
    damage: Callable[[Path], None],
    layer: str,
    cause: str,
    remedy: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph is damaged between the converter and TensorRT."""

    def write(program: Any, directory: Path) -> Path:
        path = write_onnx(program, directory)
        damage(directory)
        return path

    monkeypatch.setattr(tensorrt_target, "write_onnx", write)
    said = refusal(pelton_here("build", checkpoint, *RTX, "--gpu", "8.9", "-o", tmp_path / "out"))
    assert said.startswith(f"pelton: {layer}")
    assert cause in said
    assert remedy in said
    assert list(tmp_path.iterdir()) == []


def edited(bundle: Path, copy: Path, **changes: Any) -> Path:
    """A bundle that was built so: `engine.json` with `changes`."""
    shutil.copytree(bundle, copy)
    file = copy / "engine.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    write_manifest(replace(read_manifest(copy), files=record_files(copy)), copy)
    return copy


def test_a_plan_of_another_version_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    manifest = read_manifest(copy)
    old = replace(manifest, versions=replace(manifest.versions, compiler="tensorrt-rtx 1.0.0"))
    write_manifest(old, copy)
    for command in (("generate", copy, "hello"), ("serve", copy, "--port", "0")):
        said = refusal(pelton_here(*command))
        assert said.startswith(f"pelton: {copy}: built with/for tensorrt-rtx 1.0.0")
        assert f"found tensorrt-rtx {find_version(TENSORRT_RTX)}" in said
        assert "rebuild with: pelton build " in said


def test_a_plan_for_another_gpu_is_refused(bundle: Path, tmp_path: Path) -> None:
    said = refusal(pelton_here("generate", edited(bundle, tmp_path / "copy", gpus=["1.0", "1.1"]), "hello"))
    assert "built with/for an NVIDIA GPU of compute capability 1.0 or 1.1, found " in said
    assert "rebuild" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_bundle_that_needs_a_gpu_says_so_where_there_is_none(bundle: Path) -> None:
    for command in (("generate", bundle, "hello"), ("serve", bundle, "--port", "0")):
        said = refusal(pelton_here(*command))
        assert "an NVIDIA GPU of compute capability 8.9, found no CUDA device" in said
        assert "--target cpu" in said


def test_a_cut_plan_and_a_damaged_engine_json_are_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    size = (copy / "engine.plan").stat().st_size
    os.truncate(copy / "engine.plan", 1000)
    said = refusal(pelton_here("generate", copy, "hello"))
    assert f"engine.plan has 1000 bytes instead of {size}; rebuild with: pelton build" in said
    shutil.copyfile(bundle / "engine.plan", copy / "engine.plan")
    facts = edited(copy, tmp_path / "other", profiles=[])
    said = refusal(pelton_here("generate", facts, "hello"))
    assert f"{facts / 'engine.json'}: profiles: there is none; rebuild with" in said


def test_tr_04_a_build_that_needs_more_than_the_machine_has_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = psutil.virtual_memory()._replace(total=512 << 20, available=256 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    done = pelton_here("build", checkpoint, *RTX, "-o", tmp_path / "out")
    said = refusal(done)
    assert said.startswith(
        "pelton: host memory: the build needs up to 1.0 GiB and this machine has 512 MiB; "
    )
    assert "load weights" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))

    out = tmp_path / "out"
    command = [sys.executable, "-m", "pelton.scripts.cli", "build", str(checkpoint), *RTX, "-o", str(out)]
    said = refusal(subprocess.run(command, text=True, capture_output=True, preexec_fn=limit_files))
    assert said.startswith(f"pelton: {out}: what the build writes does not fit on the disk")
    assert said.endswith("free some, or choose another --output")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["convert to ONNX ...", "build with tensorrt-rtx ..."])
def test_ctrl_c_stops_a_build_and_leaves_nothing(moment: str, checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pelton.scripts.cli", "build", str(checkpoint), *RTX]
    command += ["-o", str(tmp_path / "out")]
    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert any(line.strip() == moment for line in process.stderr)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert rest.splitlines()[-1] == "pelton: interrupted"
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
