"""KV pages of one byte an element: which formats there are, and the scales of each layer, measured on the model.

The operator's contract says how a page holds `key / k_scale` (`plugins_trt/paged_attention.py`). Scales are static: one
for the keys and one for the values of a layer, constants of the graph. They are measured by running the exported graph
over text with pages that lose nothing, so they see what the engine will cache: rotary embedding, norms and quantised
weights included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..errors import BuildError
from ..features import unsupported_reason
from ..plugins_trt.paged_attention import FLOAT8_MAX
from ..plugins_trt.tensorrt import TENSORRT_RTX
from .export import KVGeometry
from .passages import CALIBRATION, EVALUATION, token_ids
from .proof import ProofResult, Trace, compare, exported_step, flat_steps
from .segments import PAGED_ATTENTION, with_scales

KV_CACHE_DTYPES = ("auto", "fp8", "int8")  # vLLM's names
_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# The largest number of a format, and how far above the largest element that was seen it lies. What is larger saturates.
# Room costs int8 a part of its steps, but float8 only its smallest numbers: it has 15 binary orders of full precision.
_LARGEST = {torch.float8_e4m3fn: FLOAT8_MAX, torch.int8: 127.0}
_ROOM = {torch.float8_e4m3fn: 2.0, torch.int8: 1.25}

_MAX_PASSAGE = 256  # tokens of a calibration text
# What one byte may cost, as a relative error of the logits on text. Healthy models lose 0.03 to 0.1.
_MAX_ERROR = 0.2
# An engine that rounds elsewhere than the exported graph has a part of its error in other places.
_MAX_ERROR_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Scales of each layer, float32 numbers, and the largest elements of its keys and values that they come from."""

    k_scales: tuple[float, ...]
    v_scales: tuple[float, ...]
    largest_keys: tuple[float, ...]
    largest_values: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def quantised_dtype(asked: str, target: str) -> torch.dtype | None:
    """What `--kv-cache-dtype` asks for, None: pages of the model's own dtype. Raises `BuildError` naming the option."""
    if asked not in KV_CACHE_DTYPES:
        raise BuildError(f"kv_cache_dtype: {asked!r} is unknown; choose one of {', '.join(KV_CACHE_DTYPES)}")
    reason = None if asked == "auto" else unsupported_reason("one-byte KV pages", target)
    if reason is not None:
        raise BuildError(
            f"kv_cache_dtype: {asked} is not supported on {target}: {reason}; leave it out, or build with --target "
            f"{TENSORRT_RTX}"
        )
    return _DTYPES.get(asked)


def calibrate(
    program: ExportedProgram,
    geometry: Sequence[KVGeometry],
    tokenizer: Any,
    config: Any,
    *,
    cache_dtype: torch.dtype,
    block_size: int,
) -> CacheScales:
    """Measure `program`, as it was exported, on text; the scales for `cache_dtype` become constants of its graph.

    Raises `BuildError` naming a layer whose keys or values are not finite.
    """
    longest = min(_MAX_PASSAGE, config.max_position_embeddings)
    texts = tuple(token_ids(tokenizer, text, config.vocab_size)[:longest] for text in CALIBRATION)
    trace = Trace((tuple((i, len(ids)) for i, ids in enumerate(texts)),), texts, (), block_size, 0.0)
    # Pages of float32 lose nothing of what they are given.
    run = exported_step(program, geometry, trace, torch.float32)
    for step in flat_steps(trace):
        run(step)
    keys, values = ([float(cache.abs().max()) for cache in caches] for caches in (run.k_caches, run.v_caches))
    k_scales = [_scale(layer, "keys", largest, cache_dtype) for layer, largest in enumerate(keys)]
    v_scales = [_scale(layer, "values", largest, cache_dtype) for layer, largest in enumerate(values)]
    for node, k_scale, v_scale in zip(_attention_nodes(program), k_scales, v_scales, strict=True):
        with_scales(node, k_scale, v_scale)
    program.graph_module.recompile()
    return CacheScales(tuple(k_scales), tuple(v_scales), tuple(keys), tuple(values))


def evaluation_ids(tokenizer: Any, config: Any) -> np.ndarray:
    """Text that no scale was measured on, for `record`."""
    return token_ids(tokenizer, EVALUATION, config.vocab_size)


def measure(
    trace: Trace, program: ExportedProgram, geometry: Sequence[KVGeometry], cache_dtype: torch.dtype
) -> ProofResult:
    """What pages of `cache_dtype` cost a calibrated `program`. Raises `BuildError` if it is too much."""
    return compare(
        trace,
        exported_step(program, geometry, trace, cache_dtype),
        f"{_NAMES[cache_dtype]} KV cache",
        tolerance=_MAX_ERROR,
        remedy="build with --kv-cache-dtype auto, or try the other format",
    )


def engine_tolerance(trace: Trace, measured: ProofResult) -> float:
    """The relative error that an engine may have against the model; `measured` is that of its graph with its pages."""
    return max(trace.tolerance, _MAX_ERROR_RATIO * measured.relative_error)


def _attention_nodes(program: ExportedProgram) -> Iterator[Node]:
    """In the order of their layers: node i reads `k_caches_i`."""
    nodes = program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION)
    return iter(sorted(nodes, key=_layer))


def _layer(node: Node) -> int:
    k_cache = node.args[3]
    assert isinstance(k_cache, Node)
    return int(k_cache.name.rpartition("_")[2])


def _scale(layer: int, kind: str, largest: float, dtype: torch.dtype) -> float:
    if not math.isfinite(largest):
        raise BuildError(
            f"kv_cache_dtype: {kind} of layer {layer} are not finite on the calibration text, so they have no scale; "
            "build with --kv-cache-dtype auto, or in bfloat16"
        )
    # Layers whose keys or values are all zero fit any scale.
    return float(np.float32(largest * _ROOM[dtype] / _LARGEST[dtype])) or 1.0
