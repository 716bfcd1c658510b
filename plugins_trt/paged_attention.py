"""`pelton::paged_attention`: write a step's K/V into their pages, then attend over the pages.

Contract
--------
T tokens of B sequences stand concatenated, without padding; sequence b owns rows
`[query_start_loc[b], query_start_loc[b + 1])`, which are its last positions `[seq_lens[b] - rows, seq_lens[b])`.

    query            [T, Hq, D]     rotary embedding already applied
    key, value       [T, Hkv, D]    Hq is a multiple of Hkv; query head h reads KV head h // (Hq // Hkv)
    k_cache, v_cache [num_blocks, block_size, Hkv, D]
    block_table      [B, M] int32   page of positions [i * block_size, (i + 1) * block_size); padding is never read
    seq_lens         [B] int32      tokens in the cache after this step
    query_start_loc  [B + 1] int32
    scale            factor on query . key
    window           0: all earlier positions; w: positions i - w < j <= i
    soft_cap         0: none; c: scores become c * tanh(score / c)

Returns `(out [T, Hq, D], k_cache, v_cache)` with the caches after the write. The operator is functional in the
graph; an engine writes in place. Softmax statistics are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "pelton::paged_attention"


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch reference of the contract: one sequence at a time, no tricks."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    out = torch.empty_like(query)
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
        k_cache[slots] = key[start:end].to(k_cache.dtype)
        v_cache[slots] = value[start:end].to(v_cache.dtype)
        context = pages[: -(-seq_len // block_size)]
        keys = k_cache[context].flatten(0, 1)[:seq_len]  # [S, Hkv, D]
        values = v_cache[context].flatten(0, 1)[:seq_len]
        out[start:end] = _attend(query[start:end], keys, values, positions, scale, window, soft_cap)
    return out, k_cache, v_cache


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int, soft_cap: float
) -> Tensor:
    """Attention of the rows at `positions` over one whole context: [Q, Hq, D] x [S, Hkv, D] -> [Q, Hq, D]."""
    precision = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1).to(precision)
    values = values.repeat_interleave(group, dim=1).to(precision)
    scores = torch.einsum("qhd,shd->hqs", query.to(precision), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    where = torch.arange(keys.shape[0])
    visible = where[None, :] <= positions[:, None]
    if window:
        visible &= where[None, :] > positions[:, None] - window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqs,shd->qhd", weights, values).to(query.dtype)


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
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(k_cache), torch.empty_like(v_cache)
