"""Whether Pelton's kernels compute what an exported graph asks of them: asked before a target compiles for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from ..errors import BuildError
from ..plugins_trt.paged_attention_tactics import Problem, unsupported_reason
from .export import KVGeometry
from .segments import PAGED_ATTENTION, attention_of


def check_attention(
    graph: Graph, geometry: Sequence[KVGeometry], dtype: torch.dtype, block_size: int, archs: Sequence[int]
) -> None:
    """Raise `BuildError` naming the layer unless the kernels compute every attention of `graph` on all of `archs`.

    `geometry` is that of each layer's pages, `archs` are as in `plugins_trt/architectures.py`.
    """
    for node in graph.find_nodes(op="call_function", target=PAGED_ATTENTION):
        layer = _layer(node)
        for arch in archs:
            if (
                reason := unsupported_reason(_problem(node, geometry[layer], dtype, block_size, arch))
            ) is not None:
                raise BuildError(
                    f"layer {layer}: attention on a GPU of compute capability {arch // 10}.{arch % 10}: {reason}; "
                    "use --target cpu"
                )


def _layer(node: Node) -> int:
    """Of the attention `node`: by the name of its pages, `k_caches_3`."""
    k_cache = node.args[3]
    assert isinstance(k_cache, Node)
    return int(k_cache.name.rpartition("_")[2])


def _problem(node: Node, geometry: KVGeometry, dtype: torch.dtype, block_size: int, arch: int) -> Problem:
    query, k_cache = node.args[0], node.args[3]
    assert isinstance(query, Node)
    assert isinstance(k_cache, Node)
    attention = attention_of(node)
    return Problem(
        num_heads=int(query.meta["val"].shape[1]),  # of [tokens, heads, head_dim]
        num_kv_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        block_size=block_size,
        query_dtype=dtype,
        cache_dtype=k_cache.meta["val"].dtype,
        arch=arch,
        has_window=attention.window > 0,
        has_soft_cap=attention.soft_cap > 0,
        has_sinks=attention.sinks is not None,
        has_alibi=attention.alibi_slopes is not None,
    )
