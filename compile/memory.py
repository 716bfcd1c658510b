"""How much memory an engine will need, as an equation that is printed before anything is loaded.

total = weights + KV pages + activations

weights      every parameter once, and the embedding once more where the head is tied to it: the head's
             copy is packed for its GEMM, the embedding's is read by row
KV pages     num_blocks * block_size * num_layers * 2 * num_kv_heads * head_dim * itemsize
activations  the largest step: hidden states and MLP of max_step_tokens, partial attention results, logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bundle import Limits, ModelFacts

_ITEM_SIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and the number of KV blocks that they buy."""

    weights: int
    kv_pages: int
    activations: int
    num_blocks: int
    block_bytes: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_pages + self.activations

    def to_json(self) -> dict[str, Any]:
        return {
            "weights_bytes": self.weights,
            "kv_pages_bytes": self.kv_pages,
            "activations_bytes": self.activations,
            "total_bytes": self.total,
            "num_blocks": self.num_blocks,
            "block_bytes": self.block_bytes,
        }


def plan_memory(facts: ModelFacts, limits: Limits, dtype: str, *, is_tied: bool) -> MemoryPlan:
    """The memory of one process that serves a bundle with these `limits`."""
    item = _ITEM_SIZE[dtype]
    block_bytes = limits.block_size * facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * item
    num_blocks = limits.kv_cache_bytes // block_bytes
    parameters = facts.num_parameters + (facts.vocab_size * facts.hidden_size if is_tied else 0)
    heads = facts.num_attention_heads
    # Per token: residual stream, its norm and Q/K/V and MLP rows (about 16 hidden sizes), float32 partials of heads.
    per_token = 16 * facts.hidden_size * item + 4 * heads * (facts.head_dim + 2) * 4
    activations = limits.max_step_tokens * per_token + limits.max_batch_size * facts.vocab_size * 4
    return MemoryPlan(parameters * item, num_blocks * block_bytes, activations, num_blocks, block_bytes)
