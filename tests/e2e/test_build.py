"""`pelton build`: a bundle whole or not at all, found again when unchanged, and errors a user can act on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import pelton, pelton_here

from pelton import LLM, SamplingParams
from pelton.compile.bundle import read_manifest
from pelton.compile.memory import plan_memory
from pelton.compile.targets.cpu_target import CpuTarget
from pelton.errors import BundleError, EngineError
from pelton.plugins_trt.cpu_engine import CpuEngine, EngineProgram
from pelton.runtime.request import Request
from support.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


def test_dry_run_explains_the_memory_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    done = pelton_here("build", checkpoint, "-o", tmp_path / "out", "--dry-run", "--kv-cache-memory", "1MiB")
    assert done.exit_code == 0, done.stderr
    # 2 layers * 2 (K, V) * 2 heads * 16 * 4 bytes = 512 bytes a token: 16 KiB a block of 32, 64 blocks in 1 MiB.
    assert "64 blocks of 32 tokens" in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_default_output_says_the_dtype_that_was_chosen(checkpoint: Path) -> None:
    done = pelton("build", checkpoint.name, "--dry-run", cwd=checkpoint.parent)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["output"] == f"artifacts/{checkpoint.name}-float32"
    assert rows["command"].startswith(f"pelton build {checkpoint} --target cpu --dtype float32 ")
    assert rows["command"].endswith(f" -o {rows['output']}")


def test_an_output_by_default_that_is_no_bundle_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "artifacts" / f"{checkpoint.name}-float32"
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("mine")
    done = pelton("build", checkpoint, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "not a Pelton bundle" in done.stderr


def test_an_unchanged_build_is_found_and_a_changed_limit_is_not(tiny_bundles: dict[str, Path]) -> None:
    bundle = tiny_bundles["llama"]
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["limits"]["block_size"] == 16
    again = pelton(
        "build", manifest["model"]["source"], "-o", bundle, "--dtype", "float32", "--block-size", "16"
    )
    assert again.returncode == 0, again.stderr
    assert "unchanged" in again.stdout
    assert "compile" not in again.stderr
    changed = pelton(
        "build", manifest["model"]["source"], "-o", bundle, "--dtype", "float32", "--block-size", "16",
        "--max-model-len", "100", "--dry-run",
    )  # fmt: skip
    assert manifest["content_key"][:12] not in changed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "100000"], "max_model_len"),
        (["--max-step-tokens", "8", "--max-batch-size", "9"], "max_step_tokens"),
        (["--kv-cache-memory", "1KiB"], "less than one block"),
        (["--kv-cache-memory", "lots"], "not a size"),
        (["--dtype", "int3"], "int3"),
        (["--kv-cache-dtype", "fp4"], "'--kv-cache-dtype': 'fp4' is not one of"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype: fp8 is not supported on cpu"),
    ],
)
def test_bad_limits_name_the_option(
    checkpoint: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = pelton_here("build", checkpoint, "-o", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_model_and_a_missing_bundle_are_one_line(tmp_path: Path) -> None:
    for arguments in (
        ("build", tmp_path / "nothing", "-o", tmp_path / "out"),
        ("generate", tmp_path / "nothing", "hello"),
        ("serve", tmp_path / "nothing"),
        ("inspect", tmp_path / "nothing"),
        ("bench", tmp_path / "nothing"),
    ):
        done = pelton(*arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr
        assert "nothing" in done.stderr


def test_a_damaged_bundle_is_refused_before_it_is_loaded(
    tiny_bundles: dict[str, Path], tmp_path: Path
) -> None:
    bundle = tmp_path / "copy"
    shutil.copytree(tiny_bundles["llama"], bundle)
    weights = bundle / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert pelton("inspect", bundle).returncode == 0
    verified = pelton("inspect", bundle, "--verify")
    assert verified.returncode == 2
    assert "weights.safetensors was changed" in verified.stderr
    weights.write_bytes(data[:-10])
    torn = pelton("generate", bundle, "hello")
    assert torn.returncode == 2
    assert "weights.safetensors has" in torn.stderr
    assert "pelton build" in torn.stderr


def test_a_manifest_that_no_build_wrote_is_one_line(tiny_bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "copy"
    shutil.copytree(tiny_bundles["llama"], bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["quality"]["proofs"][0]["relative_error"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    shown = pelton_here("inspect", bundle)
    assert shown.exit_code == 2
    assert "engine or quality is not as a build writes it" in shown.stderr


def test_pool_that_holds_less_than_the_window_is_said_at_the_start(tiny_bundles: dict[str, Path]) -> None:
    done = pelton(
        "generate", tiny_bundles["llama"], "hello", "--max-tokens", "4", "--kv-cache-memory", "64KiB"
    )
    assert done.returncode == 0, done.stderr
    assert "the KV cache holds" in done.stderr


def test_sa_10_a_prompt_beyond_the_context_is_refused_not_cut(tiny_bundles: dict[str, Path]) -> None:
    done = pelton("generate", tiny_bundles["llama"], "many words " * 400)
    assert done.returncode == 2
    assert "512" in done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-memory", "900TiB"], "kv_cache_memory"),
        (["--threads", "100000"], "threads"),
        (["--max-batch-size", "1000"], "max_batch_size"),
    ],
)
def test_more_than_the_machine_or_the_bundle_has_is_refused(
    arguments: list[str], message: str, tiny_bundles: dict[str, Path]
) -> None:
    done = pelton("generate", tiny_bundles["llama"], "hello", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_is_built_for_all_processors_and_one_of_a_smaller_machine_says_so(
    tiny_bundles: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # as OMP_NUM_THREADS does
        num_threads = CpuTarget().options()["num_threads"]
    finally:
        torch.set_num_threads(before)
    assert num_threads == len(os.sched_getaffinity(0))
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundles["llama"], bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["engine"]["num_threads"] == num_threads
    with LLM(bundle, num_threads=num_threads):
        assert "threads" not in caplog.text
    if num_threads == 1:
        return
    manifest["engine"]["num_threads"] = 1
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with LLM(bundle, num_threads=2):
        assert "built for 1 threads" in caplog.text


def test_what_cannot_be_written_is_said_in_one_line(checkpoint: Path, tiny_bundles: dict[str, Path]) -> None:
    done = pelton("build", checkpoint, "-o", "/proc/nowhere/bundle")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    with open("/dev/full", "w") as full:
        command = [
            sys.executable,
            "-m",
            "pelton.scripts.cli",
            "generate",
            str(tiny_bundles["llama"]),
            "hello",
        ]
        written = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert written.returncode == 2
    assert "Traceback" not in written.stderr


def test_a_prompt_from_standard_input_is_the_same_prompt(tiny_bundles: dict[str, Path]) -> None:
    bundle = tiny_bundles["llama"]
    given = pelton("generate", bundle, "The engine reads", "--max-tokens", "8")
    piped = pelton("generate", bundle, "--max-tokens", "8", input="The engine reads\n")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == given.stdout


def test_a_chat_template_replaces_the_models_own(tiny_bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle, file = tiny_bundles["llama"], tmp_path / "template.jinja"
    with LLM(bundle, chat_template="{{ messages[0].content }}!") as llm:
        output = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
        assert list(output[0].prompt_token_ids) == llm.tokenizer.encode("hi!", add_special_tokens=False)
    with pytest.raises(BundleError, match="does not read `messages`"):
        LLM(bundle, chat_template=str(file))
    file.write_text("{{ messages }}")
    done = pelton_here("generate", bundle, "hi", "--chat-template", file)
    assert done.exit_code == 2
    assert "--chat-template needs --chat" in done.stderr
    file.write_text("no template")
    done = pelton_here("generate", bundle, "hi", "--chat", "--chat-template", file)
    assert done.exit_code == 2
    assert f"--chat-template {file}: " in done.stderr


def test_a_bundle_is_no_checkpoint(tiny_bundles: dict[str, Path], tmp_path: Path) -> None:
    done = pelton_here("build", tiny_bundles["llama"], "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "this is a bundle already" in done.stderr


def test_an_output_that_is_no_bundle_is_refused_by_the_dry_run_too(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = pelton_here("build", checkpoint, "-o", tmp_path, "--dry-run")
    assert done.exit_code == 2
    assert "not a Pelton bundle" in done.stderr


def test_a_closed_engine_gives_its_memory_back(smollm2_bundle: Path) -> None:
    """Weights and pages of four engines in turn; what stays must be far less than one engine's 311 MiB."""
    script = """
import sys, psutil
from pelton import LLM, SamplingParams
sizes = []
for _ in range(4):
    with LLM(sys.argv[1], kv_cache_bytes=64 << 20) as llm:
        llm.generate("Once", SamplingParams(max_tokens=2))
    del llm
    sizes.append(psutil.Process().memory_info().rss >> 20)
print(sizes[-1] - sizes[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(smollm2_bundle)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200


def test_pages_are_as_large_as_planned_and_come_back(tiny_bundles: dict[str, Path]) -> None:
    bundle = tiny_bundles["llama"]
    manifest = read_manifest(bundle)
    limits = replace(manifest.limits, kv_cache_bytes=128 << 20)
    plan = plan_memory(manifest.model, limits, torch.float32, is_tied=False, has_tiles=False)
    engine = CpuEngine(bundle, num_blocks=plan.num_blocks)
    caches = [value for name, value in engine._values.items() if "_caches_" in name]
    assert sum(cache.nbytes for cache in caches) == plan.kv_pages
    one = np.zeros(1, np.int64)
    table, length, starts = np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.array([0, 1], np.int32)
    engine.run(one, one, table, length, starts, one)
    process = psutil.Process()
    for cache in caches:
        cache.fill_(1)
    del caches, cache
    full = process.memory_info().rss
    engine.close()
    assert full - process.memory_info().rss > 0.95 * plan.kv_pages


def test_a_closed_engine_says_so(tiny_bundles: dict[str, Path]) -> None:
    llm = LLM(tiny_bundles["llama"])
    llm.close()
    with pytest.raises(EngineError, match="the LLM is closed"):
        llm.generate("hello")
    llm.engine.admit(Request("r", (1,), SamplingParams()))
    (delta,) = llm.engine.step()
    assert delta.finish_reason == "error"


def test_float16_checkpoint_says_what_it_is_built_in(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "half", dtype=torch.float16)
    done = pelton_here("build", checkpoint, "-o", tmp_path / "out", "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "float16; it is built in bfloat16" in done.stderr


@pytest.mark.parametrize("has_products", [True, False])
def test_a_build_says_where_bfloat16_is_slow(
    has_products: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pelton.compile.targets.cpu_target.has_bfloat16_products", lambda: has_products)
    for dtype in ("bfloat16", "float32"):
        done = pelton_here("build", checkpoint, "-o", tmp_path / "out", "--dtype", dtype, "--dry-run")
        assert done.exit_code == 0, done.stderr
        is_said = "no instructions for products of bfloat16" in done.stderr
        assert is_said == (dtype == "bfloat16" and not has_products)


def test_a_bfloat16_build_with_biases_and_windows_serves(tmp_path: Path) -> None:
    """Tiles and rows, over a window of 8 positions."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    checkpoint = tiny_checkpoint("qwen2", tmp_path / "qwen2", **windows)
    bundle = tmp_path / "bundle"
    built = pelton("build", checkpoint, "-o", bundle, "--dtype", "bfloat16", "--kv-cache-memory", "4MiB")
    assert built.returncode == 0, built.stderr
    proofs = json.loads((bundle / "manifest.json").read_text())["quality"]["proofs"]
    assert [proof["subject"] for proof in proofs] == ["exported graph", "compiled engine"]
    program = EngineProgram.read(bundle)
    assert program.use_tiles
    assert program.windows == (8,)
    forms = [(s.library, s.row_library) for s in program.segments if s.row_library is not None]
    assert len(forms) == 2
    for library, row_library in forms:
        # Names stand for contents: no weight has a second layout for the steps without tiles.
        assert set(row_library.weights.values()) == set(library.weights.values())
    answer = pelton("generate", bundle, "The engine reads", "--max-tokens", "8")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "cannot be exported",
        ),
        ("mpt", {}, "0 of 2 layers call the attention interface"),
    ],
)
def test_a_family_that_cannot_be_built_is_refused_with_the_reason(
    family: str, overrides: dict[str, object], message: str, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / family, **overrides)
    done = pelton_here("build", checkpoint, "-o", tmp_path / "out", "--dtype", "float32")
    assert done.exit_code == 2, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
