"""How much memory an engine will need, as an equation that is printed before anything is loaded.

    total = weights + KV pages + activations + sampling

    weights      every parameter once, and the embedding once more where the head is tied to it: the head's
                 copy is packed for its GEMM, the embedding's is read by row
    KV pages     (num_blocks + 1) * block_size * num_layers * 2 * num_kv_heads * head_dim * itemsize; the one
                 more is what padding points at
    activations  the largest step that the limits allow, the sum of
        tokens   max_step_tokens * 16 * hidden_size * itemsize: residual stream, norms, Q/K/V and MLP rows
        rows     rows * pages * heads * (head_dim + block_size + 2) * 4: attention of each row over each page
        tiles    tiles * (pages * block_size * (4 * kv_heads * head_dim + 2 * 128) + 4 * 128 * heads * head_dim)
                 * itemsize: K and V gathered and packed once more by the fused attention, a mask for each of at
                 most two kinds of windows, and the queries' gathered, attended and joined rows
        logits   max_step_tokens * vocab_size * 4, when a request wants the log-probabilities of its prompt
    sampling     where a GPU chooses the tokens: `SamplerSizes.device_bytes`, parameters, results, scratch and the
                 counts that penalties need; the cpu target's is a few rows at a time, and not counted

`pages` is max_model_len / block_size. Without tiles (float32, a soft cap on attention scores, or sinks) every token is
a row; with them rows are those of sequences with at most 8 tokens in the step, and prompts are tiles of 128 tokens.
Only one layer's rows and tiles exist at a time, but the masks live as long as the step. A step of short contexts needs
a small part of this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..plugins_trt.paged_attention_cpu import MAX_ROWS_PER_SEQUENCE, TILE, block_bytes
from ..plugins_trt.sampling_memory import num_logits_rows, sampler_sizes
from .bundle import Limits, ModelFacts


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and the number of KV blocks that can be used. `activations` and `sampling` are upper bounds."""

    weights: int
    kv_pages: int
    activations: int
    num_blocks: int
    block_bytes: int
    sampling: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_pages + self.activations + self.sampling


def plan_memory(
    facts: ModelFacts, limits: Limits, dtype: torch.dtype, *, is_tied: bool, has_tiles: bool
) -> MemoryPlan:
    """The memory of one process that serves a bundle with these `limits`; `has_tiles` as `uses_tiles` says."""
    layers = facts.num_layers
    block = block_bytes([facts.num_kv_heads] * layers, [facts.head_dim] * layers, limits.block_size, dtype)
    num_blocks = limits.kv_cache_bytes // block
    parameters = facts.num_parameters + (facts.vocab_size * facts.hidden_size if is_tied else 0)
    return MemoryPlan(
        weights=parameters * dtype.itemsize,
        kv_pages=(num_blocks + 1) * block,
        activations=_activation_bytes(facts, limits, dtype.itemsize, has_tiles=has_tiles),
        num_blocks=num_blocks,
        block_bytes=block,
    )


def plan_gpu_memory(
    facts: ModelFacts, limits: Limits, dtype: torch.dtype, weights: int, cache_dtype: torch.dtype
) -> MemoryPlan:
    """The GPU memory of one engine, as far as it can be known before the builder chooses kernels: `weights` bytes once
    (the head reads the embedding where it is tied), the pages of `cache_dtype`, of the activations those of one layer,
    and what an executor sets aside for sampling.
    """
    layers = facts.num_layers
    block = block_bytes(
        [facts.num_kv_heads] * layers, [facts.head_dim] * layers, limits.block_size, cache_dtype
    )
    num_blocks = limits.kv_cache_bytes // block
    return MemoryPlan(
        weights=weights,
        kv_pages=num_blocks * block,
        activations=limits.max_step_tokens * (16 * facts.hidden_size * dtype.itemsize + facts.vocab_size * 4),
        num_blocks=num_blocks,
        block_bytes=block,
        sampling=sampler_sizes(
            facts.vocab_size, limits.max_batch_size, gpu_logits_rows(limits, facts.vocab_size)
        ).device_bytes,
    )


def gpu_logits_rows(limits: Limits, vocab_size: int) -> int:
    """Of how many rows one run of a GPU target's engine returns the logits."""
    return num_logits_rows(vocab_size, max_batch_size=limits.max_batch_size, max_rows=limits.max_step_tokens)


# Python, torch and the compiler's libraries; the graph as objects.
_BUILD_BASE_BYTES = 1 << 30
# While the export is proved: the model, and its copy in float32.
_PROOF_COPIES = 3
_PROOF_ROWS = 1024


def build_memory(facts: ModelFacts, *, loaded: int, engine: int, compiler_copies: int) -> int:
    """Host memory that a build needs at its peak, in bytes: an upper bound, known before anything is loaded.

    `loaded` are the bytes of the checkpoint's weights in memory, `engine` those of the engine's, of which the target's
    compiler holds `compiler_copies` at once.
    """
    logits = _PROOF_ROWS * facts.vocab_size * 4
    return _BUILD_BASE_BYTES + logits + max(_PROOF_COPIES * loaded, compiler_copies * engine)


def _activation_bytes(facts: ModelFacts, limits: Limits, item: int, *, has_tiles: bool) -> int:
    heads, kv_heads, head_dim = facts.num_attention_heads, facts.num_kv_heads, facts.head_dim
    pages, tokens = limits.max_blocks_per_sequence, limits.max_step_tokens
    rows, tiles = tokens, 0
    if has_tiles:
        rows = min(tokens, limits.max_batch_size * MAX_ROWS_PER_SEQUENCE)
        tiles = -(-tokens // TILE) + min(limits.max_batch_size, tokens // (MAX_ROWS_PER_SEQUENCE + 1))
    row_bytes = rows * pages * heads * (head_dim + limits.block_size + 2) * 4
    per_position = 4 * kv_heads * head_dim + 2 * TILE
    per_tile = pages * limits.block_size * per_position + 4 * TILE * heads * head_dim
    return (
        tokens * (16 * facts.hidden_size * item + facts.vocab_size * 4) + row_bytes + tiles * per_tile * item
    )
