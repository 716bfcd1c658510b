"""`pelton::paged_attention`: write a step's K/V into their pages, then attend over the pages.

Contract
--------
T tokens of B sequences stand concatenated, without padding between them; sequence b owns rows
`[query_start_loc[b], query_start_loc[b + 1])`, which are its last positions `[seq_lens[b] - rows, seq_lens[b])`.
A sequence may own no rows; its `seq_lens` and table are not read then. Rows at or past `query_start_loc[B]` are
padding: they write nothing, and their output is zero.

    query            [T, Hq, D]     rotary embedding already applied
    key, value       [T, Hkv, D]    Hq is a multiple of Hkv; query head h reads KV head h // (Hq // Hkv)
    k_cache, v_cache [num_blocks, block_size, Hkv, D], both of one dtype, see below
    block_table      [B, M] int32   page of positions [i * block_size, (i + 1) * block_size); padding is never read
    seq_lens         [B] int32      tokens in the cache after this step
    query_start_loc  [B + 1] int32
    scale            factor on query . key
    window           0: all earlier positions; w: positions i - w < j <= i
    soft_cap         0: none; c: scores become c * tanh(score / c)
    sinks            [Hq] float32 or None: a logit per head, neither scaled nor capped, that joins the softmax's
                     denominator and has no value (gpt-oss; "Efficient Streaming Language Models with Attention
                     Sinks", arXiv 2309.17453)
    alibi_slopes     [Hq] float32 or None: after the soft cap, scores become score + slope * (j - i) for key
                     position j and query position i ("Train Short, Test Long", arXiv 2108.12409)
    k_scale, v_scale positive; the caches hold key / k_scale and value / v_scale

Caches of a floating dtype of 16 bits or more hold their element rounded to it. `float8_e4m3fn` and `int8` are
quantised: the quotient is taken in float32, saturates at +-448 or [-128, 127], and is rounded to the nearest, ties to
even. NaN stays NaN in float8 and becomes 0 in int8. The step's own tokens are attended as the cache holds them.

Returns `(out [T, Hq, D], k_cache, v_cache)` with the caches after the write. The operator is functional in the
graph; an engine writes in place. Softmax statistics are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "pelton::paged_attention"
FLOAT8_MAX = 448.0  # of float8_e4m3fn
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.int8)


@torch.library.custom_op(NAME, mutates_args=())
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch reference of the contract: one sequence at a time, no tricks."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    out = torch.zeros_like(query)
    precision = torch.promote_types(query.dtype, torch.float32)
    block_size = k_cache.shape[1]
    for b in range(block_table.shape[0]):
        start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
        seq_len = int(seq_lens[b])
        if start == end:
            continue
        past = seq_len - (end - start)
        positions = torch.arange(past, seq_len)
        pages = block_table[b].long()
        slots = pages[positions // block_size], positions % block_size
        k_cache[slots] = quantise(key[start:end], k_scale, k_cache.dtype)
        v_cache[slots] = quantise(value[start:end], v_scale, v_cache.dtype)
        context = pages[: -(-seq_len // block_size)]
        keys = k_cache[context].flatten(0, 1)[:seq_len].to(precision) * k_scale  # [S, Hkv, D]
        values = v_cache[context].flatten(0, 1)[:seq_len].to(precision) * v_scale
        scores = _scores(
            query[start:end].to(precision), keys, positions, scale, window, soft_cap, alibi_slopes
        )
        out[start:end] = _weigh(scores, values, sinks).to(query.dtype)
    return out, k_cache, v_cache


def quantise(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What a cache of `dtype` holds for `tensor`."""
    if dtype not in QUANTISED_DTYPES:
        return (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) / scale).to(dtype)
    quotient = tensor.to(torch.float32) / torch.tensor(scale, dtype=torch.float32)
    if dtype == torch.int8:
        return quotient.nan_to_num(nan=0.0).clamp(-128, 127).round().to(dtype)
    return quotient.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(dtype)


def _scores(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Logits of the rows at `positions` over one whole context: [Q, Hq, D] x [S, Hkv, D] -> [Hq, Q, S]."""
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("qhd,shd->hqs", query, keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(keys.shape[0])[None, :] - positions[:, None]  # [Q, S]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype)[:, None, None] * distance
    visible = distance <= 0
    if window:
        visible &= distance > -window
    return scores.masked_fill(~visible, float("-inf"))


def _weigh(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """[Hq, Q, S] x [S, Hkv, D] -> [Q, Hq, D]."""
    values = values.repeat_interleave(scores.shape[0] // values.shape[1], dim=1)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqs,shd->qhd", weights, values)


@paged_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(k_cache), torch.empty_like(v_cache)
