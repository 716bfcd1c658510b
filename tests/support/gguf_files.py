"""Tiny GGUF files, written as llama.cpp's convert_hf_to_gguf.py would from a tiny Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_STEMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    architecture: str | None = None,
    splitting: str = "smollm",
    settings: dict[str, int | float | str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write `checkpoint` (llama, qwen2 or qwen3, float32) as `path`, with `settings` and `tensors` added."""
    config = json.loads((checkpoint / "config.json").read_text())
    name = architecture or config["model_type"]
    writer = gguf.GGUFWriter(path, name)
    _write_settings(writer, config, name, settings or {})
    _write_tokenizer(writer, checkpoint, config, splitting)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor_name, values in load_file(checkpoint / "model.safetensors").items():
        gguf_name = _gguf_name(tensor_name)
        stem = gguf_name.split(".")[-2]
        if config["model_type"] == "llama" and stem in heads:
            halves = values.reshape(heads[stem], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        writer.add_tensor(gguf_name, values)
    for extra, values in (tensors or {}).items():
        writer.add_tensor(extra, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_settings(
    writer: gguf.GGUFWriter, config: dict[str, Any], name: str, settings: dict[str, int | float | str]
) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{name}.{key}", value)


def _write_tokenizer(
    writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any], splitting: str
) -> None:
    facts = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = sorted(facts["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in facts["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list([token for token, _ in vocabulary])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if index in special else normal for _, index in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in facts["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_eot_token_id(config["pad_token_id"])
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_STEMS[rest]}.{leaf}"
