"""A bundle of a TensorRT target whose plan only the fake can run, and an executor on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pelton.compile.bundle import (
    FORMAT_VERSION,
    HostNeeds,
    Limits,
    Manifest,
    ModelFacts,
    Versions,
    record_files,
    write_manifest,
)
from pelton.compile.profiles import derive_profiles
from pelton.runtime.executor_trt import TensorRTExecutor
from pelton.runtime.inputs import StepInputs
from pelton.runtime.trt_facts import ENGINE_FILE, PLAN_FILE, EngineFacts

from .fake_cuda import FakeDevice
from .fake_tensorrt import PLAN, FakeTensorRT

VOCAB_SIZE = 997
COMMAND = "pelton build some/model --target tensorrt-rtx -o some-model"
KV_HEADS, HEAD_DIMS = (2, 1), (4, 8)
_ITEM_SIZE = 2  # float16


@dataclass(frozen=True)
class _Geometry:
    num_heads: int
    head_dim: int


def limits(num_blocks: int = 32, **changes: int) -> Limits:
    """A small engine: block 4, 4 sequences and 16 tokens a step, `num_blocks` pages."""
    sizes = {"max_model_len": 64, "max_batch_size": 4, "max_step_tokens": 16, "block_size": 4, **changes}
    heads = zip(KV_HEADS, HEAD_DIMS, strict=True)
    block_bytes = 2 * _ITEM_SIZE * sizes["block_size"] * sum(h * d for h, d in heads)
    return Limits(**{"kv_cache_bytes": num_blocks * block_bytes, **sizes})


def engine_json(built: Limits, **changes: Any) -> dict[str, Any]:
    geometry = [_Geometry(h, d) for h, d in zip(KV_HEADS, HEAD_DIMS, strict=True)]
    return {
        "target": "tensorrt-rtx",
        "dtype": "float16",
        "cache_dtype": "float16",
        "block_size": built.block_size,
        "kv_heads": list(KV_HEADS),
        "head_dims": list(HEAD_DIMS),
        "vocab_size": VOCAB_SIZE,
        "plugins": ["paged_attention"],
        "profiles": [profile.to_json() for profile in derive_profiles(built, geometry, 32)],
        "layers": [["model.layers.0.self_attn/paged_attention", "pelton::paged_attention", "half"]],
        **changes,
    }


def write_bundle(directory: Path, built: Limits, **changes: Any) -> Manifest:
    """Write `engine.json`, with `changes`, and `engine.plan` below a manifest; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ENGINE_FILE).write_text(json.dumps(engine_json(built, **changes)))
    (directory / PLAN_FILE).write_bytes(PLAN)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        target="tensorrt-rtx",
        dtype="float16",
        versions=Versions(
            pelton="0.1.0", torch="2.13.0", transformers="5.24.0", compiler="tensorrt-rtx 1.7.1"
        ),
        needs=HostNeeds(machine="x86_64", cpu_flags=()),
        limits=built,
        model=ModelFacts(
            source="some/model",
            model_type="llama",
            num_parameters=1000,
            num_layers=len(KV_HEADS),
            num_attention_heads=4,
            num_kv_heads=2,
            head_dim=4,
            hidden_size=64,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=512,
        ),
        engine={},
        quality={},
        checkpoint_hash="0" * 64,
        content_key="1" * 64,
        build_command=COMMAND,
        files=record_files(directory),
    )
    write_manifest(manifest, directory)
    return manifest


def read_facts(directory: Path) -> EngineFacts:
    return EngineFacts.read(directory, "rebuild it")


@dataclass
class Fakes:
    """An executor with the fakes that it runs on."""

    executor: TensorRTExecutor
    trt: FakeTensorRT
    device: FakeDevice

    def logits(self, inputs: StepInputs) -> np.ndarray:
        """The logits of a step, once they are there."""
        output = self.executor.execute(inputs)
        self.device.synchronize()
        return np.array(output.logits)


def open_fake(
    directory: Path,
    built: Limits | None = None,
    *,
    executor_class: type[TensorRTExecutor] = TensorRTExecutor,
    is_rtx: bool = True,
    device: FakeDevice | None = None,
    manifest_limits: Limits | None = None,
    cache_dtype: str = "float16",
    **options: Any,
) -> Fakes:
    """Write a bundle for `built` and run it on fakes; `manifest_limits` are what its manifest says instead."""
    built = built or limits()
    manifest = write_bundle(directory, built, cache_dtype=cache_dtype)
    if manifest_limits is not None:
        manifest = replace(manifest, limits=manifest_limits)
    facts = read_facts(directory)
    device = device or FakeDevice()
    trt = FakeTensorRT(device, facts, is_rtx=is_rtx)
    executor = executor_class(directory, manifest, facts, trt=trt, device=device, **options)
    return Fakes(executor, trt, device)
