"""Paged attention for the CPU, in torch operators that Inductor fuses into vector loops: no C++ of our own.

Two forms read the same pages, both driven by lists that numpy makes once per step (`pack_work`):

- *Rows*: one query token per row. Work is cut into items (row, page), so ragged contexts cost what they hold and
  nothing is padded. An item yields its largest score, its sum of exponentials and its weighted values; a row then
  combines its items, as in flash-decoding (https://pytorch.org/blog/flash-decoding). An item depends on its row and
  its page alone and a row adds its items in order of position: results do not depend, bitwise, on how the
  tokens were batched or chunked.
- *Tiles*: up to `TILE` query tokens of one sequence against its pages up to the last of them, gathered for the
  fused SDPA. Tiles are padded to a common number of pages, so they come in two groups, the short and the long ones:
  a causal prompt of one group would read twice what it needs. Faster for prompts, not invariant: only for reduced
  precision.

Pages on this target (keys transposed, so that scores of neighbouring positions are neighbours in a vector):

    k_cache [num_blocks + 1, Hkv, D, block_size]
    v_cache [num_blocks + 1, Hkv, block_size, D]

The last page is never written: padding items and tiles point at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

TILE = 128
# Chunks of up to this many tokens are cheaper as rows than as a padded tile.
MAX_ROWS_PER_SEQUENCE = 8

# A finite stand-in for minus infinity: a wholly masked item has weight exp(MASKED - top) = 0 and no NaN.
_MASKED = -1e30
# A start position that masks an item whole.
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class RowWork:
    """R rows of at most J items, W items in all; int64."""

    item_query: Tensor  # [W] index of the query token, in [0, T)
    item_page: Tensor  # [W]
    item_start: Tensor  # [W] position of the page's first key
    row_items: Tensor  # [R, J] items of a row in order of position, padded with the masked last item


@dataclass(frozen=True, slots=True)
class TileGroup:
    """X tiles of at most P pages."""

    query: Tensor  # [X, TILE] int64, query tokens; the last one repeats in a partial tile
    page: Tensor  # [X, P] int64
    mask: Tensor  # [X, 1, TILE, P * block_size] in the dtype of the pages: 0 or minus infinity, added to the scores


# Names of what the layers of one window read in a step, in the order of the graph's inputs: what all windows share,
# `RowWork`, then two `TileGroup`s.
STEP_FIELDS = ("slot_page", "slot_offset", "output_index")
ROW_FIELDS = tuple(f.name for f in fields(RowWork))
TILE_FIELDS = tuple(f.name for f in fields(TileGroup))


def uses_tiles(dtype: torch.dtype, soft_caps: Iterable[float], *, has_sinks: bool = False) -> bool:
    """Whether an engine of this dtype, whose layers have these soft caps (0: none), attends prompts in tiles.

    Tiles round differently from rows, which float32 promises not to, and the fused SDPA knows neither soft caps nor
    sinks.
    """
    return dtype != torch.float32 and not any(soft_caps) and not has_sinks


def block_bytes(
    kv_heads: Sequence[int], head_dims: Sequence[int], block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of the K/V of one block in all layers; heads and their dimensions are per layer."""
    return 2 * dtype.itemsize * block_size * sum(h * d for h, d in zip(kv_heads, head_dims, strict=True))


def write_kv(
    cache_index: tuple[Tensor, Tensor], key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    """Put `key`, `value` `[T, Hkv, D]` at (page, offset) of each token, in place.

    Non-finite values become 0: a masked position has weight 0, and 0 * inf would carry one sequence's overflow into
    whoever owns the page next. (The sequence itself ends with an error: its logits are not finite.)
    """
    page, offset = cache_index
    torch.ops.aten.index_put_(k_cache, [page, None, None, offset], _finite(key))
    torch.ops.aten.index_put_(v_cache, [page, None, offset], _finite(value))


def _finite(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def attend(
    query: Tensor,  # [T, Hq, D]
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,  # [T]
    rows: RowWork,
    tile_groups: Sequence[TileGroup],
    output_index: Tensor,  # [T] where each token's output stands: rows first, then the groups of tiles
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,  # [Hq] float32
) -> Tensor:
    """Attention of all tokens of a step, `[T, Hq, D]`; the step's K/V are in the pages already.

    Without `tile_groups` the step must be packed with every token a row, as one with a soft cap or sinks must.
    """
    out = _attend_rows(query, k_cache, v_cache, positions, rows, scale, window, soft_cap, sinks)
    if tile_groups:
        out = torch.cat(
            [out, *(_attend_tiles(query, k_cache, v_cache, group, scale) for group in tile_groups)]
        )
    return out[output_index]


def materialise(tensor: Tensor) -> Tensor:
    """Make Inductor store `tensor` once instead of computing it again in each of its readers."""
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.shape, tensor.stride())


def _visible(key_positions: Tensor, query_positions: Tensor, window: int) -> Tensor:
    visible = key_positions <= query_positions
    if window:
        visible = visible & (key_positions > query_positions - window)
    return visible


def _attend_rows(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    work: RowWork,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """[R, Hq, D]. The query heads of one KV head are written out, so that they share one read of the page."""
    num_kv_heads, head_dim, block_size = k_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    queries = materialise(query.float() * scale).view(-1, num_kv_heads, group, head_dim)
    keys = k_cache[work.item_page].float()  # [W, Hkv, D, bs]
    values = v_cache[work.item_page].float()  # [W, Hkv, bs, D]
    key_positions = work.item_start[:, None] + torch.arange(block_size)
    visible = _visible(key_positions, positions[work.item_query][:, None], window)[:, None]  # [W, 1, bs]

    scores = [
        (queries[:, :, g][work.item_query][..., None] * keys).sum(2) for g in range(group)
    ]  # [W, Hkv, bs]
    if soft_cap:
        scores = [soft_cap * torch.tanh(s / soft_cap) for s in scores]
    scores = [torch.where(visible, s, _MASKED) for s in scores]
    tops = [s.amax(-1, keepdim=True) for s in scores]
    weights = [torch.exp(s - top) for s, top in zip(scores, tops, strict=True)]
    totals = [w.sum(-1) for w in weights]  # [W, Hkv]
    partials = [(w[..., None] * values).sum(2) for w in weights]  # [W, Hkv, D]

    outs, sums = [], []
    for top, total, partial in zip(tops, totals, partials, strict=True):
        row_tops = top[..., 0][work.row_items]  # [R, J, Hkv]
        row_top = row_tops.amax(1, keepdim=True)
        shares = torch.exp(row_tops - row_top)
        numerator = (shares[..., None] * partial[work.row_items]).sum(1)
        denominator = (shares * total[work.row_items]).sum(1)
        outs.append(numerator / denominator[..., None])
        sums.append(row_top[:, 0] + torch.log(denominator))  # [R, Hkv], log of the softmax's denominator
    out = torch.stack(outs, 2).view(-1, num_kv_heads * group, head_dim)
    if sinks is not None:
        # The denominator becomes e^sum + e^sink. Sinks are read in one place and whole: the compiler must not store
        # another form of them, which could not be made for the other layers of the class.
        out = out * torch.sigmoid(torch.stack(sums, 2).view(-1, num_kv_heads * group) - sinks)[..., None]
    return out.to(query.dtype)


def _attend_tiles(query: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: TileGroup, scale: float) -> Tensor:
    """[X * TILE, Hq, D]."""
    num_kv_heads, head_dim, block_size = k_cache.shape[1:]
    heads = query.shape[1]
    num_tiles, tile = tiles.query.shape
    length = tiles.page.shape[1] * block_size  # explicit in every shape: there may be no tiles at all
    queries = query[tiles.query].permute(0, 2, 1, 3).contiguous()  # [X, Hq, TILE, D]
    keys = k_cache[tiles.page].permute(0, 2, 1, 4, 3).reshape(num_tiles, num_kv_heads, length, head_dim)
    values = v_cache[tiles.page].permute(0, 2, 1, 3, 4).reshape(num_tiles, num_kv_heads, length, head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=tiles.mask, scale=scale, enable_gqa=num_kv_heads != heads
    )
    return out.permute(0, 2, 1, 3).reshape(num_tiles * tile, heads, head_dim)


@dataclass(frozen=True, slots=True)
class PackedWork:
    """One step's tensors: KV slots, where each token's output stands, and the work of each window."""

    slot_page: Tensor  # [T]
    slot_offset: Tensor  # [T]
    output_index: Tensor  # [T]
    rows: tuple[RowWork, ...]  # per window
    tile_groups: tuple[tuple[TileGroup, TileGroup], ...]  # per window; empty when every token is a row

    def arguments(self, index: int) -> list[Tensor]:
        """What the graph takes for the window of this index, after the positions: `STEP_FIELDS`, then the work."""
        groups = self.tile_groups[index] if self.tile_groups else ()
        parts = (self.rows[index], *groups)
        work = [getattr(part, f.name) for part in parts for f in fields(part)]
        return [*(getattr(self, name) for name in STEP_FIELDS), *work]


def pack_work(
    block_table: np.ndarray,  # [B, M]
    seq_lens: np.ndarray,  # [B]
    query_start_loc: np.ndarray,  # [B + 1]
    *,
    block_size: int,
    padding_page: int,
    windows: Sequence[int],
    tile_dtype: torch.dtype | None,
) -> PackedWork:
    """The work of one step; pages outside a window are left out.

    `tile_dtype` is the dtype of the pages where prompts go in tiles, None where every token is a row.
    """
    starts = query_start_loc.astype(np.int64)
    counts = np.diff(starts)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T] sequence of each token
    positions = np.arange(starts[-1]) + np.repeat(seq_lens - starts[1:], counts)
    table = block_table.astype(np.int64)
    tiled = counts > MAX_ROWS_PER_SEQUENCE if tile_dtype is not None else np.zeros(len(counts), bool)
    rows = np.flatnonzero(~tiled[owner])
    tiles = [
        _Tile(int(b), first, min(first + TILE, int(starts[b + 1])), int(positions[first]))
        for b in np.flatnonzero(tiled)
        for first in range(int(starts[b]), int(starts[b + 1]), TILE)
    ]
    short, long = _two_groups(tiles, block_size)
    output_index = np.empty(len(owner), np.int64)
    output_index[rows] = np.arange(len(rows))
    for x, tile in enumerate((*short, *long)):
        output_index[tile.first : tile.end] = len(rows) + x * TILE + np.arange(tile.end - tile.first)
    page, offset = table[owner, positions // block_size], positions % block_size
    row_work = tuple(
        _row_work(rows, positions[rows], table[owner[rows]], block_size, padding_page, window)
        for window in windows
    )
    groups: tuple[tuple[TileGroup, TileGroup], ...] = ()
    if tiles and tile_dtype is not None:
        groups = tuple(
            (
                _tile_group(short, table, block_size, padding_page, window, tile_dtype),
                _tile_group(long, table, block_size, padding_page, window, tile_dtype),
            )
            for window in windows
        )
    slots = torch.from_numpy(page), torch.from_numpy(offset)
    return PackedWork(*slots, torch.from_numpy(output_index), row_work, groups)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Query tokens `first` to `end` (exclusive) of a step, all of one sequence; `position` is that of the first."""

    sequence: int
    first: int
    end: int
    position: int

    def pages(self, block_size: int, window: int) -> range:
        """Indices into the sequence's row of the block table."""
        last = self.position + self.end - self.first - 1
        first = _first_page(np.array(self.position), block_size, window)
        return range(int(first), last // block_size + 1)


def _two_groups(tiles: Sequence[_Tile], block_size: int) -> tuple[list[_Tile], list[_Tile]]:
    """Short and long tiles, parted where the fewest pages are padded. The long ones are none only if there are none."""
    ordered = sorted(tiles, key=lambda tile: len(tile.pages(block_size, 0)))
    lengths = [len(tile.pages(block_size, 0)) for tile in ordered]
    split = min(
        range(len(ordered)),
        key=lambda i: i * lengths[i - 1] + (len(lengths) - i) * lengths[-1],
        default=0,
    )
    return ordered[:split], ordered[split:]


def _first_page(positions: np.ndarray, block_size: int, window: int) -> np.ndarray:
    return np.maximum(positions - window + 1, 0) // block_size if window else np.zeros_like(positions)


def _row_work(
    rows: np.ndarray,
    positions: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    padding_page: int,
    window: int,
) -> RowWork:
    first = _first_page(positions, block_size, window)
    counts = positions // block_size - first + 1
    ends = np.cumsum(counts)
    num_items = int(ends[-1]) if len(ends) else 0
    row = np.repeat(np.arange(len(rows)), counts)
    index = np.arange(num_items) - np.repeat(ends - counts, counts) + first[row]  # index into the block table
    columns = np.arange(counts.max() if len(counts) else 1)
    row_items = np.where(columns < counts[:, None], (ends - counts)[:, None] + columns, num_items)
    arrays = (
        np.append(rows[row], 0),
        np.append(tables[row, index], padding_page),
        np.append(index * block_size, _NEVER),
        row_items.reshape(len(rows), len(columns)),
    )
    return RowWork(*map(torch.from_numpy, arrays))


def _tile_group(
    tiles: Sequence[_Tile],
    table: np.ndarray,
    block_size: int,
    padding_page: int,
    window: int,
    dtype: torch.dtype,
) -> TileGroup:
    spans = [tile.pages(block_size, window) for tile in tiles]
    width = max(map(len, spans), default=1)
    query = np.empty((len(tiles), TILE), np.int64)
    page = np.full((len(tiles), width), padding_page, np.int64)
    mask = torch.full((len(tiles), 1, TILE, width * block_size), float("-inf"), dtype=dtype)
    for x, (tile, span) in enumerate(zip(tiles, spans, strict=True)):
        offsets = np.minimum(np.arange(TILE), tile.end - tile.first - 1)
        query[x] = tile.first + offsets
        page[x, : len(span)] = table[tile.sequence, span.start : span.stop]
        keys = torch.arange(span.start * block_size, (span.start + width) * block_size)
        queries = torch.from_numpy(tile.position + offsets)[:, None]
        mask[x, 0].masked_fill_(_visible(keys, queries, window), 0)
    return TileGroup(torch.from_numpy(query), torch.from_numpy(page), mask)
