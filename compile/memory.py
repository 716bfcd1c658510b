"""How much memory an engine will need, as an equation that is printed before anything is loaded.

    total = weights + KV pages + activations

    weights      every parameter once, and the embedding once more where the head is tied to it: the head's
                 copy is packed for its GEMM, the embedding's is read by row
    KV pages     num_blocks * block_size * num_layers * 2 * num_kv_heads * head_dim * itemsize
    activations  the largest step that the limits allow, the sum of
        tokens   max_step_tokens * 16 * hidden_size * itemsize: residual stream, norms, Q/K/V and MLP rows
        rows     rows * pages * heads * (head_dim + block_size + 2) * 4: attention of each row over each page
        tiles    tiles * pages * block_size * (2 * kv_heads * head_dim + 128) * itemsize: gathered pages, mask
        logits   max_step_tokens * vocab_size * 4, when a request wants the log-probabilities of its prompt

`pages` is max_model_len / block_size. In float32 every token is a row; in bfloat16 rows are
those of sequences with at most 8 tokens in the step, and prompts are tiles of 128 tokens. Only one layer's rows and
tiles exist at a time. A step of short contexts needs a small part of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plugins_trt.paged_attention_cpu import MAX_ROWS_PER_SEQUENCE, TILE
from .bundle import Limits, ModelFacts

_ITEM_SIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and the number of KV blocks that they buy. `activations` is an upper bound."""

    weights: int
    kv_pages: int
    activations: int
    num_blocks: int
    block_bytes: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_pages + self.activations


def plan_memory(facts: ModelFacts, limits: Limits, dtype: str, *, is_tied: bool) -> MemoryPlan:
    """The memory of one process that serves a bundle with these `limits`."""
    item = _ITEM_SIZE[dtype]
    block_bytes = limits.block_size * facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * item
    num_blocks = limits.kv_cache_bytes // block_bytes
    parameters = facts.num_parameters + (facts.vocab_size * facts.hidden_size if is_tied else 0)
    activations = _activation_bytes(facts, limits, dtype)
    return MemoryPlan(parameters * item, num_blocks * block_bytes, activations, num_blocks, block_bytes)


def _activation_bytes(facts: ModelFacts, limits: Limits, dtype: str) -> int:
    item, tokens = _ITEM_SIZE[dtype], limits.max_step_tokens
    heads, kv_heads, head_dim = facts.num_attention_heads, facts.num_kv_heads, facts.head_dim
    pages = limits.max_blocks_per_sequence
    rows, tiles = tokens, 0
    if dtype != "float32":
        rows = min(tokens, limits.max_batch_size * MAX_ROWS_PER_SEQUENCE)
        tiles = -(-tokens // TILE) + min(limits.max_batch_size, tokens // (MAX_ROWS_PER_SEQUENCE + 1))
    row_bytes = rows * pages * heads * (head_dim + limits.block_size + 2) * 4
    per_position = 2 * kv_heads * head_dim + TILE
    tile_bytes = tiles * pages * limits.block_size * per_position * item
    return tokens * (16 * facts.hidden_size * item + facts.vocab_size * 4) + row_bytes + tile_bytes
