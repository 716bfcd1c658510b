"""What `engine.json` says of a TensorRT plan: page layout, plugins and the shapes that each profile was built for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import BundleError

PLAN_FILE = "engine.plan"
ENGINE_FILE = "engine.json"
DECODE_PROFILE = "decode"

# The inputs whose shapes change from step to step, with numpy's name of their dtype.
STEP_INPUTS: Mapping[str, str] = {
    "input_ids": "int64",
    "positions": "int64",
    "block_table": "int32",
    "seq_lens": "int32",
    "query_start_loc": "int32",
    "logits_rows": "int64",
}
LOGITS = "logits"
CACHE_ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The ranges of shapes that one optimisation profile was built for: by input, smallest, typical, largest."""

    name: str
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]

    def largest(self, name: str) -> Shape:
        return self.shapes[name][2]

    def fault(self, shapes: Mapping[str, Shape]) -> str | None:
        """The first input of `shapes` that lies outside, with its shape and its range; None if all lie within."""
        for name, shape in shapes.items():
            low, _, high = self.shapes[name]
            is_within = len(shape) == len(low) and all(
                a <= size <= b for a, size, b in zip(low, shape, high, strict=True)
            )
            if not is_within:
                return f"{name}: shape {shape} is outside {low} to {high}, which profile {self.name} was built for"
        return None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`engine.json`. `kv_heads` and `head_dims` are per layer; `gpus` are the compute capabilities that the plan was
    built for, such as `8.9` (empty: any that TensorRT accepts).
    """

    target: str
    dtype: str
    cache_dtype: str
    block_size: int
    kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    vocab_size: int
    plugins: tuple[str, ...]
    profiles: tuple[EngineProfile, ...]
    gpus: tuple[str, ...] = ()

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, directory: Path, rebuild: str) -> EngineFacts:
        """Parse `engine.json` of a bundle. Raises `BundleError` naming the field; `rebuild` says what to do then."""
        file = directory / ENGINE_FILE
        try:
            facts = _ADAPTER.validate_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{file}: cannot be read ({error}); {rebuild}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(str(part) for part in fault["loc"])
            raise BundleError(f"{file}: {field or 'content'}: {fault['msg']}; {rebuild}") from error
        if problem := facts._fault():
            raise BundleError(f"{file}: {problem}; {rebuild}")
        return facts

    @property
    def num_layers(self) -> int:
        return len(self.kv_heads)

    @property
    def cache_names(self) -> tuple[str, ...]:
        """Names of the page tensors; output `<name>_out` is written in place."""
        return tuple(f"{kind}_{i}" for kind in ("k_caches", "v_caches") for i in range(self.num_layers))

    @property
    def block_bytes(self) -> int:
        """Bytes of the K/V of `block_size` tokens in all layers."""
        return sum(self.page_bytes(name) for name in self.cache_names)

    def page_bytes(self, cache: str) -> int:
        """Bytes of one block in one page tensor."""
        return CACHE_ITEM_SIZES[self.cache_dtype] * math.prod(self._page(cache))

    def cache_shape(self, cache: str, num_blocks: int) -> Shape:
        return (num_blocks, *self._page(cache))

    @property
    def widest(self) -> EngineProfile:
        """The profile that takes the most tokens: the one that must hold whatever the scheduler plans."""
        return max(self.profiles, key=lambda profile: profile.largest("input_ids"))

    def _page(self, cache: str) -> Shape:
        layer = int(cache.rpartition("_")[2])
        return (self.block_size, self.kv_heads[layer], self.head_dims[layer])

    def _fault(self) -> str | None:
        if self.cache_dtype not in CACHE_ITEM_SIZES:
            return f"cache_dtype: {self.cache_dtype!r} is not among {', '.join(CACHE_ITEM_SIZES)}"
        if not self.kv_heads or len(self.kv_heads) != len(self.head_dims):
            return "kv_heads: must name as many layers as head_dims, and at least one"
        if min(self.block_size, self.vocab_size, *self.kv_heads, *self.head_dims) < 1:
            return "block_size, vocab_size, kv_heads and head_dims must be positive"
        if not self.profiles:
            return "profiles: there is none"
        for profile in self.profiles:
            missing = sorted({*STEP_INPUTS, *self.cache_names} - set(profile.shapes))
            if missing:
                return f"profiles: {profile.name} has no shapes for {', '.join(missing)}"
        return None


_ADAPTER: TypeAdapter[EngineFacts] = TypeAdapter(EngineFacts)
