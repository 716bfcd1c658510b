"""A transformers model -> one exported program in the flat, padding-free layout.

The modelling code is the model's own. Only its attention is swapped, through `AttentionInterface`, for the
`pelton::paged_attention` operator, so a new family needs no code here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional
from transformers import AttentionInterface

from ..errors import BuildError
from ..plugins_trt.paged_attention import paged_attention
from .experts import BATCHED, PELTON, check_experts, use_experts
from .hidden_states import head_inputs, only_head_input

log = logging.getLogger(__name__)

ATTENTION = "pelton"

# Arguments that families hand to an attention function and that change nothing in inference on flat tokens.
_INERT_ARGUMENTS = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
     "output_router_logits", "return_dict", "cache_position", "num_items_in_batch", "logits_to_keep",
     "position_embeddings"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """KV pages of one layer: `num_heads` key/value heads of `head_dim` elements."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Step:
    """The graph's inputs besides the tokens; shapes as in `plugins_trt/paged_attention.py`."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    k_caches: Sequence[Tensor]
    v_caches: Sequence[Tensor]
    new_k_caches: dict[int, Tensor]
    new_v_caches: dict[int, Tensor]


_step: ContextVar[Step] = ContextVar("pelton_step")


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq], attention sinks
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls instead of its own attention while a model is exported."""
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _INERT_ARGUMENTS)
    if unknown:
        raise BuildError(f"{type(module).__name__} passes {', '.join(unknown)} to attention: not supported")
    if attention_mask is not None:
        raise BuildError(f"{type(module).__name__} builds its own attention mask: not supported")
    value_size = value.shape[-1]
    if value_size < key.shape[-1]:  # latent attention: pages hold values as wide as keys
        value = functional.pad(value, (0, key.shape[-1] - value_size))
    step = _step.get()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise BuildError(f"{type(module).__name__} does not know its layer: this family is not supported")
    if layer in step.new_k_caches:
        raise BuildError(f"layer {layer} attends more than once: not supported")
    for name, heads, cache in (("keys", key, step.k_caches[layer]), ("values", value, step.v_caches[layer])):
        if (heads.shape[1], heads.shape[3]) != cache.shape[2:]:
            raise BuildError(
                f"layer {layer} of {type(module).__name__} has {heads.shape[1]} KV heads with {name} of "
                f"{heads.shape[3]} elements, but its config says {cache.shape[2]} heads of {cache.shape[3]} for all "
                "layers: not supported"
            )
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise BuildError(
            f"layer {layer} of {type(module).__name__} has attention sinks of shape {list(s_aux.shape)}, not one for "
            f"each of its {query.shape[1]} query heads: not supported"
        )
    out, k_cache, v_cache = paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.k_caches[layer],
        step.v_caches[layer],
        step.block_table,
        step.seq_lens,
        step.query_start_loc,
        float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        int(sliding_window or 0),
        float(softcap or 0.0),
        # A conversion that changes nothing would stand between the operator and its constant.
        s_aux if s_aux is None or s_aux.dtype == torch.float32 else s_aux.float(),
    )
    step.new_k_caches[layer], step.new_v_caches[layer] = k_cache, v_cache
    return out[None, ..., :value_size], None


class FlatModel(nn.Module):
    """The exported callable: flat tokens in, logits of `logits_rows` and the new caches out.

    `with_hidden`: and the hidden states that the logits were made from, `[N, hidden]` in the model's dtype.
    """

    def __init__(self, model: nn.Module, num_layers: int, *, with_hidden: bool) -> None:
        super().__init__()
        self.model = model
        self.num_layers = num_layers
        self.with_hidden = with_hidden

    def forward(
        self,
        input_ids: Tensor,  # [1, T]
        positions: Tensor,  # [1, T]
        block_table: Tensor,  # [B, M]
        seq_lens: Tensor,  # [B]
        query_start_loc: Tensor,  # [B + 1]
        logits_rows: Tensor,  # [N]
        k_caches: list[Tensor],
        v_caches: list[Tensor],
    ) -> tuple[Any, ...]:
        step = Step(block_table, seq_lens, query_start_loc, k_caches, v_caches, {}, {})
        token = _step.set(step)
        try:
            with head_inputs(self.model, are_wanted=self.with_hidden) as captured:
                output = self.model(
                    input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=logits_rows
                )
        finally:
            _step.reset(token)
        layers = range(self.num_layers)
        if sorted(step.new_k_caches) != list(layers):
            raise BuildError(
                f"{type(self.model).__name__}: {len(step.new_k_caches)} of {self.num_layers} layers call the "
                "attention interface, so this family cannot be exported (it has an attention of its own)"
            )
        hidden = (only_head_input(self.model, captured),) if self.with_hidden else ()
        return (
            output.logits[0].float(),
            [step.new_k_caches[i] for i in layers],
            [step.new_v_caches[i] for i in layers],
            *hidden,
        )


def first_line(error: Exception) -> str:
    """What a long compiler message says first."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def kv_geometry(config: Any) -> tuple[KVGeometry, ...]:
    """Pages of each layer, from a transformers config."""
    if getattr(
        config, "kv_lora_rank", None
    ):  # latent attention, whose keys and values are expanded for every head
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return tuple(KVGeometry(config.num_attention_heads, width) for _ in range(config.num_hidden_layers))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return tuple(KVGeometry(num_heads, head_dim) for _ in range(config.num_hidden_layers))


def check_windows(config: Any, windows: Sequence[int]) -> None:
    """Raise `BuildError` unless each layer attends over the window that its config says (`windows`: as exported).

    A family may hand its window to a mask instead of the attention; the mask is not made here, so it would be lost.
    """
    if getattr(config, "attention_chunk_size", None):
        raise BuildError(f"{config.model_type} attends in chunks of positions: not supported")
    sliding = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses_window = getattr(config, "use_sliding_window", True)
        expected = [sliding if uses_window else 0] * len(windows)
    else:
        known = {"full_attention": 0, "sliding_attention": sliding}
        unknown = sorted(set(kinds) - set(known))
        if unknown:
            raise BuildError(f"{config.model_type} has layers of type {', '.join(unknown)}: not supported")
        expected = [known[kind] for kind in kinds]
    for layer, (window, wanted) in enumerate(zip(windows, expected, strict=True)):
        if window != wanted:
            raise BuildError(
                f"layer {layer} of {config.model_type} has a window of {wanted or 'all'} tokens in its config, but "
                f"attends over {window or 'all'} as exported: this family is not supported"
            )


def export(
    model: nn.Module,
    *,
    block_size: int,
    experts: str = BATCHED,
    cache_dtype: torch.dtype | None = None,
    with_hidden: bool = False,
) -> ExportedProgram:
    """Export `model` (a causal LM in eval mode) with dynamic T, B, M, N and number of blocks.

    `experts`: how routed experts are computed, a name of `experts.py`. `cache_dtype` is that of the pages, None: the
    model's own. `with_hidden`: the hidden states are an output too, the last one.

    Raises `BuildError` with the reason when the family cannot be exported.
    """
    config: Any = model.config
    AttentionInterface.register(ATTENTION, _attention)
    try:
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    except Exception as error:
        raise BuildError(
            f"{type(model).__name__} does not take another attention, so it cannot be exported: {first_line(error)}"
        ) from error
    use_experts(model, experts)
    geometry = kv_geometry(config)
    dtype = cache_dtype or next(model.parameters()).dtype
    # No size of an example may be 1 (it would be specialised), and no two may be equal by accident.
    tokens, sequences, pages, blocks = 7, 3, 4, 11
    caches = [torch.zeros(blocks, block_size, g.num_heads, g.head_dim, dtype=dtype) for g in geometry]
    arguments = (
        torch.zeros(1, tokens, dtype=torch.long),
        torch.arange(tokens)[None],
        torch.zeros(sequences, pages, dtype=torch.int32),
        torch.full((sequences,), 2, dtype=torch.int32),
        torch.tensor([0, 2, 4, tokens], dtype=torch.int32),
        torch.tensor([1, 6]),
        caches,
        [cache.clone() for cache in caches],
    )
    t, b, m, n = Dim("T"), Dim("B"), Dim("M"), Dim("N")
    num_blocks = Dim("num_blocks")
    shapes = (
        {1: t}, {1: t}, {0: b, 1: m}, {0: b}, {0: Dim.AUTO}, {0: n},
        [{0: num_blocks} for _ in caches], [{0: num_blocks} for _ in caches],
    )  # fmt: skip
    flat = FlatModel(model, len(geometry), with_hidden=with_hidden)
    try:
        with torch.no_grad():
            program = torch.export.export(flat, arguments, dynamic_shapes=shapes, strict=False)
    except BuildError:
        raise
    except Exception as error:
        log.debug("export failed", exc_info=error)
        raise BuildError(
            f"{type(model).__name__} cannot be exported: {type(error).__name__}: {first_line(error)}"
        ) from error
    if experts == PELTON:
        check_experts(model, program.graph)
    return program
