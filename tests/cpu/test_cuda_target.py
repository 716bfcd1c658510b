"""The `cuda` target on CPU tensors: pieces compiled ahead of time, attention between them, the executor around them.

Everything but device code runs here: what a GPU alone can run stands in `runtime/torch_device.py`.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import pelton
from safetensors.torch import load_file

from pelton import LLM, SamplingParams
from pelton.compile.build_plan import BuildRequest, default_output, resolve
from pelton.compile.bundle import HostFacts, read_manifest
from pelton.compile.checkpoint import load_model, open_checkpoint
from pelton.compile.proof import FlatStep, StepResult, compare, record
from pelton.compile.targets.cuda_target import unsupported_reason
from pelton.errors import BuildError, BundleError, ConfigError, EngineError
from pelton.plugins_trt.cuda_engine import CudaProgram
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor_cuda import CudaExecutor
from pelton.runtime.inputs import StepInputs
from pelton.runtime.outputs import TokenEvent
from pelton.runtime.request import Request
from pelton.runtime.sampler_device import DeviceSampler
from pelton.runtime.sequence import Sequence
from pelton.runtime.tokenizer import Tokenizer
from pelton.scripts import inspect
from support.checkpoints import tiny_checkpoint
from support.cuda_bundle import BLOCK, HostDevice, HostTarget, build_on_host, open_on_host
from support.sampling import sample_each
from support.trt_steps import step as flat_step

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
# Built in float32, so that results can be compared with the model's; a GPU would have 16 bits.
BUNDLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}, {"dtype": "float32"}),
    "gemma2": ("gemma2", {}, {"dtype": "float32"}),
}
NUM_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tiny_checkpoint(family, tmp_path_factory.mktemp(name), **options)
        for name, (family, options, _) in BUNDLES.items()
    }


@pytest.fixture(scope="module")
def cuda_bundles(checkpoints: dict[str, Path]) -> dict[str, Path]:
    return {
        name: build_on_host(checkpoints[name], ARTIFACTS / f"tiny-cuda-{name}", **request)
        for name, (_, _, request) in BUNDLES.items()
    }


def program(directory: Path) -> CudaProgram:
    return CudaProgram.read(directory)


def step_inputs(step: FlatStep, copies: list[tuple[int, int]] | None = None) -> StepInputs:
    return StepInputs(
        step.input_ids, step.positions, step.block_table, step.seq_lens, step.query_start_loc,
        step.logits_rows, np.array(copies or [], np.int64).reshape(-1, 2),
    )  # fmt: skip


@pytest.mark.parametrize("name", BUNDLES)
def test_the_executor_computes_what_the_model_computes(
    name: str, cuda_bundles: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    """Ragged prefill, decodes mixed with a chunk and a prompt, a chunk among decodes, decodes of few tokens."""
    model = load_model(open_checkpoint(str(checkpoints[name])), torch.float32)
    windows = sorted({a.window for piece in program(cuda_bundles[name]).pieces for a in piece.attentions})
    trace = record(model, windows=windows, block_size=BLOCK)
    executor = open_on_host(cuda_bundles[name])

    def run(step: FlatStep) -> StepResult:
        return StepResult(torch.as_tensor(executor.execute(step_inputs(step)).logits).clone())

    result = compare(trace, run, "executor")
    assert result.relative_error < 1e-5
    assert result.top1_agreement == 1.0


def generate(
    bundle: Path, executor: CudaExecutor, prompts: list[list[int]], **config: Any
) -> list[list[int]]:
    engine = Engine(executor, Tokenizer.from_directory(bundle), EngineConfig(check_invariants=True, **config))
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    with LLM.from_engine(engine) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", BUNDLES)
def test_tokens_are_those_of_transformers_with_and_without_graphs(
    name: str, cuda_bundles: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 320, length).tolist() for length in (5, 16, 70, 33, 1)]
    device = HostDevice()
    captured = generate(
        cuda_bundles[name], open_on_host(cuda_bundles[name], device=device), prompts, max_chunk_tokens=24
    )
    # Five decodes are padded to six, the largest batch. All but a first step of each size is a graph's.
    assert device.num_captures >= 1
    assert device.num_replays > NUM_NEW_TOKENS // 2
    plain = generate(cuda_bundles[name], open_on_host(cuda_bundles[name], use_graphs=False), prompts)
    model = load_model(open_checkpoint(str(checkpoints[name])), torch.float32)
    for prompt, with_graphs, without in zip(prompts, captured, plain, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_NEW_TOKENS):
                logits = model(input_ids=ids, use_cache=False).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        expected = ids[0, len(prompt) :].tolist()
        assert with_graphs == expected
        assert without == expected


def test_what_cannot_be_captured_runs_without_graphs(
    cuda_bundles: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    device = HostDevice(can_capture=False)
    tokens = generate(cuda_bundles["llama"], open_on_host(cuda_bundles["llama"], device=device), prompts)
    assert tokens == generate(cuda_bundles["llama"], open_on_host(cuda_bundles["llama"]), prompts)
    assert "decode steps run without CUDA graphs from now on: it cannot be captured" in caplog.text


def test_pieces_that_differ_in_weights_share_a_package(cuda_bundles: dict[str, Path]) -> None:
    pieces = program(cuda_bundles["llama"]).pieces
    assert [piece.package for piece in pieces] == ["piece_0.pt2", "piece_1.pt2", "piece_1.pt2", "piece_3.pt2"]
    assert [[a.layer for a in piece.attentions] for piece in pieces] == [[0], [1], [2], []]
    assert not set(pieces[1].weights) & set(pieces[2].weights)
    files = {path.name for path in cuda_bundles["llama"].glob("*.pt2")}
    assert files == {"piece_0.pt2", "piece_1.pt2", "piece_3.pt2"}


def test_rotary_tables_are_computed_once_for_all_layers(cuda_bundles: dict[str, Path]) -> None:
    first, *others = program(cuda_bundles["llama"]).pieces
    read = {name for piece in others for name in piece.inputs} & set(first.outputs)
    assert len(read) == 3  # cosines, sines, and the residual stream


def test_tied_weights_are_stored_once(cuda_bundles: dict[str, Path]) -> None:
    pieces = program(cuda_bundles["gemma2"]).pieces
    assert set(pieces[0].weights) & set(pieces[-1].weights)


def test_windows_and_soft_caps_reach_the_attention(cuda_bundles: dict[str, Path]) -> None:
    attentions = [a for piece in program(cuda_bundles["gemma2"]).pieces for a in piece.attentions]
    assert [(a.window, a.soft_cap) for a in attentions] == [(8, 2.0), (0, 2.0)]


def test_sinks_and_pages_of_one_byte_reach_the_attention(tmp_path: Path) -> None:
    """The build has compared the engine with the model: a wrong sink or scale would have failed it."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    checkpoint = tiny_checkpoint("granite_swa", tmp_path / "checkpoint", **layers)
    bundle = build_on_host(checkpoint, tmp_path / "bundle", dtype="float32", kv_cache_dtype="int8")
    manifest = read_manifest(bundle)
    graph, measured, engine = manifest.quality["proofs"]
    assert graph["relative_error"] < 1e-5
    assert engine["relative_error"] == pytest.approx(measured["relative_error"], rel=0.1)
    attentions = [a for piece in program(bundle).pieces for a in piece.attentions]
    assert [a.k_scale for a in attentions] == manifest.engine["kv_cache"]["k_scales"]
    assert all(a.sinks is not None for a in attentions)
    executor = open_on_host(bundle)
    assert executor.limits.num_blocks == (2 << 20) // (2 * 2 * BLOCK * 2 * 16)
    assert "--kv-cache-dtype int8" in manifest.build_command


def logits(executor: CudaExecutor, *sequences: Any, **options: Any) -> np.ndarray:
    output = executor.execute(flat_step(*sequences, **options)).logits
    assert isinstance(
        output, torch.Tensor
    )  # it stays where it was computed, and is overwritten by the next step
    return output.numpy().copy()


def test_copied_blocks_are_read_where_they_were_copied_to(cuda_bundles: dict[str, Path]) -> None:
    executor = open_on_host(cuda_bundles["llama"])
    logits(executor, ([7, 8, 9], 0, [0]))
    expected = logits(executor, ([10], 3, [0]))
    copied = logits(executor, ([10], 3, [5]), copies=(0, 4, 4, 5))
    np.testing.assert_array_equal(copied, expected)
    assert not np.array_equal(logits(executor, ([10], 3, [6])), expected)


def test_rows_that_do_not_fit_into_the_memory_for_logits_come_in_several_runs(
    cuda_bundles: dict[str, Path],
) -> None:
    manifest = read_manifest(cuda_bundles["llama"])
    few = replace(manifest, engine={**manifest.engine, "num_logits_rows": 6})
    prompt = (list(range(20, 40)), 0, [3, 1])
    rows = list(range(20))
    whole = logits(open_on_host(cuda_bundles["llama"]), prompt, rows=rows)
    device = HostDevice()
    parts = logits(open_on_host(cuda_bundles["llama"], device=device, manifest=few), prompt, rows=rows)
    assert device.num_uploads == 4
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    assert len(np.unique(parts, axis=0)) == 20


def test_a_build_says_what_the_executor_needs_for_sampling(
    cuda_bundles: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    manifest, executor = read_manifest(cuda_bundles["llama"]), open_on_host(cuda_bundles["llama"])
    config = open_checkpoint(str(checkpoints["llama"])).config
    planned = HostTarget(None).plan_memory(config, manifest.model, manifest.limits, torch.float32, 1000)
    assert planned.sampling == executor.memory.sampling.device_bytes > 0
    step_bytes = executor.memory.activation_bytes + executor.memory.logits_bytes
    assert planned.total == 1000 + planned.kv_pages + step_bytes + planned.sampling
    assert executor.limits.max_logits_rows == executor.memory.num_logits_rows


def test_a_step_without_rows_gives_no_logits(cuda_bundles: dict[str, Path]) -> None:
    assert logits(open_on_host(cuda_bundles["llama"]), ([7, 8, 9], 0, [0]), rows=[]).shape == (0, 320)


def test_shapes_and_pages_outside_are_refused_before_the_engine_sees_them(
    cuda_bundles: dict[str, Path],
) -> None:
    device = HostDevice()
    executor = open_on_host(cuda_bundles["llama"], device=device)
    num_blocks = executor.limits.num_blocks
    faults: list[tuple[dict[str, Any], str]] = [
        (
            {"sequences": [([1], 0, [num_blocks])]},
            rf"block_table: pages {num_blocks} to {num_blocks}, but there are 0",
        ),
        ({"sequences": [([1], 0, [-1])]}, "block_table: pages -1"),
        ({"sequences": [([1], 0, [0])], "copies": (0, num_blocks)}, "block_copies: pages 0 to"),
        ({"sequences": [([1], 0, [i]) for i in range(7)]}, r"block_table: shape \(7, 1\) is outside"),
        ({"sequences": [([1] * 257, 0, list(range(17)))]}, r"input_ids: shape \(1, 257\) is outside"),
        ({"sequences": [([1] * 17, 0, [0])]}, "block_table: its pages hold 16 tokens"),
    ]
    for options, message in faults:
        with pytest.raises(EngineError, match=message):
            executor.execute(flat_step(*options.pop("sequences"), **options))
    assert device.num_uploads == 0
    executor.close()
    executor.close()
    assert device.is_closed
    with pytest.raises(EngineError, match="closed"):
        executor.execute(flat_step(([1], 0, [0])))


class NoMemory(HostDevice):
    """It counts what is alive of `tensors` when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.num_alive = -1

    def allocate_staging(self, num_bytes: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    def close(self) -> None:
        super().close()
        self.num_alive = sum(tensor() is not None for tensor in self.tensors)


@pytest.mark.parametrize("fails", ["pages", "staging"])
def test_a_load_that_fails_holds_no_memory_when_the_device_is_closed(
    fails: str, cuda_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = NoMemory()

    def load(path: Path, device: str) -> dict[str, torch.Tensor]:
        weights = load_file(path, device=device)
        host.tensors += map(weakref.ref, weights.values())
        return weights

    def allocate(*arguments: Any, **options: Any) -> torch.Tensor:
        """Pages of one layer, and no more."""
        if not next(left):
            raise RuntimeError("out of memory")
        pages = zeros(*arguments, **options)
        host.tensors.append(weakref.ref(pages))
        return pages

    zeros, left = torch.zeros, iter([True, True, False])

    monkeypatch.setattr("pelton.plugins_trt.cuda_engine.load_file", load)
    if fails == "pages":
        monkeypatch.setattr(torch, "zeros", allocate)
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: .*out of memory"):
        open_on_host(cuda_bundles["llama"], device=host)
    assert host.is_closed
    assert host.tensors
    assert host.num_alive == 0


def test_samplers_are_within_the_faults_of_the_device_and_end_with_the_executor(
    cuda_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_on_host(cuda_bundles["llama"])
    sampler = executor.make_sampler([0])
    assert isinstance(sampler, DeviceSampler)
    output = executor.execute(flat_step(([7, 8, 9], 0, [0])))
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    member = Sequence(Request("r", (7, 8, 9), params))

    def fail(*_: Any) -> None:
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        patch.setattr("pelton.runtime.sampler_pass.add_counts", fail)
        with pytest.raises(EngineError, match="the GPU failed: device-side assert"):
            sample_each(sampler, output.logits, [member])
    assert isinstance(sample_each(sampler, output.logits, [member])[0], TokenEvent)
    assert sampler._table is not None
    executor.close()
    assert sampler._table is None
    with pytest.raises(EngineError, match="the executor is closed"):
        sample_each(sampler, output.logits, [member])


def test_the_memory_plan_counts_everything(cuda_bundles: dict[str, Path]) -> None:
    bundle = cuda_bundles["llama"]
    manifest = read_manifest(bundle)
    block_bytes = 3 * 2 * BLOCK * 2 * 16 * 4  # layers, K and V, tokens, heads, elements, bytes
    plan = open_on_host(bundle, kv_cache_bytes=10 * block_bytes + 1).memory
    assert plan.num_blocks == 10
    assert plan.kv_bytes == 10 * block_bytes
    assert plan.weight_bytes == (bundle / "weights.safetensors").stat().st_size
    assert plan.logits_bytes == 256 * 320 * 4
    assert plan.activation_bytes == manifest.engine["activation_bytes"]
    exact = HostDevice(plan.device_bytes)
    assert open_on_host(bundle, device=exact, kv_cache_bytes=plan.kv_bytes).limits.num_blocks == 10
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: .* are free; lower it to at most 4 MiB"):
        open_on_host(bundle, device=HostDevice(plan.other_bytes + (4 << 20)), kv_cache_bytes=8 << 20)
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: .*build again with smaller limits"):
        open_on_host(bundle, device=HostDevice(plan.other_bytes), kv_cache_bytes=plan.kv_bytes)
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: 5 bytes hold no block of \d+ bytes; raise it"):
        open_on_host(bundle, kv_cache_bytes=5)


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_damaged_package_is_named(content: bytes, cuda_bundles: dict[str, Path], tmp_path: Path) -> None:
    for path in cuda_bundles["llama"].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "piece_1.pt2").unlink()
    (tmp_path / "piece_1.pt2").write_bytes(content)
    device = HostDevice()
    with pytest.raises(BundleError, match=r"piece_1\.pt2: cannot be loaded .*build the bundle again"):
        open_on_host(tmp_path, device=device)
    assert device.is_closed


def test_a_damaged_program_is_named(cuda_bundles: dict[str, Path], tmp_path: Path) -> None:
    for path in cuda_bundles["llama"].iterdir():
        (tmp_path / path.name).symlink_to(path)
    content = json.loads((tmp_path / "engine.json").read_text())
    (tmp_path / "engine.json").unlink()
    content["pieces"][0]["weights"][0] = "w999"
    (tmp_path / "engine.json").write_text(json.dumps(content))
    with pytest.raises(BundleError, match=r"weights\.safetensors: has no w999"):
        open_on_host(tmp_path)
    content["pieces"][0]["inputs"] = 3
    (tmp_path / "engine.json").write_text(json.dumps(content))
    with pytest.raises(BundleError, match=r"engine\.json: pieces\.0\.inputs: .*build the bundle again"):
        open_on_host(tmp_path)


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_loading_without_a_gpu_is_refused_before_the_engine_is_touched(cuda_bundles: dict[str, Path]) -> None:
    with pytest.raises(BundleError, match=r"built with/for an NVIDIA GPU .* 9\.0, found no CUDA device"):
        LLM(cuda_bundles["llama"])


@needs_no_gpu
def test_building_without_a_gpu_is_one_line(tmp_path: Path) -> None:
    done = pelton("build", tmp_path, "--target", "cuda")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("pelton: target: cuda ")
    assert "--target tensorrt-rtx can be built here" in last
    assert "Traceback" not in done.stderr


def test_what_a_build_cannot_be_for_is_refused() -> None:
    with pytest.raises(BuildError, match=r"^gpu: cuda builds for the GPU of the machine"):
        resolve(BuildRequest("some/model", target="cuda", gpus=("8.9",)))
    assert unsupported_reason("9.0", "fp8") is None
    assert unsupported_reason("8.0", "int4") is None
    assert "8.9" in (unsupported_reason("8.0", "fp8") or "")
    assert "8.0 or later, this one is 7.5" in (unsupported_reason("7.5", None) or "")


def test_a_bundle_says_what_it_needs(cuda_bundles: dict[str, Path]) -> None:
    done = CliRunner().invoke(inspect.command, [str(cuda_bundles["llama"])])
    assert done.exit_code == 0, done.output
    assert f"torch {torch.__version__}, a GPU of compute capability 9.0" in done.output
    assert default_output("org/Name", "cuda", "int4") == Path("artifacts/Name-cuda-int4")


def test_the_torch_of_this_machine_is_known_without_importing_it() -> None:
    assert HostFacts.detect().torch_version == torch.__version__
