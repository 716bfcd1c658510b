"""What a user asks for -> everything that decides what the bundle will be."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from .. import __version__
from ..errors import BuildError
from ..features import unsupported_reason
from ..plugins_trt.tensorrt import TENSORRT, TENSORRT_RTX, require_version
from .bundle import (
    Limits,
    ModelFacts,
    Versions,
    check_replaceable,
    content_key,
)
from .checkpoint import Checkpoint, open_checkpoint
from .drafter import DrafterFiles, check_drafter, open_drafter
from .export import kv_geometry
from .kv_cache import quantised_dtype
from .memory import MemoryPlan, build_memory
from .model_loading import empty_model
from .quality import DEFAULT_MAX_KL
from .quantize import Quantization
from .targets.base import Target
from .targets.cpu_target import CpuTarget
from .targets.torch_tensorrt import TORCH_TENSORRT, require_torch_tensorrt
from .weight_plan import WeightPlan

TARGETS = ("cpu", TENSORRT, TENSORRT_RTX, "cuda")
FRONTENDS = ("onnx", TORCH_TENSORRT)
DTYPES = ("auto", "float32", "float16", "bfloat16")
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What a user asks `pelton build` for; None lets `resolve` choose.

    `frontend`: what hands the graph to TensorRT; only `--target tensorrt` has the choice.
    """

    model: str
    output: Path | None = None
    target: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_batch_size: int = 64
    max_step_tokens: int = 512
    block_size: int = 32
    kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES
    quantize: str | None = None
    max_kl: float | None = None
    gpus: tuple[str, ...] = ()
    frontend: str | None = None
    kv_cache_dtype: str = "auto"
    drafter: Path | None = None


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A build, resolved: everything that decides what the bundle will be.

    `max_kl` is the most that `quantization` may cost, in nats. `kv_cache_dtype` is that of pages which are quantised,
    None: they have the model's own. `drafter` is what goes into the bundle, with an engine that gives hidden states.
    """

    request: BuildRequest
    target: Target
    output: Path
    checkpoint: Checkpoint
    dtype: str
    quantization: Quantization | None
    max_kl: float
    kv_cache_dtype: torch.dtype | None
    limits: Limits
    facts: ModelFacts
    memory: MemoryPlan
    versions: Versions
    content_key: str
    warnings: tuple[str, ...]
    drafter: DrafterFiles | None

    @property
    def build_memory(self) -> int:
        """Bytes of host memory that the build itself needs at most."""
        engine = self.memory.weights
        loaded = (
            engine
            if self.checkpoint.packed
            else self.facts.num_parameters * getattr(torch, self.dtype).itemsize
        )
        return build_memory(
            self.facts, loaded=loaded, engine=engine, compiler_copies=self.target.compiler_copies
        )

    def explain(self) -> list[tuple[str, str]]:
        """Rows (name, text) on how weights are quantised and what the target derives from the limits."""
        geometry = kv_geometry(self.checkpoint.config)
        rows = self.target.explain(geometry, self.limits, self.memory.num_blocks)
        if self.drafter:
            rows.insert(0, ("drafter", str(self.drafter)))
        return [("quantisation", str(self.weights)), *rows] if self.weights.scheme else rows

    @property
    def weights(self) -> WeightPlan:
        return WeightPlan(self.quantization, self.checkpoint.packed)

    @property
    def kv_cache_name(self) -> str:
        """The dtype of the KV pages, as torch calls it."""
        return str(self.kv_cache_dtype or self.dtype).removeprefix("torch.")

    @property
    def command(self) -> str:
        """The command that builds this bundle again, in any directory and with every choice spelled out.

        It has no output, as in the manifest: see `build_command_into`.
        """
        limits, kv_cache_dtype = self.limits, self.request.kv_cache_dtype
        options = {
            "--target": self.request.target,
            "--dtype": self.dtype,
            "--max-model-len": limits.max_model_len,
            "--max-batch-size": limits.max_batch_size,
            "--max-step-tokens": limits.max_step_tokens,
            "--block-size": limits.block_size,
            "--kv-cache-memory": limits.kv_cache_bytes,
            **self.target.command_options(),
            **(
                {"--quantize": self.quantization.scheme, "--max-kl": self.max_kl} if self.quantization else {}
            ),
            **({} if kv_cache_dtype == "auto" else {"--kv-cache-dtype": kv_cache_dtype}),
            **({"--drafter": _absolute(str(self.drafter.directory))} if self.drafter else {}),
        }
        words = [word for option in options.items() for word in map(str, option)]
        return shlex.join(["pelton", "build", _absolute(self.request.model), *words])


def resolve(request: BuildRequest) -> BuildPlan:
    """Open the checkpoint (its content is hashed for the key) and decide everything.

    Raises `BuildError` naming the option at fault, or the output if it must not be replaced.
    """
    kv_cache_dtype = quantised_dtype(request.kv_cache_dtype, request.target)
    quantization = _quantization(request)
    max_kl = request.max_kl or DEFAULT_MAX_KL
    target = _target(request, kv_cache_dtype)
    if request.output is not None:  # before the checkpoint is read, which may take a while
        check_replaceable(request.output)
    drafter = None if request.drafter is None else open_drafter(request.drafter, request.target)
    checkpoint = open_checkpoint(request.model)
    weights = WeightPlan(quantization, checkpoint.packed)
    weights.check(request.model, request.target)
    config: Any = checkpoint.config
    warnings = list(checkpoint.warnings)
    dtype = _dtype(request.dtype, target, checkpoint.dtype_name)
    if request.dtype == "auto" and dtype != checkpoint.dtype_name:
        warnings.append(f"the checkpoint is {checkpoint.dtype_name}; it is built in {dtype} on this target")
    warnings += target.warnings(dtype)
    kinds = [
        dtype,
        weights.scheme,
        f"kv-{request.kv_cache_dtype}" if kv_cache_dtype else None,
        "drafter" if drafter else None,
    ]
    output = request.output or default_output(request.model, target.name, "-".join(filter(None, kinds)))
    check_replaceable(output)
    empty = empty_model(config)
    facts = _facts(checkpoint, empty)
    if drafter is not None:
        warnings += check_drafter(drafter, checkpoint, facts)
    limits = _limits(request, facts.max_position_embeddings)
    torch_dtype = getattr(torch, dtype)
    num_bytes = weights.num_bytes(empty, facts.num_layers, torch_dtype)
    memory = target.plan_memory(config, facts, limits, torch_dtype, num_bytes)
    if drafter is not None:
        memory = replace(memory, weights=memory.weights + drafter.num_bytes)
    if not memory.num_blocks:
        raise BuildError(
            f"kv_cache_bytes: {request.kv_cache_bytes} is less than one block of {memory.block_bytes} bytes"
        )
    if memory.num_blocks * limits.block_size < limits.max_model_len:
        warnings.append(
            f"the KV cache holds {memory.num_blocks * limits.block_size} tokens, fewer than max_model_len "
            f"{limits.max_model_len}: longer requests are refused; raise --kv-cache-memory"
        )
    versions = Versions(
        pelton=__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        compiler=target.compiler(),
    )
    key = content_key(
        checkpoint_hash=checkpoint.content_hash,
        target=request.target,
        dtype=dtype,
        limits=limits,
        versions=versions,
        options={
            **target.options(),
            "quantization": weights.facts(),
            "kv_cache_dtype": request.kv_cache_dtype,
            "max_kl": max_kl if quantization else None,
            "sources": _source_hash(),
            **({"drafter": drafter.digest} if drafter else {}),
        },
    )
    return BuildPlan(
        request,
        target,
        output,
        checkpoint,
        dtype,
        quantization,
        max_kl,
        kv_cache_dtype,
        limits,
        facts,
        memory,
        versions,
        key,
        tuple(warnings),
        drafter,
    )


def _limits(request: BuildRequest, trained: int) -> Limits:
    max_model_len = request.max_model_len or min(trained, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > trained:
        raise BuildError(
            f"max_model_len: {max_model_len} is above the {trained} positions that the model was trained for"
        )
    return Limits(
        max_model_len=max_model_len,
        max_batch_size=request.max_batch_size,
        max_step_tokens=request.max_step_tokens,
        block_size=request.block_size,
        kv_cache_bytes=request.kv_cache_bytes,
    )


def _target(request: BuildRequest, kv_cache_dtype: torch.dtype | None) -> Target:
    _check_frontend(request)
    if request.target == "cpu":
        if request.gpus:
            raise BuildError("gpu: the cpu target has none; --gpu goes with --target tensorrt-rtx")
        return CpuTarget()
    if request.target == "cuda":
        from .targets.cuda_target import CudaTarget

        if request.gpus:
            raise BuildError(
                "gpu: cuda builds for the GPU of the machine that it runs on; --gpu is for tensorrt-rtx"
            )
        return CudaTarget.for_this_machine(request.quantize, kv_cache_dtype)
    if request.target in (TENSORRT, TENSORRT_RTX):
        require_version(request.target)
        try:  # what it imports is an extra
            from .targets.tensorrt import machine_gpu
            from .targets.tensorrt_target import TensorRTTarget
        except ImportError as error:
            raise BuildError(
                f"target: {request.target} needs {error.name}: `pip install 'pelton[rtx]'`"
            ) from error
        return TensorRTTarget(
            request.target,
            gpus=request.gpus,
            scheme=request.quantize,
            frontend=request.frontend,
            cache_dtype=kv_cache_dtype,
            detect_gpu=machine_gpu,
        )
    raise BuildError(f"target: {request.target!r} is unknown; choose one of {', '.join(TARGETS)}")


def _check_frontend(request: BuildRequest) -> None:
    if request.frontend is None:
        return
    if request.frontend not in FRONTENDS:
        raise BuildError(f"frontend: {request.frontend!r} is unknown; choose one of {', '.join(FRONTENDS)}")
    if request.target != TENSORRT:
        raise BuildError(
            f"frontend: only --target tensorrt has a choice of how the graph is handed over, {request.target} has not: "
            "leave --frontend out"
        )
    if request.frontend == TORCH_TENSORRT:
        require_torch_tensorrt()


def _quantization(request: BuildRequest) -> Quantization | None:
    if request.max_kl is not None and not 0 < request.max_kl < math.inf:
        raise BuildError(f"max_kl: {request.max_kl:g} is not a positive number of nats")
    if request.quantize is None:
        if request.max_kl is not None:
            raise BuildError("max_kl: it limits what --quantize may cost; leave it out, or quantise")
        return None
    if request.target == "cpu":
        reason = unsupported_reason("quantised weights", "cpu")
        raise BuildError(f"quantize: {reason}; use --target tensorrt-rtx")
    return Quantization(request.quantize)


def _dtype(asked: str, target: Target, stored: str) -> str:
    if asked not in DTYPES:
        raise BuildError(f"dtype: {asked!r} is unknown; choose one of {', '.join(DTYPES)}")
    if asked == "auto":
        return stored if stored in target.dtypes else "bfloat16"
    if asked not in target.dtypes:
        raise BuildError(
            f"dtype: {asked} is not supported on {target.name}; choose {' or '.join(target.dtypes)}"
        )
    return asked


def default_output(model: str, target: str, kind: str) -> Path:
    """artifacts/NAME-KIND, for other targets than the CPU artifacts/NAME-TARGET-KIND.

    NAME is the last part of a hub id or of a path, also of `.` and `..`.
    """
    name = Path(os.path.abspath(model)).name.removesuffix(".gguf")
    parts = [name, kind] if target == "cpu" else [name, target, kind]
    return Path("artifacts") / "-".join(parts)


def _absolute(model: str) -> str:
    """The path of a local model from the root, a hub id as it is."""
    path = Path(model).expanduser()
    return os.path.abspath(path) if path.exists() else model


def _source_hash() -> str:
    """Content of the code that makes bundles: a change of it makes a build a different one."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted((*root.glob("compile/**/*.py"), *root.glob("plugins_trt/**/*.py"))):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _facts(checkpoint: Checkpoint, model: nn.Module) -> ModelFacts:
    """What the manifest says of the model; `model` is it without memory."""
    config: Any = checkpoint.config
    try:
        geometry = kv_geometry(config)
        return ModelFacts(
            source=checkpoint.source,
            model_type=config.model_type,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
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
