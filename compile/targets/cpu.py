"""The `cpu` target: each class of layers becomes one Inductor library; weights stand beside them, packed for its GEMMs.

What it writes into a directory:

    engine.json          the program: segments in order, with the values they read and write (`plugins_trt.cpu_engine`)
    prologue.so, layer_0.so, ..., epilogue.so      one library per class of segments
    layer_0_rows.so, ...                           the same without tiles, where the first has tiles
    weights.safetensors  constants of all segments, read at load; tied weights are stored once per layout

GEMMs are Inductor's C++ templates with weights packed at build time. A template accumulates each output element
over K in one fixed order, whatever the number of rows, so float32 results do not depend on batching.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule, Node

from ...errors import BuildError
from ...plugins_trt.cpu_engine import ENGINE_FILE, WEIGHTS_FILE, EngineProgram, LibraryUse, SegmentProgram
from ...plugins_trt.paged_attention_cpu import (
    ROW_FIELDS,
    STEP_FIELDS,
    TILE,
    TILE_FIELDS,
    RowWork,
    TileGroup,
    attend,
    uses_tiles,
    write_kv,
)
from ..export import KVGeometry, first_line
from ..segments import Attention, Segment, SegmentModule, attention_of, get_weight, step_results

log = logging.getLogger(__name__)

# Sizes of the example step. None is 1, which would be specialised; none equals another, or what would otherwise be
# dynamic could be taken for the same: also not a group's positions (pages times any block size) and `TILE`. Tokens are
# as many as in the exported program's own example.
_TOKENS, _ITEMS, _ROWS, _ITEMS_PER_ROW, _BLOCKS = 7, 13, 5, 3, 11
_TILE_GROUPS = ((6, 17), (9, 19))  # (tiles, pages) of the short and of the long group

_INDUCTOR_OPTIONS: dict[str, Any] = {
    "freezing": True,
    "always_keep_tensor_constants": True,  # small weights too: a literal would be one layer's value in all layers
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "assert_indirect_indexing": False,  # indices come from the block tables that we made
    "cpp.enable_floating_point_contract_flag": "fast",
    "cpp.dynamic_threads": True,  # the number of threads is the runtime's choice, up to that of the parts of a GEMM
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}


def lower(
    graph_module: GraphModule,
    segments: list[Segment],
    geometry: tuple[KVGeometry, ...],
    *,
    dtype: torch.dtype,
    block_size: int,
    num_threads: int,
    directory: Path,
    on_progress: Callable[[str], None] = lambda _: None,
) -> EngineProgram:
    """Compile `segments` into `directory`. Raises `BuildError` naming the segment that Inductor refuses.

    GEMMs are cut into `num_threads` parts, so that no more threads ever share them.
    """
    attentions = [attention_of(node) for segment in segments for node in segment.attention()]
    windows = tuple(sorted({a.window for a in attentions}))
    _check(attentions)
    has_sinks = any(a.sinks is not None for a in attentions)
    use_tiles = uses_tiles(dtype, (a.soft_cap for a in attentions), has_sinks=has_sinks)
    lowering = _Lowering(graph_module, geometry, dtype, block_size, num_threads)
    classes: dict[Hashable, tuple[_Library, _Library | None]] = {}
    programs = []
    store = _WeightStore()
    for segment in segments:
        if not segment.nodes:
            continue
        signature = segment.signature(graph_module)
        if signature not in classes:
            library_name = segment.name.replace(".", "_")
            has_tiles = use_tiles and any(segment.attention())
            on_progress(f"compiling {segment.name}")
            library = lowering.compile(segment, directory / f"{library_name}.so", use_tiles=has_tiles)
            row_library = None
            if has_tiles:
                on_progress(f"compiling {segment.name} for decodes")
                row_library = lowering.compile(
                    segment, directory / f"{library_name}_rows.so", use_tiles=False
                )
            classes[signature] = library, row_library
        library, row_library = classes[signature]
        programs.append(
            SegmentProgram(
                library=store.use(library, graph_module, segment),
                row_library=store.use(row_library, graph_module, segment) if row_library else None,
                inputs=tuple(node.name for node in segment.inputs),
                outputs=tuple(node.name for node in segment.outputs),
                windows=tuple(attention_of(node).window for node in segment.attention()),
            )
        )
    save_file(store.tensors, directory / WEIGHTS_FILE)
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors creates it for its owner alone
    logits, *hidden = step_results(graph_module)
    assert programs[-1].outputs[-1] == logits.name  # they depend on all that the last segment returns
    program = EngineProgram(
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        use_tiles=use_tiles,
        tile=TILE,
        windows=windows,
        kv_heads=tuple(g.num_heads for g in geometry),
        head_dims=tuple(g.head_dim for g in geometry),
        segments=tuple(programs),
        hidden=hidden[0].name if hidden else None,
    )
    (directory / ENGINE_FILE).write_text(json.dumps(program.to_json(), indent=1) + "\n")
    return program


def _check(attentions: list[Attention]) -> None:
    """Raise `BuildError` for what `attend` has not."""
    for layer, attention in enumerate(attentions):
        if attention.alibi_slopes is not None:
            raise BuildError(f"layer {layer} has ALiBi slopes: the cpu target has none")
        if (attention.k_scale, attention.v_scale) != (1.0, 1.0):
            raise BuildError(f"layer {layer} has a quantised KV cache: the cpu target has none")


class _WeightStore:
    """Tensors by name, each content once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Hashable, str] = {}

    def add(self, named: tuple[Hashable, Tensor]) -> str:
        key, tensor = named
        if key not in self._names:
            name = f"w{len(self.tensors)}"
            self._names[key] = name
            self.tensors[name] = tensor.contiguous().clone()
        return self._names[key]

    def use(self, library: _Library, graph_module: GraphModule, segment: Segment) -> LibraryUse:
        """`library` with its constants made from the weights of `segment`."""
        weights = {c: self.add(library.constant(c, graph_module, segment)) for c in library.recipes}
        return LibraryUse(library.path.name, weights)


Recipe = tuple[int, str, Callable[[Tensor], Tensor]]  # weight index, name of the layout, how to make it


@dataclass(frozen=True)
class _Library:
    """A compiled class and how each of its constants is made from a member's weights (or is the same for all)."""

    path: Path
    recipes: dict[str, Recipe | Tensor]

    def constant(self, name: str, graph_module: GraphModule, segment: Segment) -> tuple[Hashable, Tensor]:
        recipe = self.recipes[name]
        if isinstance(recipe, Tensor):
            return (self.path.name, name), recipe
        index, layout, make = recipe
        weight = get_weight(graph_module, segment.weights[index])
        return (weight.data_ptr(), tuple(weight.shape), layout), make(weight)


class _Lowering:
    def __init__(
        self,
        graph_module: GraphModule,
        geometry: tuple[KVGeometry, ...],
        dtype: torch.dtype,
        block_size: int,
        num_threads: int,
    ) -> None:
        self._graph_module = graph_module
        self._geometry = geometry
        self._dtype = dtype
        self._block_size = block_size
        self._options = {**_INDUCTOR_OPTIONS, "cpp.threads": num_threads}

    def compile(self, segment: Segment, path: Path, *, use_tiles: bool) -> _Library:
        generator = torch.Generator().manual_seed(0)
        weights = [_stand_in(get_weight(self._graph_module, name), generator) for name in segment.weights]
        module = SegmentModule(segment, weights, self._attention)
        inputs, input_shapes = self._example_inputs(segment)
        extras, extra_shapes = self._example_extras(segment, use_tiles)
        try:
            with torch.no_grad():
                program = torch.export.export(
                    module, (inputs, extras), dynamic_shapes=(input_shapes, extra_shapes), strict=False
                )
                files = torch._inductor.aot_compile(
                    program.module(check_guards=False), (inputs, extras), options=dict(self._options)
                )
        except Exception as error:
            raise BuildError(f"Inductor refused {segment.name}: {first_line(error)}") from error
        (library,) = [f for f in files if isinstance(f, str) and f.endswith(".so")]
        shutil.copyfile(library, path)
        constants: dict[str, Any] = next((f for f in files if not isinstance(f, str)), {})
        recipes = {name: _recipe(value, weights) for name, (value, _) in constants.items()}
        for name, recipe in recipes.items():
            if isinstance(recipe, Tensor) and recipe.is_floating_point():
                raise BuildError(
                    f"{segment.name}: the compiler made a constant {name} {tuple(recipe.shape)} that is none of the "
                    "layer's weights in a layout known here, so it cannot be made for the other layers"
                )
        return _Library(path, recipes)

    def _attention(self, node: Node, values: dict[Node, Any], extras: tuple[Tensor, ...]) -> Tensor:
        """The operator in the form this target compiles; caches are written in place."""
        query, key, value, k_cache, v_cache = (values[cast("Node", a)] for a in node.args[:5])
        positions, slot_page, slot_offset, output_index, *work = extras
        rows, tiles = RowWork(*work[: len(ROW_FIELDS)]), work[len(ROW_FIELDS) :]
        size = len(TILE_FIELDS)
        groups = [TileGroup(*tiles[i : i + size]) for i in range(0, len(tiles), size)]
        attention = attention_of(node)
        write_kv((slot_page, slot_offset), key, value, k_cache, v_cache)
        return attend(
            query, k_cache, v_cache, positions[0], rows, groups, output_index,
            attention.scale, attention.window, attention.soft_cap,
            None if attention.sinks is None else values[attention.sinks],
        )  # fmt: skip

    def _example_inputs(self, segment: Segment) -> tuple[list[Tensor], list[dict[int, Any]]]:
        tensors, shapes = [], []
        for node in segment.inputs:
            fake = node.meta["val"]
            if node.name.startswith(("k_caches_", "v_caches_")):
                shape = self._page_shape(node.name)
                tensors.append(torch.zeros(shape, dtype=self._dtype))
                shapes.append({0: Dim.DYNAMIC})
                continue
            sizes = [s if isinstance(s, int) else s.node.hint for s in fake.shape]
            tensors.append(torch.zeros(sizes, dtype=fake.dtype))
            shapes.append({i: Dim.DYNAMIC for i, s in enumerate(fake.shape) if not isinstance(s, int)})
        return tensors, shapes

    def _page_shape(self, name: str) -> tuple[int, ...]:
        kind, _, layer = name.partition("_caches_")
        g = self._geometry[int(layer)]
        if kind == "k":
            return (_BLOCKS, g.num_heads, g.head_dim, self._block_size)
        return (_BLOCKS, g.num_heads, self._block_size, g.head_dim)

    def _example_extras(self, segment: Segment, use_tiles: bool) -> tuple[list[Tensor], list[dict[int, Any]]]:
        """What an attending segment takes besides its inputs, and which of its sizes are dynamic."""
        if not any(segment.attention()):
            return [], []
        sizes: dict[str, tuple[int, ...]] = {
            "positions": (1, _TOKENS), **dict.fromkeys(STEP_FIELDS, (_TOKENS,)),
            "item_query": (_ITEMS,), "item_page": (_ITEMS,), "item_start": (_ITEMS,),
            "row_items": (_ROWS, _ITEMS_PER_ROW),
        }  # fmt: skip
        names = ("positions", *STEP_FIELDS, *ROW_FIELDS)
        tensors = [torch.zeros(sizes[name], dtype=torch.long) for name in names]
        shapes = [{d: Dim.DYNAMIC for d in range(len(sizes[n])) if (n, d) != ("positions", 0)} for n in names]
        for tiles, pages in _TILE_GROUPS if use_tiles else ():
            mask = torch.zeros(tiles, 1, TILE, pages * self._block_size, dtype=self._dtype)
            tensors += [torch.zeros(tiles, TILE).long(), torch.zeros(tiles, pages).long(), mask]
            shapes += [dict.fromkeys(dims, Dim.DYNAMIC) for dims in ((0,), (0, 1), (0, 3))]
        return tensors, shapes


def _stand_in(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Random values of the same form, to compile a class with.

    Real ones could be special (norm weights of all ones would be folded away, for all layers of the class) or equal
    to each other, and then a constant could not be told apart by content.
    """
    if not weight.is_floating_point():
        return weight
    return torch.randn(weight.shape, generator=generator).to(weight.dtype)


def _recipe(constant: Tensor, weights: list[Tensor]) -> Recipe | Tensor:
    """How `constant` is made from one of `weights`, found by content: the candidate must equal it bit for bit.

    Itself if it is made from none of them.
    """
    for index, weight in enumerate(weights):
        if weight.dtype != constant.dtype:
            continue
        for name, make in _layouts(weight, constant):
            made = make(weight)
            if made.shape == constant.shape and torch.equal(made, constant):
                return index, name, make
    return constant


def _layouts(weight: Tensor, constant: Tensor) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Candidate layouts of `weight` `[N, K]` that have the shape of `constant`."""
    layouts: list[tuple[str, Callable[[Tensor], Tensor]]] = [("plain", lambda w: w)]
    if weight.dim() != 2:
        return layouts
    layouts.append(("transposed", lambda w: w.t().contiguous()))
    if constant.dim() >= 3 and constant.numel() >= weight.numel():
        blocks, width = constant.shape[0], constant.shape[-1]
        layouts.append((f"blocked{tuple(constant.shape)}", lambda w: _blocked(w, blocks, width, 1)))
        layouts.append((f"vnni{tuple(constant.shape)}", lambda w: _blocked(w, blocks, width, 2)))
    return layouts


def _blocked(weight: Tensor, blocks: int, width: int, vnni: int) -> Tensor:
    """[N, K] -> [blocks, K, width]: blocks of columns of the transpose, rows interleaved by `vnni` (AMX in bf16)."""
    n, k = weight.shape
    padded = (
        torch.nn.functional.pad(weight.t(), (0, blocks * width - n)) if blocks * width >= n else weight.t()
    )
    if blocks * width != padded.shape[1]:
        return padded
    blocked = padded.reshape(k, blocks, width).transpose(0, 1).contiguous()
    if vnni > 1 and k % vnni == 0:
        blocked = blocked.view(blocks, k // vnni, vnni, width).transpose(2, 3).reshape(blocks, k, width)
    return blocked.contiguous()
