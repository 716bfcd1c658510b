"""The CPU engine: what `engine.json` says, and the one owner of Inductor's ahead-of-time runner.

An engine is a list of segments that read and write named values. An attending segment of a bfloat16 engine has two
libraries: one for any step, and one for steps in which every token is a row of its own (most are: decodes).

Names of a step's inputs: `input_ids`, `positions`
`[1, T]`, `logits_rows` `[N]`, `k_caches_<layer>`, `v_caches_<layer>`; segments that attend take the step's work
lists besides. The last segment writes the logits last; an engine that gives hidden states names their value.
"""

from __future__ import annotations

import json
import math
import mmap
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BundleError, ConfigError, EngineError
from .paged_attention_cpu import TILE, block_bytes, pack_work

ENGINE_FILE = "engine.json"
WEIGHTS_FILE = "weights.safetensors"

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class LibraryUse:
    """A library file of the bundle; `weights` maps its constants to tensors of the weights file."""

    file: str
    weights: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """`library` takes tiles, `row_library` a step without any; it is None where `library` takes none either."""

    library: LibraryUse
    row_library: LibraryUse | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """What `engine.json` holds. `kv_heads` and `head_dims` are per layer; `tile` is the query tokens of a tile.

    `hidden` is the value that holds the states which the logits were made from, None: the engine gives none.
    """

    dtype: str
    block_size: int
    use_tiles: bool
    tile: int
    windows: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    segments: tuple[SegmentProgram, ...]
    hidden: str | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of the K/V of `block_size` tokens in all layers."""
        return block_bytes(self.kv_heads, self.head_dims, self.block_size, getattr(torch, self.dtype))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, directory: Path) -> EngineProgram:
        """Raises `BundleError` when `engine.json` is missing, is not what this version writes or takes other tiles."""
        path = directory / ENGINE_FILE
        try:
            data = json.loads(path.read_text())
            segments = tuple(
                SegmentProgram(
                    LibraryUse(**s["library"]),
                    LibraryUse(**s["row_library"]) if s["row_library"] else None,
                    tuple(s["inputs"]),
                    tuple(s["outputs"]),
                    tuple(s["windows"]),
                )
                for s in data["segments"]
            )
            program = cls(
                dtype=data["dtype"],
                block_size=data["block_size"],
                use_tiles=data["use_tiles"],
                tile=data["tile"],
                windows=tuple(data["windows"]),
                kv_heads=tuple(data["kv_heads"]),
                head_dims=tuple(data["head_dims"]),
                segments=segments,
                hidden=data.get("hidden"),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(
                f"{path}: not a readable CPU engine ({error}); build the bundle again"
            ) from error
        if program.use_tiles and program.tile != TILE:
            raise BundleError(
                f"{path}: built for tiles of {program.tile} tokens, this version makes tiles of {TILE}; build the "
                "bundle again"
            )
        return program


@dataclass(frozen=True, slots=True)
class _Loaded:
    program: SegmentProgram
    runner: Any
    row_runner: Any


class CpuEngine:
    """A loaded engine with its KV pages: `num_blocks` usable ones and one that is never written.

    Not thread-safe. Memory: weights are copied once from the file into huge pages, K/V are allocated here. Raises
    `ConfigError` when there is not enough of it.
    """

    def __init__(self, directory: Path, *, num_blocks: int) -> None:
        self.program = program = EngineProgram.read(directory)
        dtype = getattr(torch, program.dtype)
        # Linux hands out AMX tile registers on request only; a bf16 GEMM dies of an illegal instruction without it.
        torch.cpu._init_amx()
        # The libraries point into these tensors without owning them.
        self._weights, arena = _load_weights(directory / WEIGHTS_FILE)
        # A library keeps its handles of the tensors for ever (AOTInductor does not delete them), so the memory behind
        # them is given back by hand.
        self._release = weakref.finalize(self, arena.madvise, mmap.MADV_DONTNEED)
        self._segments = [_load_segment(directory, segment, self._weights) for segment in program.segments]
        self._padding_page = num_blocks
        size = program.block_size
        self._values: dict[str, Tensor] = {}
        for layer, (heads, dim) in enumerate(zip(program.kv_heads, program.head_dims, strict=True)):
            self._values[f"k_caches_{layer}"] = _zeros((num_blocks + 1, heads, dim, size), dtype)
            self._values[f"v_caches_{layer}"] = _zeros((num_blocks + 1, heads, size, dim), dtype)

    def close(self) -> None:
        """Give back weights and KV pages; nothing can be run after it. May be called again."""
        self._segments, self._weights, self._values = [], {}, {}
        self._release()

    def run(
        self,
        input_ids: np.ndarray,  # [T]
        positions: np.ndarray,  # [T]
        block_table: np.ndarray,  # [B, M]
        seq_lens: np.ndarray,  # [B]
        query_start_loc: np.ndarray,  # [B + 1]
        logits_rows: np.ndarray,  # [N]
    ) -> tuple[Tensor, Tensor | None]:
        """One step: logits `[N, vocab]` float32, and hidden states `[N, hidden_size]` in the engine's dtype where it
        gives them. Raises `EngineError` when closed.
        """
        if not self._segments:
            raise EngineError("the engine is closed")
        program = self.program
        work = pack_work(
            block_table,
            seq_lens,
            query_start_loc,
            block_size=program.block_size,
            padding_page=self._padding_page,
            windows=program.windows,
            tile_dtype=getattr(torch, program.dtype) if program.use_tiles else None,
        )
        values = dict(self._values)
        values["input_ids"] = torch.from_numpy(input_ids)[None]
        values["positions"] = torch.from_numpy(positions)[None]
        values["logits_rows"] = torch.from_numpy(logits_rows)
        step = {w: [values["positions"], *work.arguments(i)] for i, w in enumerate(program.windows)}
        results: list[Tensor] = []
        for loaded in self._segments:
            segment = loaded.program
            inputs = [values[name] for name in segment.inputs]
            for window in segment.windows:
                inputs += step[window]
            runner = loaded.runner if work.tile_groups else loaded.row_runner
            results = runner.run(inputs)
            values.update(zip(segment.outputs, results, strict=True))
        return results[-1], None if program.hidden is None else values[program.hidden]

    @property
    def num_step_weight_bytes(self) -> int:
        """Weights that every step reads whole: all but the embedding, of which it reads a row per token."""
        read = {
            key
            for segment in self.program.segments
            if "input_ids" not in segment.inputs
            for key in (segment.row_library or segment.library).weights.values()
        }
        return sum(self._weights[key].nbytes for key in read)

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """Copy pages `[C, 2]` (source, destination) in all layers."""
        source, destination = torch.from_numpy(pairs[:, 0].copy()), torch.from_numpy(pairs[:, 1].copy())
        for cache in self._values.values():
            cache[destination] = cache[source]


def _load_segment(directory: Path, segment: SegmentProgram, weights: Mapping[str, Tensor]) -> _Loaded:
    runner = _load(directory, segment.library, weights)
    rows = segment.row_library
    return _Loaded(segment, runner, runner if rows is None else _load(directory, rows, weights))


def _load(directory: Path, library: LibraryUse, weights: Mapping[str, Tensor]) -> Any:
    path = directory / library.file
    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
        constants = {name: weights[key] for name, key in library.weights.items()}
        if constants:
            runner.update_constant_buffer(constants, False, True, True)
    except (RuntimeError, KeyError) as error:
        raise BundleError(f"{path}: cannot be loaded ({error}); build the bundle again") from error
    return runner


def _huge_pages(num_bytes: int, purpose: str, remedy: str) -> mmap.mmap:
    """Anonymous memory of zeros, in huge pages where the kernel has them.

    Raises `ConfigError` with the size between `purpose` and `remedy` when it cannot be had.
    """
    size = max(num_bytes, mmap.PAGESIZE)
    try:
        arena = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"{purpose}: {size >> 20} MiB cannot be allocated ({error.strerror}); {remedy}"
        ) from error
    with suppress(OSError, AttributeError):  # a kernel or a platform without them
        arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In huge pages: work items read pages of K/V all over the cache, and each 4 KiB of it would miss the TLB."""
    num_elements = math.prod(shape)
    arena = _huge_pages(num_elements * dtype.itemsize, "kv_cache_memory: K or V of one layer", "lower it")
    return torch.frombuffer(arena, dtype=dtype, count=num_elements).view(shape)


def _load_weights(path: Path) -> tuple[dict[str, Tensor], mmap.mmap]:
    """All tensors of a safetensors file, read once into an anonymous mapping with huge pages, and the mapping.

    Huge pages give up to 40% more read bandwidth than the 4 KiB pages of a mapped file. Format:
    https://huggingface.co/docs/safetensors/index#format
    """
    try:
        with path.open("rb", buffering=0) as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            total = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            arena = _huge_pages(total, f"{path}: weights", "free memory, or build a smaller model")
            view, done = memoryview(arena), 0
            while done < total:
                count = file.readinto(view[done:total])
                if not count:
                    raise ValueError(f"{total - done} bytes are missing")
                done += count
        buffer = torch.frombuffer(arena, dtype=torch.uint8)
        weights = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            weights[name] = buffer[start:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); build the bundle again") from error
    return weights, arena
