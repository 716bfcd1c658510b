"""Tiny Hugging Face checkpoints with random weights and a real tokenizer, written where a test wants them.

Every parameter is random and large enough to matter (norm weights and biases too), so a tensor that is
dropped, swapped or transposed shows in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)
VOCAB_SIZE = 320

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CORPUS = (
    "The engine reads the prompt once and keeps the keys and values of every token in pages.",
    "A request that waits is not a request that is lost: it keeps its place in the queue.",
    "What is the capital of France? The capital of France is Paris, and the answer is in the table.",
    "def step(self): return [token for token in self.tokens if token not in self.stops]",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": IM_START,
    "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT,
}

_LOCAL_GLOBAL: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}

# gpt-oss stretches a short context; the model's own 32 times 4096 positions would be too many here.
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 128,
}  # fmt: skip

# The soft caps are far below the usual 50 and 30: at those, random weights never come near the cap.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 8},
    "gemma2": _LOCAL_GLOBAL | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": _LOCAL_GLOBAL,
}

# Families that only targets with an ONNX graph are tested with.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None},
    "gpt_oss": _LOCAL_GLOBAL | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN},
}

# Families with routed experts.
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    # Experts in the second layer only, one beside them that every token passes, router weights that do not add up to 1.
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "decoder_sparse_step": 2,
    },
    # Latent attention: keys of 8 + 16 features, values of 20. The first layer is dense.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
}


def tiny_checkpoint(
    family: str,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Write a two-layer checkpoint of a transformers model type with its tokenizer; return `path`.

    `FAMILIES`, `MORE_FAMILIES` and `MOE_FAMILIES` have the settings that make a family's own features matter at this
    size. An override of None leaves a setting out.
    """
    return _write(tiny_model(family, seed=seed, **config_overrides).to(dtype), path, max_shard_size)


def tiny_model(family: str, *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """The model of `tiny_checkpoint`, in float32 and in eval mode."""
    settings = _COMMON | (FAMILIES | MORE_FAMILIES | MOE_FAMILIES).get(family, {}) | config_overrides
    options = {name: value for name, value in settings.items() if value is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    _randomise(model, seed)
    return model.eval()


def equalise_norms(path: Path) -> None:
    """Make the two norms of layer 0 equal: ones, as training may leave them. Layers of one class still differ."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "layers.0." in name and "layernorm" in name:
            tensor.fill_(1)
    save_file(tensors, file, metadata={"format": "pt"})


def scripted_checkpoint(path: Path, successor: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Llama whose greedy next token is `successor[current token]`, whatever came before.

    Attention and MLP run, but their output projections are zero: the residual stream is the embedding, a
    one-hot row. `successor` covers the whole vocabulary, which is at least the tokenizer's (`VOCAB_SIZE`).
    The winning logit is about sqrt(vocabulary), the others are 0.
    """
    vocab_size = len(successor)
    if vocab_size < VOCAB_SIZE:
        raise ValueError(f"successor must cover the tokenizer's {VOCAB_SIZE} tokens, has {vocab_size}")
    hidden_size = -(-vocab_size // 64) * 64
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(_COMMON | sizes)))
    _randomise(model, seed=0)
    rows = torch.eye(vocab_size, hidden_size)
    head = torch.zeros(vocab_size, hidden_size)
    head.index_add_(0, torch.tensor(successor), rows)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(rows)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return _write(model.to(dtype), path)


def write_tokenizer(path: Path, *, chat_template: str | None = CHATML) -> None:
    """Write the byte-level BPE tokenizer of `VOCAB_SIZE` tokens: tokenizer.json, its config and template."""
    (path / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    end, start, turn_end = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": turn_end,
        "pad_token": end,
        "unk_token": end,
        "model_max_length": _COMMON["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer.to_str()


def _write(model: PreTrainedModel, path: Path, max_shard_size: str = "1GB") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    generation = GenerationConfig(
        bos_token_id=IM_START, eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    generation.save_pretrained(path)
    return path


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Unit-scale activations: matrices by fan-in, embeddings 1, norms and biases moved by 0.2."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        model.get_input_embeddings().weight.mul_(_embedding_scale(model))


def _embedding_scale(model: torch.nn.Module) -> float:
    """What makes an embedding row unit variance again (Gemma multiplies by sqrt(hidden) itself)."""
    hidden = model.config.hidden_size
    return 1.0 if model.config.model_type.startswith("gemma") else hidden**0.5
