"""The engine of the `cuda` target: compiled pieces, and attention in place on the pages between them.

    engine.json          pieces in order, with the values they read and write, and the attentions after each
    piece_0.pt2, ...     one AOTInductor package per class of pieces; pieces of a class differ in their weights alone
    weights.safetensors  weights of all pieces, which the packages take as inputs

Nothing here is about CUDA but the default of `attend`: on CPU tensors, with packages that were compiled for the CPU,
the same code runs with the PyTorch references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import BundleError, ConfigError, EngineError
from .cuda_kernels import register_kernels
from .paged_attention import paged_attention

ENGINE_FILE = "engine.json"
WEIGHTS_FILE = "weights.safetensors"
_REBUILD = "build the bundle again"


@dataclass(frozen=True, slots=True)
class AttentionProgram:
    """An attention of layer `layer`: names of the values it reads and writes, and the operator's other arguments.

    `sinks` and `alibi_slopes` are names in the weights file, or None.
    """

    layer: int
    query: str
    key: str
    value: str
    output: str
    scale: float
    window: int
    soft_cap: float
    k_scale: float
    v_scale: float
    sinks: str | None = None
    alibi_slopes: str | None = None


@dataclass(frozen=True, slots=True)
class PieceProgram:
    """`package` is a file of the bundle; `weights` are names in the weights file, in the order of its inputs."""

    package: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    attentions: tuple[AttentionProgram, ...]


@dataclass(frozen=True, slots=True)
class CudaProgram:
    """What the engine reads of `engine.json`. `kv_heads` and `head_dims` are per layer."""

    cache_dtype: str
    block_size: int
    kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    pieces: tuple[PieceProgram, ...]

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, directory: Path) -> CudaProgram:
        """Raises `BundleError` naming the file, and the field that is not as it should be."""
        path = directory / ENGINE_FILE
        try:
            program = _ADAPTER.validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{path}: cannot be read ({error}); {_REBUILD}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(str(part) for part in fault["loc"])
            raise BundleError(f"{path}: {field or 'content'}: {fault['msg']}; {_REBUILD}") from error
        if not program.pieces:
            raise BundleError(f"{path}: pieces: there is none; {_REBUILD}")
        return program


_ADAPTER: TypeAdapter[CudaProgram] = TypeAdapter(CudaProgram)

# Writes a step's K/V into their pages and returns the result of the attention `[T, Hq, D]`. Arguments: query, key,
# value, k_cache, v_cache, block_table, seq_lens, query_start_loc, the attention, its sinks, its ALiBi slopes, and the
# most rows that a sequence has.
Attend = Callable[..., Tensor]


def attend_with_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    attention: AttentionProgram,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    max_rows: int,
) -> Tensor:
    """`Attend` by the operator's PyTorch reference."""
    out, new_k, new_v = paged_attention(
        query, key, value, k_cache, v_cache, block_table, seq_lens, query_start_loc,
        attention.scale, attention.window, attention.soft_cap, sinks, alibi_slopes, attention.k_scale,
        attention.v_scale,
    )  # fmt: skip
    k_cache.copy_(new_k)
    v_cache.copy_(new_v)
    return out  # type: ignore[no-any-return]


def attend_with_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    attention: AttentionProgram,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    max_rows: int,
) -> Tensor:
    """`Attend` by the Triton kernels: in place, without synchronising. Tactics are chosen by shapes alone."""
    from .paged_attention_triton import paged_attention_

    out = torch.empty_like(query)
    paged_attention_(
        out, query, key, value, k_cache, v_cache, block_table, seq_lens, query_start_loc,
        attention.scale, attention.window, attention.soft_cap, sinks, alibi_slopes, attention.k_scale,
        attention.v_scale, max_rows=max_rows,
    )  # fmt: skip
    return out


class CudaEngine:
    """A loaded engine on `device` with `num_blocks` KV pages per layer, all zero. Not thread-safe.

    `attend` is how attention is computed; by default with the Triton kernels on a GPU, with the reference elsewhere.
    Raises `BundleError` naming the file that does not load, `ConfigError` when memory does not suffice.
    """

    def __init__(
        self, directory: Path, *, device: torch.device, num_blocks: int, attend: Attend | None = None
    ) -> None:
        self.program = program = CudaProgram.read(directory)
        is_cuda = device.type == "cuda"
        own_attend: Attend = attend_with_kernels if is_cuda else attend_with_reference
        self._attend = attend or own_attend
        if is_cuda:
            register_kernels()
        try:
            self._weights = _load_weights(directory / WEIGHTS_FILE, device, program)
            self._packages = {
                name: _load_package(directory / name, device)
                for name in dict.fromkeys(piece.package for piece in program.pieces)
            }
            self._caches = _allocate_pages(program, device, num_blocks)
        except BaseException as error:
            self.close()
            # What has been loaded must be free when this is caught, and tracebacks hold on to it.
            for fault in (error, error.__cause__):
                if fault is not None:
                    clear_frames(fault.__traceback__)
            raise

    def run(self, step: Mapping[str, Tensor], *, max_rows: int) -> Tensor:
        """One step: logits `[N, vocab]` float32, on the device and not waited for. Raises `EngineError` when closed.

        `step` has on the device what the flat graph takes besides pages: `input_ids` and `positions` `[1, T]`,
        `block_table` `[B, M]`, `seq_lens` `[B]`, `query_start_loc` `[B + 1]`, `logits_rows` `[N]`. No sequence has
        more than `max_rows` tokens in it.
        """
        if not self._packages:
            raise EngineError("the engine is closed")
        values = dict(step)
        results: Sequence[Tensor] = ()
        for piece in self.program.pieces:
            arguments = [values[name] for name in piece.inputs]
            arguments += [self._weights[name] for name in piece.weights]
            results = self._packages[piece.package].boxed_run(arguments)
            values.update(zip(piece.outputs, results, strict=True))
            for attention in piece.attentions:
                values[attention.output] = self._run_attention(attention, values, max_rows)
        return results[0]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, destination) in all layers, in order."""
        for source, destination in pairs:
            for caches in self._caches:
                for cache in caches:
                    cache[destination].copy_(cache[source])

    def close(self) -> None:
        """Give back weights and pages; nothing can be run after it. May be called again."""
        self._packages, self._weights, self._caches = {}, {}, []

    def _run_attention(
        self, attention: AttentionProgram, values: Mapping[str, Tensor], max_rows: int
    ) -> Tensor:
        constants = (attention.sinks, attention.alibi_slopes)
        return self._attend(
            values[attention.query],
            values[attention.key],
            values[attention.value],
            *self._caches[attention.layer],
            values["block_table"],
            values["seq_lens"],
            values["query_start_loc"],
            attention,
            *(None if name is None else self._weights[name] for name in constants),
            max_rows,
        )


def _load_weights(path: Path, device: torch.device, program: CudaProgram) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(path, device=str(device))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{path}: the weights do not fit into the free memory of {device}; free it, or build a smaller model"
        ) from error
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BundleError(f"{path}: cannot be read ({_first_line(error)}); {_REBUILD}") from error
    attentions = [attention for piece in program.pieces for attention in piece.attentions]
    named = {name for piece in program.pieces for name in piece.weights}
    named |= {name for a in attentions for name in (a.sinks, a.alibi_slopes) if name is not None}
    if missing := sorted(named - set(weights)):
        raise BundleError(f"{path}: has no {missing[0]}; {_REBUILD}")
    return weights


def _load_package(path: Path, device: torch.device) -> Any:
    index = -1 if device.index is None else device.index
    try:
        # Single-threaded: otherwise a run looks at the events of earlier ones, which no capture allows
        # (https://github.com/pytorch/pytorch/pull/148601).
        model = torch._inductor.aoti_load_package(str(path), run_single_threaded=True, device_index=index)
    except (RuntimeError, OSError) as error:
        raise BundleError(f"{path}: cannot be loaded ({_first_line(error)}); {_REBUILD}") from error
    return model.loader


def _allocate_pages(
    program: CudaProgram, device: torch.device, num_blocks: int
) -> list[tuple[Tensor, Tensor]]:
    """K and V `[num_blocks, block_size, Hkv, D]` of each layer. Zeros: what is masked is multiplied by 0."""
    dtype = getattr(torch, program.cache_dtype)
    caches = []
    try:
        for heads, dim in zip(program.kv_heads, program.head_dims, strict=True):
            shape = (num_blocks, program.block_size, heads, dim)
            caches.append(
                (
                    torch.zeros(shape, dtype=dtype, device=device),
                    torch.zeros(shape, dtype=dtype, device=device),
                )
            )
    except RuntimeError as error:  # torch has a type of its own for this on a GPU only
        raise ConfigError(
            f"kv_cache_memory: {num_blocks} blocks of KV pages cannot be allocated ({_first_line(error)}); lower it"
        ) from error
    return caches


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
