"""Triton: attention over pages, for many query tokens (prefill) and for few (decode, split over the context).

Both pack the query heads that read one KV head into the rows of a tile, so that a page is read once per KV head:

    tile [BLOCK_M, D]     row r = query token r // GROUP of the tile, query head kv_head * GROUP + r % GROUP
                          BLOCK_Q = BLOCK_M // GROUP tokens; rows from BLOCK_Q * GROUP on are empty

and walk the keys in tiles of BLOCK_N, which start at a page's border, with the online softmax of FlashAttention
(arXiv 2205.14135, 2307.08691). Scores are in units of log2, so that exp2 needs no product. Splitting one sequence's
context over programs: Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from .paged_attention_pages_triton import decode, find_sequence

LOG2_E = tl.constexpr(1.4426950408889634)
# A split of the context has at least this many tiles: each costs BLOCK_M rows of partial results, written and read.
MIN_SPLIT_TILES = tl.constexpr(2)


@triton.jit
def _attend_tiles(
    state,  # (row_max [BLOCK_M], row_sum [BLOCK_M], acc [BLOCK_M, D])
    query,  # [BLOCK_M, D]
    positions,  # [BLOCK_M]
    slopes,  # [BLOCK_M] in log2 units, or None
    caches,  # (k, v) at the KV head
    table_ptr,  # the sequence's row of the block table
    start,
    stop,
    end,  # keys at or past it do not exist
    window,
    qk_scale,  # to log2 units; with a soft cap, to its argument
    soft_cap,  # in log2 units
    MASKED: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CACHE: tl.constexpr,
    STAGED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Update `state` by the key tiles that begin in [start, stop). Without MASKED every row sees all their keys.

    Page numbers are read a tile ahead: Triton would spend a stage of its pipeline on them else, which K/V need.
    """
    row_max, row_sum, acc = state
    k_ptr, v_ptr = caches
    dims = tl.arange(0, PADDED_DIM)
    keys = start + tl.arange(0, BLOCK_N)
    page = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        exists = keys < end
        next_keys = keys + BLOCK_N
        next_page = tl.load(table_ptr + next_keys // BLOCK_SIZE, mask=next_keys < end, other=0)
        offset = (page.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * ROW  # [BLOCK_N]
        k_tile = k_ptr + offset[None, :] + dims[:, None]  # [D, BLOCK_N]
        v_tile = v_ptr + offset[:, None] + dims[None, :]  # [BLOCK_N, D]
        if MASKED and PADDED_DIM != HEAD_DIM:
            stored_k = tl.load(k_tile, mask=exists[None, :] & (dims < HEAD_DIM)[:, None], other=0)
            stored_v = tl.load(v_tile, mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0)
        elif MASKED:
            stored_k = tl.load(k_tile, mask=exists[None, :], other=0)
            stored_v = tl.load(v_tile, mask=exists[:, None], other=0)
        elif PADDED_DIM != HEAD_DIM:
            stored_k = tl.load(k_tile, mask=(dims < HEAD_DIM)[:, None], other=0)
            stored_v = tl.load(v_tile, mask=(dims < HEAD_DIM)[None, :], other=0)
        else:
            stored_k = tl.load(k_tile)
            stored_v = tl.load(v_tile)

        scores = tl.dot(query, decode(stored_k, CACHE, query.dtype, STAGED)) * qk_scale  # [BLOCK_M, BLOCK_N]
        if HAS_SOFT_CAP:  # tanh(x) = 1 - 2 / (1 + e^2x)
            scores = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E))))
        distance = keys[None, :] - positions[:, None]
        if slopes is not None:
            scores += slopes[:, None] * distance
        if MASKED:
            visible = (distance <= 0) & exists[None, :]
            if HAS_WINDOW:
                visible &= distance > -window
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(query.dtype), decode(stored_v, CACHE, query.dtype, STAGED), acc)
        row_max = new_max
        page = next_page
    return row_max, row_sum, acc


@triton.jit
def _first_key(position, window, HAS_WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the walk over the keys of a query at `position` starts: the page that holds the first visible one."""
    if HAS_WINDOW:
        return tl.maximum(position - window + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    else:
        return tl.full([], 0, tl.int32)


@triton.jit
def _initial_state(sinks_ptr, heads, rows_exist, BLOCK_M: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Softmax state before any key: of a sink, which has weight but no value, or of nothing."""
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if sinks_ptr is None:
        return tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32), acc
    else:
        sink = tl.load(sinks_ptr + heads, mask=rows_exist, other=0.0) * LOG2_E
        return sink, tl.full([BLOCK_M], 1.0, tl.float32), acc


@triton.jit
def _row_slopes(alibi_slopes_ptr, heads, rows_exist):
    """ALiBi slopes of a tile's rows in log2 units, or None."""
    if alibi_slopes_ptr is None:
        return None
    else:
        return tl.load(alibi_slopes_ptr + heads, mask=rows_exist, other=0.0) * LOG2_E


@triton.jit(do_not_specialize=["num_sequences", "block_table_stride", "window", "min_rows"])
def prefill_kernel(
    out_ptr,  # [T, Hq, D]
    query_ptr,  # [T, Hq, D], rows `query_stride` elements apart
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    scale,
    soft_cap,
    k_scale,
    v_scale,
    window,
    min_rows,
    num_sequences,
    query_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CACHE: tl.constexpr,
    STAGED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Program (i, h): query tile i from the back (the longest contexts start first), KV head h.

    Sequences of less than `min_rows` rows are left alone.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(query_start_loc_ptr, tile, num_sequences, BLOCK_Q)
    start = tl.load(query_start_loc_ptr + sequence)
    num_rows = tl.load(query_start_loc_ptr + sequence + 1) - start
    first_row = (tile - (start // BLOCK_Q + sequence)) * BLOCK_Q  # of the sequence's
    if (num_rows < min_rows) | (first_row >= num_rows):
        return
    rows = tl.arange(0, BLOCK_M)
    token = first_row + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    exists = (rows < BLOCK_Q * GROUP) & (token < num_rows)
    dims = tl.arange(0, PADDED_DIM)
    element = heads[:, None] * HEAD_DIM + dims[None, :]  # of a token's row
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    row = (start + token).to(tl.int64)[:, None]
    query = tl.load(query_ptr + row * query_stride + element, mask=mask, other=0.0)  # [BLOCK_M, D]

    past = tl.load(seq_lens_ptr + sequence) - num_rows
    first_position = past + first_row
    last_position = past + tl.minimum(first_row + BLOCK_Q, num_rows) - 1
    # Tiles of keys: [begin, inner) at the window's edge, [inner, diagonal) seen whole by all rows, [diagonal, end).
    begin = _first_key(first_position, window, HAS_WINDOW, BLOCK_SIZE)
    end = last_position + 1
    inner = begin
    if HAS_WINDOW:
        inner += tl.cdiv(tl.maximum(end - window - begin, 0), BLOCK_N) * BLOCK_N
    diagonal = tl.maximum(begin + (first_position + 1 - begin) // BLOCK_N * BLOCK_N, inner)

    qk_scale, cap = scale * k_scale, soft_cap * LOG2_E
    qk_scale = qk_scale / soft_cap if HAS_SOFT_CAP else qk_scale * LOG2_E
    caches = (k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM)
    table_ptr = block_table_ptr + sequence.to(tl.int64) * block_table_stride
    slopes = _row_slopes(alibi_slopes_ptr, heads, exists)
    state = _initial_state(sinks_ptr, heads, exists, BLOCK_M, PADDED_DIM)
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    if HAS_WINDOW:
        state = _attend_tiles(
            state, query, past + token, slopes, caches, table_ptr, begin, inner, end, window, qk_scale, cap,
            True, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, CACHE, STAGED, HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
    state = _attend_tiles(
        state, query, past + token, slopes, caches, table_ptr, inner, diagonal, end, window, qk_scale, cap,
        False, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, CACHE, STAGED, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    _, row_sum, acc = _attend_tiles(
        state, query, past + token, slopes, caches, table_ptr, diagonal, end, end, window, qk_scale, cap,
        True, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, CACHE, STAGED, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    out = acc * (v_scale / row_sum)[:, None]
    tl.store(out_ptr + row * (ROW * GROUP) + element, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _split_tiles(num_tiles, SPLITS: tl.constexpr):
    """Key tiles per split of a context of `num_tiles`: splits from `cdiv(num_tiles, this)` on are empty."""
    return tl.maximum(tl.cdiv(num_tiles, SPLITS), MIN_SPLIT_TILES)


@triton.jit(do_not_specialize=["num_sequences", "block_table_stride", "window"])
def decode_kernel(
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [B, Hkv, SPLITS, BLOCK_M, D] float32; unused with one split
    stats_ptr,  # [B, Hkv, SPLITS, BLOCK_M, 2] float32: maximum in log2 units, sum
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    scale,
    soft_cap,
    k_scale,
    v_scale,
    window,
    query_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    CACHE: tl.constexpr,
    STAGED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Program (s, h, b): split s of the context of sequence b for KV head h, all of b's rows in one tile.

    Sequences of more than BLOCK_M // GROUP rows are left alone. With one split the output is written, else partial
    results that `reduce_kernel` joins.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_loc_ptr + sequence)
    num_rows = tl.load(query_start_loc_ptr + sequence + 1) - start
    if (num_rows == 0) | (num_rows > BLOCK_Q):
        return
    end = tl.load(seq_lens_ptr + sequence)
    past = end - num_rows
    begin = _first_key(past, window, HAS_WINDOW, BLOCK_SIZE)
    split_keys = _split_tiles(tl.cdiv(end - begin, BLOCK_N), SPLITS) * BLOCK_N
    begin += split * split_keys
    if begin >= end:
        return
    stop = tl.minimum(begin + split_keys, end)
    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    exists = rows < num_rows * GROUP
    dims = tl.arange(0, PADDED_DIM)
    element = heads[:, None] * HEAD_DIM + dims[None, :]
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    row = (start + token).to(tl.int64)[:, None]
    query = tl.load(query_ptr + row * query_stride + element, mask=mask, other=0.0)  # [BLOCK_M, D]

    qk_scale, cap = scale * k_scale, soft_cap * LOG2_E
    qk_scale = qk_scale / soft_cap if HAS_SOFT_CAP else qk_scale * LOG2_E
    caches = (k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM)
    table_ptr = block_table_ptr + sequence.to(tl.int64) * block_table_stride
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    state = _initial_state(sinks_ptr if SPLITS == 1 else None, heads, exists, BLOCK_M, PADDED_DIM)
    row_max, row_sum, acc = _attend_tiles(
        state, query, past + token, _row_slopes(alibi_slopes_ptr, heads, exists), caches, table_ptr,
        begin, stop, end, window, qk_scale, cap,
        True, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, CACHE, STAGED, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    if SPLITS == 1:
        out = acc * (v_scale / row_sum)[:, None]
        tl.store(out_ptr + row * (ROW * GROUP) + element, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        partial = ((sequence.to(tl.int64) * NUM_KV_HEADS + kv_head) * SPLITS + split) * BLOCK_M + rows
        tl.store(stats_ptr + partial * 2, row_max, mask=exists)
        tl.store(stats_ptr + partial * 2 + 1, row_sum, mask=exists)
        tl.store(partial_ptr + partial[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["window"])
def reduce_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    v_scale,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Program (h, q, b): join the splits of query token q of sequence b for query head h, and its sink."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head, token, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_loc_ptr + sequence)
    num_rows = tl.load(query_start_loc_ptr + sequence + 1) - start
    if (token >= num_rows) | (num_rows > BLOCK_Q):
        return
    end = tl.load(seq_lens_ptr + sequence)
    begin = _first_key(end - num_rows, window, HAS_WINDOW, BLOCK_SIZE)
    num_tiles = tl.cdiv(end - begin, BLOCK_N)
    splits = tl.arange(0, SPLITS)
    used = splits < tl.cdiv(num_tiles, _split_tiles(num_tiles, SPLITS))
    first = (sequence.to(tl.int64) * NUM_KV_HEADS + head // GROUP) * SPLITS
    partial = (first + splits) * BLOCK_M + token * GROUP + head % GROUP  # [SPLITS]
    split_max = tl.load(stats_ptr + partial * 2, mask=used, other=float("-inf"))
    split_sum = tl.load(stats_ptr + partial * 2 + 1, mask=used, other=0.0)
    total_max = tl.max(split_max, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * LOG2_E
        total_max = tl.maximum(total_max, sink)
    weights = tl.exp2(split_max - total_max)
    total = tl.sum(split_sum * weights, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - total_max)
    dims = tl.arange(0, PADDED_DIM)
    inside = dims < HEAD_DIM
    acc = tl.load(
        partial_ptr + partial[:, None] * HEAD_DIM + dims[None, :],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    out = tl.sum(acc * weights[:, None], 0) * (v_scale / total)
    row = (start + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=inside)
