"""`pelton build --target tensorrt-rtx` makes bundles on a machine with no GPU, Pelton's plugins inside."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import pelton, pelton_here

from pelton.plugins_trt.tensorrt import TENSORRT_RTX, find_version
from support.checkpoints import FAMILIES, tiny_checkpoint

pytestmark = pytest.mark.skipif(find_version(TENSORRT_RTX) is None, reason="TensorRT-RTX is not installed")
RTX = ("--target", "tensorrt-rtx")
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def num_bytes(pattern: str, text: str) -> float:
    """The size that stands in `text` where `pattern` has `%`."""
    found = re.search(re.escape(pattern).replace("%", r"([\d.]+) (MiB|GiB)"), text)
    assert found is not None, text
    return float(found[1]) * _UNITS[found[2]]


def layers(bundle: Path) -> list[tuple[str, str, str]]:
    """(kind, precision, name) of each layer, as `pelton inspect --layers` lists them."""
    shown = pelton_here("inspect", bundle, "--layers")
    assert shown.exit_code == 0, shown.stderr
    rows = shown.stdout.split("build again", 1)[1].splitlines()[1:]
    return [(kind, precision, name) for kind, precision, name in (row.split(maxsplit=2) for row in rows)]


def attention_names(bundle: Path) -> list[str]:
    return [name for kind, _, name in layers(bundle) if kind == "pelton::paged_attention"]


@pytest.fixture(scope="module")
def smollm2(
    tmp_path_factory: pytest.TempPathFactory, smollm2_gguf_path: Path
) -> tuple[Path, subprocess.CompletedProcess[str], float]:
    """The bundle of SmolLM2, the build's process, and the CPU seconds that it took."""
    bundle = tmp_path_factory.mktemp("smollm2") / "bundle"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = pelton("build", smollm2_gguf_path, *RTX, "-o", bundle)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return bundle, done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_smollm2_is_built_whole_in_minutes(
    smollm2: tuple[Path, subprocess.CompletedProcess[str], float],
) -> None:
    bundle, done, cpu_seconds = smollm2
    assert done.returncode == 0, done.stderr
    assert cpu_seconds < 300
    assert attention_names(bundle) == [f"model.layers.{i}.self_attn/paged_attention" for i in range(30)]


def memory_of(build: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    """Bytes that a build announced before it loaded anything, and those that it had at its peak."""
    assert build.returncode == 0, build.stderr
    announced = num_bytes("the build needs up to % of host memory", build.stderr)
    assert build.stderr.index("the build needs up to") < build.stderr.index("load weights")
    return announced, num_bytes("peak memory %", build.stderr[build.stderr.rindex("total:") :])


def test_tr_04_a_build_stays_below_the_memory_that_it_announced(
    smollm2: tuple[Path, subprocess.CompletedProcess[str], float],
) -> None:
    announced, peak = memory_of(smollm2[1])
    assert announced / 3 < peak < announced


@pytest.mark.skipif(not os.environ.get("PELTON_FULL_TESTS"), reason="builds a model of 0.5B for minutes")
def test_tr_04_the_memory_of_a_build_of_half_a_billion_parameters(tmp_path: Path) -> None:
    """Sizes of Qwen2-0.5B: 0.9 GiB of weights, of which 0.25 are the embedding that its head is tied to."""
    checkpoint = tiny_checkpoint(
        "qwen2", tmp_path / "checkpoint", dtype=torch.bfloat16, vocab_size=151936, hidden_size=896,
        intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, head_dim=64,
        tie_word_embeddings=True, max_position_embeddings=32768,
    )  # fmt: skip
    weights = (checkpoint / "model.safetensors").stat().st_size
    announced, peak = memory_of(pelton("build", checkpoint, *RTX, "-o", tmp_path / "bundle"))
    assert announced / 3 < peak < announced
    assert peak < 6 * weights


def test_an_unchanged_build_is_found_and_a_changed_limit_is_not(
    smollm2: tuple[Path, subprocess.CompletedProcess[str], float], smollm2_gguf_path: Path
) -> None:
    bundle, _, _ = smollm2
    again = pelton_here("build", smollm2_gguf_path, *RTX, "-o", bundle)
    assert again.exit_code == 0, again.stderr
    assert "unchanged" in again.stdout
    assert "load weights" not in again.stderr
    key = json.loads((bundle / "manifest.json").read_text())["content_key"][:12]
    same = pelton_here("build", smollm2_gguf_path, *RTX, "-o", bundle, "--dry-run")
    changed = pelton_here(
        "build", smollm2_gguf_path, *RTX, "-o", bundle, "--max-batch-size", "32", "--dry-run"
    )
    assert key in same.stdout
    assert changed.exit_code == 0
    assert key not in changed.stdout


def build_twice(checkpoint: Path, bundle: Path, *options: str) -> None:
    command = ("build", checkpoint, *RTX, "--gpu", "8.9", "--kv-cache-memory", "4MiB", "-o", bundle, *options)
    first = pelton_here(*command)
    assert first.exit_code == 0, first.stderr
    assert "unchanged" not in first.stdout
    again = pelton_here(*command)
    assert again.exit_code == 0, again.stderr
    assert "unchanged" in again.stdout


@pytest.mark.parametrize("family", [*FAMILIES, "phi3", "gpt_neox", "opt", "mixtral"])
def test_every_family_becomes_a_bundle_with_one_plugin_a_layer(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "checkpoint", dtype=torch.float16)
    build_twice(checkpoint, tmp_path / "bundle")
    names = attention_names(tmp_path / "bundle")
    assert [name.split("layers.")[1][0] for name in names] == ["0", "1"]
    assert (tmp_path / "bundle" / "engine.plan").stat().st_size > 10_000


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_quantised_layers_are_plugins(scheme: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "checkpoint", dtype=torch.bfloat16)
    build_twice(checkpoint, tmp_path / "bundle", "--quantize", scheme)
    assert len(attention_names(tmp_path / "bundle")) == 2
    built = layers(tmp_path / "bundle")
    names = [name for kind, _, name in built if kind == f"pelton::{scheme}_linear"]
    # Q, K and V are one, and so are gate and up.
    assert len(names) == 2 * 4
    assert "model.layers.1.mlp.down_proj/" in names[-1]
    # Asymmetric weights have zero points.
    zeros = [name for kind, _, name in built if kind == "constant" and name.endswith("down_proj.zeros")]
    assert len(zeros) == (2 if scheme == "int4" else 0)
