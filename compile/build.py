"""Checkpoint -> bundle: the stages of a build, in order."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..errors import BuildError
from ..plugins_trt.cpu_engine import CpuEngine, EngineProgram
from ..plugins_trt.paged_attention_cpu import uses_tiles
from .bundle import (
    FORMAT_VERSION,
    HostFacts,
    HostNeeds,
    Limits,
    Manifest,
    ModelFacts,
    Versions,
    check_replaceable,
    content_key,
    find_unchanged,
    record_files,
    staged_bundle,
    write_manifest,
)
from .checkpoint import Checkpoint, load_model, open_checkpoint, write_serving_files
from .export import check_windows, export, kv_geometry
from .memory import MemoryPlan, plan_memory
from .passes import optimise
from .progress import Progress
from .proof import MAX_PROVED_WINDOW, StepFunction, Trace, compare, exported_step, record
from .segments import PAGED_ATTENTION, attention_of, cut, layer_prefix
from .targets import cpu

TARGETS = ("cpu",)
DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_KV_CACHE_BYTES = 1 << 30

# Inductor compiles for the building machine (-march=native): whatever instruction sets it has may be in the code.
# On x86 these are the flags that name one; elsewhere every flag counts.
_X86_INSTRUCTION_SETS = re.compile(
    r"avx.*|amx.*|sse.*|ssse3|bmi[12]|fma|f16c|gfni|vaes|vpclmulqdq|pclmulqdq|aes|sha_ni|abm|movbe|adx|popcnt|rdseed"
    r"|clwb|clflushopt|movdir.*|serialize|xsave.*|fsgsbase|rdpid|ptwrite|waitpkg|cldemote"
)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What a user asks `pelton build` for; None lets `resolve` choose."""

    model: str
    output: Path | None = None
    target: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_batch_size: int = 64
    max_step_tokens: int = 512
    block_size: int = 32
    kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A build, resolved: everything that decides what the bundle will be."""

    request: BuildRequest
    output: Path
    checkpoint: Checkpoint
    dtype: str
    limits: Limits
    facts: ModelFacts
    memory: MemoryPlan
    versions: Versions
    content_key: str
    warnings: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that builds this bundle again, in any directory and with every choice spelled out.

        It has no output, as in the manifest: see `build_command_into`.
        """
        limits = self.limits
        options = {
            "--target": self.request.target,
            "--dtype": self.dtype,
            "--max-model-len": limits.max_model_len,
            "--max-batch-size": limits.max_batch_size,
            "--max-step-tokens": limits.max_step_tokens,
            "--block-size": limits.block_size,
            "--kv-cache-memory": limits.kv_cache_bytes,
        }
        words = [word for option in options.items() for word in map(str, option)]
        return shlex.join(["pelton", "build", _absolute(self.request.model), *words])


def resolve(request: BuildRequest) -> BuildPlan:
    """Open the checkpoint (its content is hashed for the key) and decide everything.

    Raises `BuildError` naming the option at fault, or the output if it must not be replaced.
    """
    if request.target not in TARGETS:
        raise BuildError(f"target: {request.target!r} is unknown; choose one of {', '.join(TARGETS)}")
    if request.output is not None:  # before the checkpoint is read, which may take a while
        check_replaceable(request.output)
    checkpoint = open_checkpoint(request.model)
    config: Any = checkpoint.config
    dtype = request.dtype
    warnings = list(checkpoint.warnings)
    if dtype == "auto":
        dtype = "float32" if checkpoint.dtype_name == "float32" else "bfloat16"
        if checkpoint.dtype_name not in ("float32", "bfloat16"):
            warnings.append(
                f"the checkpoint is {checkpoint.dtype_name}; it is built in {dtype} on this target"
            )
    if dtype not in DTYPES:
        raise BuildError(f"dtype: {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    output = request.output or default_output(request.model, dtype)
    check_replaceable(output)
    facts = _facts(checkpoint)
    trained = facts.max_position_embeddings
    max_model_len = request.max_model_len or min(trained, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > trained:
        raise BuildError(
            f"max_model_len: {max_model_len} is above the {trained} positions that the model was trained for"
        )
    limits = Limits(
        max_model_len=max_model_len,
        max_batch_size=request.max_batch_size,
        max_step_tokens=request.max_step_tokens,
        block_size=request.block_size,
        kv_cache_bytes=request.kv_cache_bytes,
    )
    memory = _memory(config, facts, limits, getattr(torch, dtype))
    if not memory.num_blocks:
        raise BuildError(
            f"kv_cache_bytes: {request.kv_cache_bytes} is less than one block of {memory.block_bytes} bytes"
        )
    if memory.num_blocks * limits.block_size < max_model_len:
        warnings.append(
            f"the KV cache holds {memory.num_blocks * limits.block_size} tokens, fewer than max_model_len "
            f"{max_model_len}: longer requests are refused; raise --kv-cache-memory"
        )
    versions = Versions(
        pelton=__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        compiler=_compiler(),
    )
    key = content_key(
        checkpoint_hash=checkpoint.content_hash,
        target=request.target,
        dtype=dtype,
        limits=limits,
        versions=versions,
        options={"cpu_flags": list(_needs().cpu_flags), "sources": _source_hash()},
    )
    return BuildPlan(
        request, output, checkpoint, dtype, limits, facts, memory, versions, key, tuple(warnings)
    )


def default_output(model: str, dtype: str) -> Path:
    """artifacts/NAME-DTYPE, where NAME is the last part of a hub id or of a path, also of `.` and `..`."""
    name = Path(os.path.abspath(model)).name.removesuffix(".gguf")
    return Path("artifacts") / f"{name}-{dtype}"


def build(plan: BuildPlan, progress: Progress, *, force: bool = False) -> tuple[Manifest, bool]:
    """Make the bundle, or find it unchanged (True). It appears whole or not at all. Raises `BuildError`."""
    output = plan.output
    if not force and (unchanged := find_unchanged(output, plan.content_key)) is not None:
        return unchanged, True
    with staged_bundle(output) as staging:
        manifest = _build_into(staging, plan, progress)
        with progress.stage("write bundle"):
            write_serving_files(plan.checkpoint, staging)
            manifest = replace(manifest, files=record_files(staging))
            write_manifest(manifest, staging)
    return manifest, False


def _build_into(staging: Path, plan: BuildPlan, progress: Progress) -> Manifest:
    dtype, block_size = getattr(torch, plan.dtype), plan.limits.block_size
    with progress.stage("load weights"):
        model = load_model(plan.checkpoint, dtype)
    geometry = kv_geometry(model.config)
    with progress.stage("export"):
        program = export(model, block_size=block_size)
    nodes = program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION)
    layer_windows = [attention_of(node).window for node in nodes]
    check_windows(model.config, layer_windows)
    windows = sorted(set(layer_windows))
    unproved = [window for window in windows if window > MAX_PROVED_WINDOW]
    if unproved:
        progress.warning(f"the proof runs no sequence longer than the sliding window of {unproved[0]} tokens")
    with progress.stage("prove the exported graph"):
        trace = record(model, windows=windows, block_size=block_size)
        step = exported_step(program, geometry, trace, dtype)
        proofs = [compare(trace, step, "exported graph")]
    with progress.stage("graph passes"):
        graph_module = optimise(program.module(check_guards=False))
        segments = cut(graph_module, layer_prefix(model, len(geometry)), len(geometry))
    with progress.stage("compile"):
        cpu.lower(
            graph_module, segments, geometry,
            dtype=dtype, block_size=block_size, directory=staging, on_progress=progress.note,
        )  # fmt: skip
    with progress.stage("check the engine against the model"):
        proofs.append(compare(trace, _engine_step(staging, trace), "compiled engine"))
    for proof in proofs:
        progress.note(
            f"{proof.subject}: relative error {proof.relative_error:.1e} (at most {proof.tolerance:.1e})"
        )
    return Manifest(
        format_version=FORMAT_VERSION,
        target=plan.request.target,
        dtype=plan.dtype,
        versions=plan.versions,
        needs=_needs(),
        limits=plan.limits,
        model=plan.facts,
        engine={"num_segments": len(EngineProgram.read(staging).segments), "windows": windows},
        quality={"proofs": [proof.to_json() for proof in proofs], "unproved_windows": unproved},
        checkpoint_hash=plan.checkpoint.content_hash,
        content_key=plan.content_key,
        build_command=plan.command,
        files={},
    )


def _absolute(model: str) -> str:
    """The path of a local model from the root, a hub id as it is."""
    path = Path(model).expanduser()
    return os.path.abspath(path) if path.exists() else model


def _engine_step(directory: Path, trace: Trace) -> StepFunction:
    engine = CpuEngine(directory, num_blocks=trace.num_blocks)
    return lambda step: engine.run(
        step.input_ids,
        step.positions,
        step.block_table,
        step.seq_lens,
        step.query_start_loc,
        step.logits_rows,
    )


def _source_hash() -> str:
    """Content of the code that makes bundles: a change of it makes a build a different one."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted((*root.glob("compile/**/*.py"), *root.glob("plugins_trt/**/*.py"))):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _facts(checkpoint: Checkpoint) -> ModelFacts:
    config: Any = checkpoint.config
    try:
        geometry = kv_geometry(config)
        return ModelFacts(
            source=checkpoint.source,
            model_type=config.model_type,
            num_parameters=_num_parameters(config),
            num_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=geometry[0].num_heads,
            head_dim=geometry[0].head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
        )
    except AttributeError as error:
        raise BuildError(
            f"{checkpoint.source}: the config of {config.model_type} has no {error.name}: this family is not supported"
        ) from error


def _memory(config: Any, facts: ModelFacts, limits: Limits, dtype: torch.dtype) -> MemoryPlan:
    soft_cap = getattr(config, "attn_logit_softcapping", None) or 0.0
    has_tiles = uses_tiles(dtype, [soft_cap])
    return plan_memory(facts, limits, dtype, is_tied=bool(config.tie_word_embeddings), has_tiles=has_tiles)


def _num_parameters(config: Any) -> int:
    """Parameters of the model that `config` describes, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def _needs() -> HostNeeds:
    host = HostFacts.detect()
    is_x86 = host.machine in ("x86_64", "AMD64")
    flags = (f for f in host.cpu_flags if not is_x86 or _X86_INSTRUCTION_SETS.fullmatch(f))
    return HostNeeds(machine=host.machine, cpu_flags=tuple(sorted(flags)))


def _compiler() -> str:
    """Inductor's C++ compiler. Raises `BuildError` when there is none."""
    try:
        version = subprocess.run(
            ["g++", "-dumpfullversion"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"g++ is needed to compile for the CPU and does not run here ({error}); install it (Debian: "
            "apt-get install g++)"
        ) from error
    return f"inductor, g++ {version}, {platform.machine()}"
