"""GGUF checkpoints: config, tokenizer and dequantised weights out of one file.

A GGUF file names its tensors and settings in llama.cpp's way, and its weights are blocks of 4 to 8 bits.
They are dequantised to the floats that the blocks stand for; the compiled model computes with those, in the
dtype of the build. Only what is understood completely is accepted: a setting, tensor or tokenizer rule that
would be dropped (rope scaling, experts, an unknown way of splitting text) is refused, because dropping it
changes the answers.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Header and tokenizer are read by
transformers (integrations/gguf, the reader that its own loader uses), blocks by the `gguf` package.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from ..errors import BuildError
from ..interrupts import held_interrupts
from .weights import TensorInfo, name_some

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# llama.cpp's name of a setting -> the name in a transformers config.
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Read below, or implied by the tensors.
_UNDERSTOOD = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<leaf>weight|bias)")

# Vocabularies trained with every digit on its own, then GPT-2's pattern (llama.cpp's llama-vocab.cpp splits
# these on "\p{N}" first). transformers 5.24 knows no rule for them and falls back to GPT-2's pattern alone,
# which reads the spaces before a digit differently.
_DIGIT_SPLIT_TOKENIZERS = {"smollm", "starcoder", "refact", "codeshell"}
_GPT2_TOKENIZERS = {"gpt-2"}

# End-of-turn tokens that llama.cpp stops at as well as at EOS.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GgufFile:
    """One GGUF file, its header read and checked; `BuildError` says what in it cannot be compiled faithfully.

    Implements `Weights` (see `weights.py`) under transformers' tensor names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._header = GgufHeader.from_file(str(path))
            self._metadata, _ = read_gguf_metadata(str(path))
        except (ValueError, KeyError, IndexError, OSError, struct.error) as error:
            raise BuildError(f"{path}: not a GGUF file that can be read ({error})") from error
        self._check_whole()
        self.architecture = self._header.architecture
        if self.architecture not in _ARCHITECTURES:
            raise BuildError(
                f"{path}: GGUF files of architecture {self.architecture!r} are not supported (supported: "
                f"{', '.join(_ARCHITECTURES)}); use the safetensors checkpoint of this model"
            )
        self._stored = {self._model_name(info.name): info for info in self._header.tensors}

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shapes as the model has them; dtype float32, what a block dequantises to."""
        return {
            name: TensorInfo(tuple(info.shape), torch.float32, self.path)
            for name, info in self._stored.items()
        }

    @property
    def stored_dtype(self) -> torch.dtype:
        """The float type of the file, bfloat16 if it holds quantised blocks (which say nothing about it)."""
        return self._header.dtype or torch.bfloat16

    @contextmanager
    def open(self) -> Iterator[dict[str, Any]]:
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        config = self.config
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        tensors = {}
        for name, info in self._stored.items():
            start = self._header.data_start + info.offset
            stem = info.name.split(".")[-2]
            num_heads = heads.get(stem) if self.architecture == "llama" else None
            blocks = data[start : start + info.nbytes]
            tensors[name] = _LazyTensor(blocks, info.ggml_type, tuple(info.shape), num_heads)
        yield tensors

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The transformers config that the file describes."""
        settings = self._settings()
        known = {ours: _exact(settings.pop(key)) for key, ours in self._required(settings).items()}
        num_heads = known["num_attention_heads"]
        head_dim = settings.get("attention.key_length", known["hidden_size"] // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if settings.get(key, head_dim) != head_dim:
                raise BuildError(f"{self.path}: {key} {settings[key]} differs from the head size {head_dim}")
        vocab_size = self._stored["model.embed_tokens.weight"].shape[0]
        if settings.get("vocab_size", vocab_size) != vocab_size:
            raise BuildError(
                f"{self.path}: vocab_size {settings['vocab_size']}, but {vocab_size} embedding rows"
            )
        biased = "model.layers.0.self_attn.q_proj.bias" in self._stored
        options = known | {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "num_key_value_heads": settings.get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": vocab_size,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": _exact(settings.get("rope.freq_base", 10000.0)),
            },
            "tie_word_embeddings": "lm_head.weight" not in self._stored,
            "bos_token_id": self._token_id("bos_token_id"),
            "eos_token_id": self._token_id("eos_token_id"),
            "pad_token_id": self._token_id("padding_token_id"),
        }
        if self.architecture != "qwen2":  # there the biases of q, k and v are part of the architecture
            options["attention_bias"] = biased
        with held_interrupts():  # transformers imports the family's code now
            return AutoConfig.for_model(self.architecture, **options)

    def generation_config(self) -> GenerationConfig:
        """The token ids that start, end and pad; every end-of-turn token of the file counts as an end."""
        ends = sorted({end for key in _END_KEYS if (end := self._token_id(key)) is not None})
        return GenerationConfig(
            bos_token_id=self._token_id("bos_token_id"),
            eos_token_id=(ends if len(ends) > 1 else ends[0]) if ends else None,
            pad_token_id=self._token_id("padding_token_id"),
        )

    def check_tokenizer(self) -> None:
        """Refuse a vocabulary whose way of splitting text is not known for certain."""
        model = self._metadata.get("tokenizer.ggml.model")
        rule = self._metadata.get("tokenizer.ggml.pre")
        known = {*GGUF_PRE_TOKENIZER_SPLITS, *_DIGIT_SPLIT_TOKENIZERS, *_GPT2_TOKENIZERS}
        if model != "gpt2" or rule not in known:
            raise BuildError(
                f"{self.path}: tokenizer {model!r} with the splitting rule {rule!r} is not supported for "
                "GGUF files; use the safetensors checkpoint of this model"
            )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with its special tokens and chat template."""
        self.check_tokenizer()
        architecture, vocabulary, options = get_gguf_tokenizer(str(self.path))
        backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
        if vocabulary["pre_tokenizer_type"] in _DIGIT_SPLIT_TOKENIZERS:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            model_max_length=self.config.max_position_embeddings,
            **{name: value for name, value in options.items() if value is not None},
        )

    def _check_whole(self) -> None:
        tensors = self._header.tensors
        end = self._header.data_start + max((info.offset + info.nbytes for info in tensors), default=0)
        size = self.path.stat().st_size
        if size < end:
            cut = [i.name for i in tensors if self._header.data_start + i.offset + i.nbytes > size]
            raise BuildError(
                f"{self.path}: is {size} bytes, but its header describes {end}: {name_some(cut)} cut off. "
                "Download it again."
            )

    def _model_name(self, name: str) -> str:
        match = _NAME.fullmatch(name)
        table = _LAYER_TENSORS if match and match["layer"] else _TENSORS
        if match is None or match["stem"] not in table:
            reason = " (scaled rotary embeddings)" if name.startswith("rope_") else ""
            raise BuildError(
                f"{self.path}: tensor {name}{reason} has no place in a {self.architecture} model as GGUF "
                "describes it; use the safetensors checkpoint of this model"
            )
        layer = f"model.layers.{match['layer']}." if match["layer"] else ""
        return f"{layer}{table[match['stem']]}.{match['leaf']}"

    def _settings(self) -> dict[str, Any]:
        """The architecture's settings without their prefix, all of them understood."""
        prefix = f"{self.architecture}."
        settings = {
            key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)
        }
        if settings.get("rope.scaling.type") == "none":
            settings = {key: value for key, value in settings.items() if not key.startswith("rope.scaling.")}
        unknown = settings.keys() - _REQUIRED.keys() - _UNDERSTOOD
        if unknown:
            raise BuildError(
                f"{self.path}: the setting {name_some({prefix + key for key in unknown})} is not supported "
                "for GGUF files; use the safetensors checkpoint of this model"
            )
        return settings

    def _required(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        missing = _REQUIRED.keys() - settings.keys()
        if missing or "model.embed_tokens.weight" not in self._stored:
            raise BuildError(f"{self.path}: lacks {name_some(missing) if missing else 'token_embd.weight'}")
        return _REQUIRED

    def _token_id(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return None if value is None else int(value)


@dataclass(frozen=True, slots=True)
class _LazyTensor:
    """`tensor[...]` dequantises; `num_heads` undoes llama.cpp's order of the rotary halves of q and k."""

    blocks: np.ndarray
    ggml_type: int
    shape: tuple[int, ...]
    num_heads: int | None

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows = self.blocks.reshape(self.shape[0] if len(self.shape) > 1 else 1, -1)
        values = dequantize(rows, GGMLQuantizationType(self.ggml_type)).reshape(self.shape)
        if self.num_heads is not None:
            # convert_hf_to_gguf.py interleaves the two halves of each head: [heads, 2, half] -> [heads,
            # half, 2].
            paired = values.reshape(self.num_heads, -1, 2, *self.shape[1:])
            values = paired.swapaxes(1, 2).reshape(self.shape)
        return torch.from_numpy(np.array(values, dtype=np.float32))[index]


def convert_gguf(path: Path, directory: Path, dtype: torch.dtype) -> Path:
    """Write `path` as a plain Hugging Face directory with safetensors weights in `dtype`; return `directory`.

    `save_pretrained` of transformers keeps GGUF blocks packed, hence the writing by hand.
    """
    source = GgufFile(path)
    directory.mkdir(parents=True, exist_ok=True)
    with source.open() as tensors:
        state = {name: tensor[...].to(dtype) for name, tensor in tensors.items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(source.config, directory, dtype)
    source.generation_config().save_pretrained(directory)
    source.tokenizer().save_pretrained(directory)
    return directory


def write_config(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> None:
    """Write config.json with the dtype of the weights and the model class in it."""
    facts = json.loads(config.to_json_string()) | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _exact(value: Any) -> Any:
    """The number that was written as float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
