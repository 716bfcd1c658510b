"""Where each tensor of a safetensors checkpoint lives, known from the headers alone.

Opening a checkpoint reads a few kilobytes per file, and that is enough to find a missing, cut or mixed-up
shard before anything slow starts. With an index file the index decides: files and tensor copies that it does
not name are ignored, with a warning. Without one, a tensor found in two files is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from ..errors import BuildError

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"

# Bytes per element by the names of the safetensors format; sub-byte types are not checkpoints we can load.
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: `shape` as the file says, `dtype` before any conversion, `file` that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


class Weights(Protocol):
    """The tensors of a checkpoint, whatever the file format."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor that counts, by its name in the checkpoint."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """The files whose contents decide the weights."""
        ...

    def open(self) -> Any:
        """Context manager: name -> object whose `[...]` reads that tensor (and nothing before that)."""
        ...


@dataclass(frozen=True, slots=True)
class SafetensorsWeights:
    """Implements `Weights` over one or more safetensors files; `warnings` says what was left out."""

    infos: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    warnings: tuple[str, ...]

    @contextmanager
    def open(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            handles = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in {info.file for info in self.infos.values()}
            }
            yield {name: handles[info.file].get_slice(name) for name, info in self.infos.items()}


def find_safetensors(directory: Path) -> SafetensorsWeights:
    """Index the weights of a Hugging Face directory. `BuildError` names the file and the tensors at fault."""
    index = directory / INDEX_NAME
    if index.is_file():
        return _from_index(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise BuildError(_no_weights(directory))
    return _from_files(directory, files)


def most_common_dtype(infos: Mapping[str, TensorInfo]) -> torch.dtype:
    """The dtype that holds the most elements."""
    counts: dict[torch.dtype, int] = {}
    for info in infos.values():
        counts[info.dtype] = counts.get(info.dtype, 0) + math.prod(info.shape)
    return max(counts, key=lambda dtype: counts[dtype])


def name_some(names: Sequence[str] | set[str], limit: int = 5) -> str:
    """`a, b, c and 7 more`, sorted: error messages stay one readable line."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def _from_index(directory: Path, index: Path) -> SafetensorsWeights:
    weight_map = _read_weight_map(index)
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    absent = sorted(file for file in by_file if not (directory / file).is_file())
    if absent:
        names = [name for file in absent for name in by_file[file]]
        raise BuildError(
            f"{directory}: {name_some(absent)} is named in {INDEX_NAME} but missing (it holds "
            f"{len(names)} tensors: {name_some(names)}). Download the checkpoint again."
        )
    infos: dict[str, TensorInfo] = {}
    warnings: list[str] = []
    for file, names in sorted(by_file.items()):
        header = read_header(directory / file)
        lost = [name for name in names if name not in header]
        if lost:
            raise BuildError(
                f"{directory / file}: does not hold {name_some(lost)}, although {INDEX_NAME} says so. The "
                "file is another shard or from another revision; download the checkpoint again."
            )
        infos.update((name, header[name]) for name in names)
        copies = sorted(header.keys() - set(names))
        if copies:
            warnings.append(
                f"{file}: {len(copies)} tensors that {INDEX_NAME} does not place there are ignored "
                f"({name_some(copies)})"
            )
    warnings.extend(
        f"{path.name} is ignored: {INDEX_NAME} does not name it"
        for path in sorted(directory.glob("*.safetensors"))
        if path.name not in by_file
    )
    return SafetensorsWeights(infos, tuple(directory / file for file in sorted(by_file)), tuple(warnings))


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(
            f"{index}: not a safetensors index ({error}). Download the checkpoint again."
        ) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise BuildError(f"{index}: `weight_map` is empty. Download the checkpoint again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise BuildError(f"{index}: tensor {name} is placed in {file!r}, which is not a file name")
    return weight_map


def _from_files(directory: Path, files: list[Path]) -> SafetensorsWeights:
    warnings: list[str] = []
    if directory / _SINGLE_NAME in files:
        # Mistral's own format, published beside the Hugging Face one: the same weights under other names.
        for path in [path for path in files if path.name.startswith("consolidated")]:
            files.remove(path)
            warnings.append(f"{path.name} is ignored: {_SINGLE_NAME} is the Hugging Face copy of the weights")
    infos: dict[str, TensorInfo] = {}
    for path in files:
        header = read_header(path)
        both = [name for name in header if name in infos]
        if both:
            raise BuildError(
                f"{directory}: {name_some(both)} is in both {infos[both[0]].file.name} and {path.name}, and "
                f"there is no {INDEX_NAME} to say which counts. Remove the file that does not belong."
            )
        infos.update(header)
    return SafetensorsWeights(infos, tuple(files), tuple(warnings))


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; `BuildError` if its size is not what the header promises."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("the header is cut")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        infos = {name: _tensor_info(entry, path) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path}: not a safetensors file ({error}). Download it again.") from error
    if size != 8 + length + end:
        raise BuildError(
            f"{path}: is {size} bytes, but its header describes {8 + length + end} ({len(infos)} tensors: "
            f"{name_some(list(infos))}). The file is cut or damaged; download it again."
        )
    return infos


def _tensor_info(entry: dict[str, Any], path: Path) -> TensorInfo:
    shape = tuple(int(size) for size in entry["shape"])
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"tensors of type {entry['dtype']} are not supported")
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {list(shape)} and type {entry['dtype']} has {end - begin} bytes")
    return TensorInfo(shape, dtype, path)


def _no_weights(directory: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in directory.glob(pattern))
    if pickles:
        return (
            f"{directory}: only pickled weights ({name_some(pickles)}), which run code when loaded. Use the "
            "safetensors files of this model, or convert them with `save_pretrained` of transformers."
        )
    return f"{directory}: no weights: expected *.safetensors files"
