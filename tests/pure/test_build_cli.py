"""`pelton build`: what the build decides from its words alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pelton.compile.build_plan import BuildPlan, BuildRequest, default_output
from pelton.compile.bundle import Limits
from pelton.compile.targets.cpu_target import CpuTarget

LIMITS = Limits(
    max_model_len=100, max_batch_size=8, max_step_tokens=64, block_size=16, kv_cache_bytes=1 << 20
)


@pytest.mark.parametrize(
    ("model", "name"), [("org/Name", "Name"), ("x/m.Q8_0.gguf", "m.Q8_0"), (".", "here"), ("..", "above")]
)
def test_the_default_output_has_a_name(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "above" / "here"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    assert default_output(model, "cpu", "bfloat16") == Path("artifacts") / f"{name}-bfloat16"


def test_the_default_output_of_another_target_says_so() -> None:
    assert default_output("org/Name", "tensorrt-rtx", "int4") == Path("artifacts/Name-tensorrt-rtx-int4")


def command_of(model: str) -> str:
    facts: Any = SimpleNamespace(
        drafter=None,
        request=BuildRequest(model),
        dtype="float32",
        limits=LIMITS,
        target=CpuTarget(),
        quantization=None,
    )
    getter = BuildPlan.command.fget
    assert getter is not None
    command: str = getter(facts)
    return command


def test_the_command_of_a_bundle_builds_it_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    assert command_of("my model").startswith(f"pelton build '{tmp_path}/my model' --target cpu")
    assert command_of("org/name").startswith("pelton build org/name --target cpu")
    assert " -o " not in command_of("org/name")
