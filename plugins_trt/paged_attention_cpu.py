"""Paged attention for the CPU, in torch operators that Inductor fuses into vector loops: no C++ of our own.

Two forms read the same pages, both driven by lists that numpy makes once per step (`pack_work`):

- *Rows*: one query token per row. Work is cut into items (row, page), so ragged contexts cost what they hold and
  nothing is padded. An item yields its largest score, its sum of exponentials and its weighted values; a row then
  combines its items, as in flash-decoding (https://pytorch.org/blog/flash-decoding). An item depends on its row and
  its page alone and a row adds its items in order of position: results do not depend, bitwise, on how the
  tokens were batched or chunked.
- *Tiles*: up to `TILE` query tokens of one sequence against all of its pages, gathered for the fused SDPA. Faster
  for prompts, not invariant: only for reduced precision.

Pages on this target (keys transposed, so that scores of neighbouring positions are neighbours in a vector):

    k_cache [num_blocks + 1, Hkv, D, block_size]
    v_cache [num_blocks + 1, Hkv, block_size, D]

The last page is never written: padding items and tiles point at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

TILE = 64
# Chunks of up to this many tokens are cheaper as rows than as a padded tile.
MAX_ROWS_PER_SEQUENCE = 8

# A finite stand-in for minus infinity: a wholly masked item has weight exp(MASKED - top) = 0 and no NaN.
_MASKED = -1e30
# A start position that masks an item whole.
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class WorkList:
    """What the layers of one window read in a step: W items, R rows of at most J items, X tiles of at most P pages.

    numpy int64 when packed, tensors in the graph; the order of fields is the order of the graph's inputs.
    """

    item_query: Tensor  # [W] index of the query token, in [0, T)
    item_page: Tensor  # [W]
    item_start: Tensor  # [W] position of the page's first key
    row_items: Tensor  # [R, J] items of a row in order of position, padded with the masked last item
    tile_query: Tensor  # [X, TILE] query tokens; the last one repeats in a partial tile
    tile_page: Tensor  # [X, P]
    tile_start: Tensor  # [X] position of the tile's first key


WORK_LIST_FIELDS = tuple(f.name for f in fields(WorkList))


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
    work: WorkList,
    output_index: Tensor,  # [T] where each token's output stands: rows first, then tiles
    scale: float,
    window: int,
    soft_cap: float,
    use_tiles: bool,
) -> Tensor:
    """Attention of all tokens of a step, `[T, Hq, D]`; the step's K/V are in the pages already."""
    out = _attend_rows(query, k_cache, v_cache, positions, work, scale, window, soft_cap)
    if use_tiles:
        out = torch.cat([out, _attend_tiles(query, k_cache, v_cache, positions, work, scale, window)])
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
    work: WorkList,
    scale: float,
    window: int,
    soft_cap: float,
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

    outs = []
    for top, total, partial in zip(tops, totals, partials, strict=True):
        row_tops = top[..., 0][work.row_items]  # [R, J, Hkv]
        shares = torch.exp(row_tops - row_tops.amax(1, keepdim=True))
        numerator = (shares[..., None] * partial[work.row_items]).sum(1)
        denominator = (shares * total[work.row_items]).sum(1)
        outs.append((numerator / denominator[..., None]).to(query.dtype))
    return torch.stack(outs, 2).view(-1, num_kv_heads * group, head_dim)


def _attend_tiles(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    work: WorkList,
    scale: float,
    window: int,
) -> Tensor:
    """[X * TILE, Hq, D]. The query heads of one KV head are folded into the query length: K/V are not repeated."""
    num_kv_heads, head_dim, block_size = k_cache.shape[1:]
    heads = query.shape[1]
    group = heads // num_kv_heads
    num_tiles, tile = work.tile_query.shape
    length = work.tile_page.shape[1] * block_size  # explicit in every shape: there may be no tiles at all
    queries = query[work.tile_query].view(num_tiles, tile, num_kv_heads, group, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, group * tile, head_dim)
    keys = k_cache[work.tile_page].permute(0, 2, 1, 4, 3).reshape(num_tiles, num_kv_heads, length, head_dim)
    values = v_cache[work.tile_page].permute(0, 2, 1, 3, 4).reshape(num_tiles, num_kv_heads, length, head_dim)
    key_positions = work.tile_start[:, None, None] + torch.arange(length)
    visible = _visible(key_positions, positions[work.tile_query][:, :, None], window)  # [X, TILE, S]
    mask = torch.where(visible, 0.0, float("-inf")).to(query.dtype)[:, None, None]
    mask = mask.expand(num_tiles, 1, group, tile, length).reshape(num_tiles, 1, group * tile, length)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    out = out.view(num_tiles, num_kv_heads, group, tile, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_tiles * tile, heads, head_dim)


@dataclass(frozen=True, slots=True)
class PackedWork:
    """One step's index arrays, int64: KV slots, one work list per window, and where each token's output stands."""

    slot_page: np.ndarray  # [T]
    slot_offset: np.ndarray  # [T]
    output_index: np.ndarray  # [T]
    lists: tuple[tuple[np.ndarray, ...], ...]  # per window, fields as in WorkList

    def arrays(self) -> list[np.ndarray]:
        """In the order of the graph's inputs."""
        return [
            self.slot_page,
            self.slot_offset,
            self.output_index,
            *(a for work in self.lists for a in work),
        ]


def pack_work(
    block_table: np.ndarray,  # [B, M]
    seq_lens: np.ndarray,  # [B]
    query_start_loc: np.ndarray,  # [B + 1]
    *,
    block_size: int,
    padding_page: int,
    windows: Sequence[int],
    use_tiles: bool,
) -> PackedWork:
    """The work lists of one step; pages outside a window are left out."""
    starts = query_start_loc.astype(np.int64)
    counts = np.diff(starts)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T] sequence of each token
    positions = np.arange(starts[-1]) + np.repeat(seq_lens - starts[1:], counts)
    table = block_table.astype(np.int64)
    tiled = (counts > MAX_ROWS_PER_SEQUENCE) & use_tiles
    rows = np.flatnonzero(~tiled[owner])
    tiles = [
        (int(b), first, min(first + TILE, int(starts[b + 1])))
        for b in np.flatnonzero(tiled)
        for first in range(int(starts[b]), int(starts[b + 1]), TILE)
    ]
    output_index = np.empty(len(owner), np.int64)
    output_index[rows] = np.arange(len(rows))
    for x, (_, first, end) in enumerate(tiles):
        output_index[first:end] = len(rows) + x * TILE + np.arange(end - first)
    lists = tuple(
        _row_items(rows, positions[rows], table[owner[rows]], block_size, padding_page, window)
        + _tile_pages(tiles, positions, table, block_size, padding_page, window)
        for window in windows
    )
    page = table[owner, positions // block_size]
    return PackedWork(page, positions % block_size, output_index, lists)


def _first_page(positions: np.ndarray, block_size: int, window: int) -> np.ndarray:
    return np.maximum(positions - window + 1, 0) // block_size if window else np.zeros_like(positions)


def _row_items(
    rows: np.ndarray,
    positions: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    padding_page: int,
    window: int,
) -> tuple[np.ndarray, ...]:
    first = _first_page(positions, block_size, window)
    counts = positions // block_size - first + 1
    ends = np.cumsum(counts)
    num_items = int(ends[-1]) if len(ends) else 0
    row = np.repeat(np.arange(len(rows)), counts)
    index = np.arange(num_items) - np.repeat(ends - counts, counts) + first[row]  # index into the block table
    columns = np.arange(counts.max() if len(counts) else 1)
    row_items = np.where(columns < counts[:, None], (ends - counts)[:, None] + columns, num_items)
    return (
        np.append(rows[row], 0),
        np.append(tables[row, index], padding_page),
        np.append(index * block_size, _NEVER),
        row_items.reshape(len(rows), len(columns)),
    )


def _tile_pages(
    tiles: Sequence[tuple[int, int, int]],
    positions: np.ndarray,
    table: np.ndarray,
    block_size: int,
    padding_page: int,
    window: int,
) -> tuple[np.ndarray, ...]:
    spans = [
        (
            int(_first_page(positions[first : first + 1], block_size, window)[0]),
            int(positions[end - 1]) // block_size + 1,
        )
        for _, first, end in tiles
    ]
    width = max((last - first for first, last in spans), default=1)
    query = np.empty((len(tiles), TILE), np.int64)
    page = np.full((len(tiles), width), padding_page, np.int64)
    for x, ((b, first, end), (low, high)) in enumerate(zip(tiles, spans, strict=True)):
        query[x] = np.minimum(first + np.arange(TILE), end - 1)
        page[x, : high - low] = table[b, low:high]
    return query, page, np.array([low * block_size for low, _ in spans], np.int64)
