"""Opening and loading checkpoints: what is refused, what is ignored, every parameter from the file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, T5Config

from pelton.compile.checkpoint import Checkpoint, load_model, open_checkpoint
from pelton.errors import BuildError
from support.checkpoints import FAMILIES, tiny_checkpoint

Tensors = dict[str, torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PROMPT = torch.arange(3, 27)[None]


def edit_tensors(path: Path, edit: Callable[[Tensors], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def edit_json(path: Path, edit: Callable[[dict[str, object]], None]) -> None:
    facts = json.loads(path.read_text())
    edit(facts)
    path.write_text(json.dumps(facts))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def loaded(path: Path) -> tuple[Checkpoint, torch.nn.Module]:
    checkpoint = open_checkpoint(str(path))
    return checkpoint, load_model(checkpoint, torch.float32)


def reference(path: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def sharded(path: Path, family: str = "llama") -> tuple[Path, list[Path]]:
    tiny_checkpoint(family, path, max_shard_size="60KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    return path, shards


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_equals_transformers(family: str, tmp_path: Path) -> None:
    path, _ = sharded(tmp_path, family)
    checkpoint, model = loaded(path)
    assert torch.equal(logits(model), reference(path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (checkpoint.dtype_name, checkpoint.warnings) == ("float32", ())


def test_the_dtype_of_the_checkpoint_is_told_and_that_of_the_build_is_loaded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("llama", tmp_path, dtype=torch.bfloat16)))
    assert checkpoint.dtype_name == "bfloat16"
    model = load_model(checkpoint, torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    edit_json(tmp_path / "config.json", lambda facts: facts.pop("dtype"))
    assert open_checkpoint(str(tmp_path)).dtype_name == "bfloat16"


def test_merged_experts_are_loaded(tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path, num_local_experts=4, num_experts_per_tok=2)
    assert any("experts.0" in name for name in load_file(path / "model.safetensors"))
    _, model = loaded(path)
    assert torch.equal(logits(model), reference(path))


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_ql_04_beside_merged_experts_too(lost: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path, num_local_experts=4, num_experts_per_tok=2)
    edit_tensors(path, lambda tensors: tensors.pop(lost))
    with pytest.raises(BuildError, match=lost):
        loaded(path)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"layers\.1\..*experts\.2\.w1", r"merge .*model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        (
            r"layers\.1\..*experts\.2\.",
            r"model\.layers\.1\.mlp\.experts\.down_proj \(\[3, 64, 96\] instead of \[4,",
        ),
    ],
    ids=["one of three matrices", "whole expert"],
)
def test_ql_04_merged_experts_must_be_complete(pattern: str, message: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path, num_local_experts=4, num_experts_per_tok=2)
    lost = [name for name in load_file(path / "model.safetensors") if re.search(pattern, name)]
    edit_tensors(path, lambda tensors: [tensors.pop(name) for name in lost])
    with pytest.raises(BuildError, match=message):
        loaded(path)


def test_ql_04_tied_without_a_head(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    assert HEAD not in load_file(path / "model.safetensors")
    checkpoint, model = loaded(path)
    assert torch.equal(logits(model), reference(path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert checkpoint.warnings == ()


def test_ql_04_tied_with_an_equal_head(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    edit_tensors(path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    checkpoint, model = loaded(path)
    assert torch.equal(logits(model), reference(path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert checkpoint.warnings == ()


def test_ql_04_tied_with_a_different_head(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    head = torch.randn(320, 64)
    edit_tensors(path, lambda tensors: tensors.update({HEAD: head}))
    checkpoint, model = loaded(path)
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(model.model.embed_tokens.weight, head)
    assert len(checkpoint.warnings) == 1
    assert HEAD in checkpoint.warnings[0]
    assert not checkpoint.config.tie_word_embeddings
    edit_json(path / "config.json", lambda facts: facts.update(tie_word_embeddings=False))
    assert torch.equal(logits(model), reference(path))


def test_ql_04_untied_without_a_head(tmp_path: Path) -> None:
    path = edit_tensors(tiny_checkpoint("llama", tmp_path), lambda tensors: tensors.pop(HEAD))
    with pytest.raises(BuildError, match=HEAD):
        open_checkpoint(str(path))


def test_ql_04_tied_with_only_a_head(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    expected = reference(path)
    edit_tensors(path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    _, model = loaded(path)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}),
            "layers.2.mlp.up_proj",
        ),
        (lambda t: t.update({"model.norm.bias": torch.ones(64)}), "model.norm.bias"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model.norm.weight.*\[63\].*\[64\]"),
        (
            lambda t: t.update({"norm.weight": torch.ones(64)}),
            "norm.weight and norm.weight|norm.weight.*norm.weight",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}), "float8"),
    ],
    ids=["missing", "missing norm", "extra layer", "extra bias", "shape", "twice", "quantised"],
)
def test_ql_04_every_parameter_exactly_once(
    edit: Callable[[Tensors], None], names: str, tmp_path: Path
) -> None:
    path = edit_tensors(tiny_checkpoint("llama", tmp_path), edit)
    with pytest.raises(BuildError, match=names):
        open_checkpoint(str(path))


def test_computed_tables_in_the_file_are_tolerated(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(path, lambda tensors: tensors.update({table: torch.ones(8)}))
    _, model = loaded(path)
    assert torch.equal(logits(model), reference(path))


def test_ql_05_missing_shard(tmp_path: Path) -> None:
    path, shards = sharded(tmp_path)
    lost = next(iter(load_file(shards[1])))
    shards[1].unlink()
    with pytest.raises(BuildError, match=shards[1].name) as error:
        open_checkpoint(str(path))
    assert lost in str(error.value)


@pytest.mark.parametrize("kept", [-1, 200, 4])
def test_ql_05_truncated_shard(kept: int, tmp_path: Path) -> None:
    path, shards = sharded(tmp_path)
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[:kept])
    with pytest.raises(BuildError, match=shards[1].name):
        open_checkpoint(str(path))


def test_ql_05_swapped_shards(tmp_path: Path) -> None:
    path, shards = sharded(tmp_path)
    moved = next(iter(load_file(shards[0])))
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)
    with pytest.raises(BuildError, match=shards[0].name) as error:
        open_checkpoint(str(path))
    assert moved in str(error.value)


def test_ql_05_index_that_points_outside(tmp_path: Path) -> None:
    path, _ = sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    edit_json(index, lambda facts: facts["weight_map"].update({EMBEDDING: "../secret.safetensors"}))
    with pytest.raises(BuildError, match=r"not a file name"):
        open_checkpoint(str(path))


def test_ql_06_files_beside_the_index_are_ignored(tmp_path: Path) -> None:
    path, _ = sharded(tmp_path)
    expected = reference(path)
    save_file({EMBEDDING: torch.zeros(320, 64)}, path / "model.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(320, 64)}, path / "consolidated.safetensors")
    checkpoint, model = loaded(path)
    assert torch.equal(logits(model), expected)
    assert ["model.safetensors" in w or "consolidated.safetensors" in w for w in checkpoint.warnings] == [
        True,
        True,
    ]


def test_ql_06_stale_copy_in_another_shard_is_ignored(tmp_path: Path) -> None:
    path, shards = sharded(tmp_path)
    expected = reference(path)
    name = next(iter(load_file(shards[0])))
    stale = load_file(shards[-1]) | {name: torch.zeros_like(load_file(shards[0])[name])}
    save_file(stale, shards[-1], metadata={"format": "pt"})
    checkpoint, model = loaded(path)
    assert torch.equal(logits(model), expected)
    assert [shards[-1].name in warning and name in warning for warning in checkpoint.warnings] == [True]


def test_ql_06_without_an_index_duplicates_are_an_error(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    save_file({EMBEDDING: torch.zeros(320, 64)}, path / "stale.safetensors")
    with pytest.raises(BuildError, match=EMBEDDING) as error:
        open_checkpoint(str(path))
    assert "stale.safetensors" in str(error.value)


def test_ql_06_without_an_index_files_add_up(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    expected = reference(path)
    tensors = load_file(path / "model.safetensors")
    save_file({EMBEDDING: tensors.pop(EMBEDDING)}, path / "embedding.safetensors")
    save_file(tensors, path / "model.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, path / "consolidated.00.safetensors")
    checkpoint, model = loaded(path)
    assert torch.equal(logits(model), expected)
    assert ["consolidated.00" in warning for warning in checkpoint.warnings] == [True]


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(BuildError, match=r"pytorch_model\.bin.*safetensors"):
        open_checkpoint(str(path))
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(BuildError, match="no weights"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"model_type": "not_a_model"}, "not_a_model"),
        ({"model_type": "not_a_model", "auto_map": {"AutoConfig": "x.Y"}}, "never run"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        (T5Config().to_dict(), "encoder-decoder"),
        (Gemma3Config().to_dict(), "multi-modal"),
        ({"model_type": "vit", "architectures": []}, "not a causal LM"),
    ],
)
def test_unsupported_configs_are_refused(facts: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    edit_json(path / "config.json", lambda config: config.update(facts))
    with pytest.raises(BuildError, match=message) as error:
        open_checkpoint(str(path))
    assert "\n" not in str(error.value)


def test_a_directory_must_be_complete(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(BuildError, match="no tokenizer"):
        open_checkpoint(str(path))
    (path / "config.json").write_text("{")
    with pytest.raises(BuildError, match=r"config\.json"):
        open_checkpoint(str(path))
    (path / "config.json").unlink()
    with pytest.raises(BuildError, match=r"no config\.json"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "model.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(model: str) -> None:
    with pytest.raises(BuildError, match="no such file or directory"):
        open_checkpoint(model)


def test_a_failed_download_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        BuildError, match=r"^nobody/nothing: no such directory here, and downloading"
    ) as error:
        open_checkpoint("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_download_takes_what_is_needed_and_no_second_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    needed = {"config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "merges.txt"}
    needed |= {"tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json"}
    others = {"consolidated.safetensors", "onnx/model.safetensors", "pytorch_model.bin", "modeling.py"}
    taken: set[str] = set()

    def snapshot_download(model: str, **patterns: list[str]) -> str:
        assert model == "owner/model"
        taken.update(filter_repo_objects(needed | others, **patterns))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert open_checkpoint("owner/model").path == path
    assert taken == needed


def test_the_content_hash_follows_contents_and_not_places(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "a")
    original = open_checkpoint(str(path)).content_hash
    copy = Path(shutil.copytree(path, tmp_path / "b"))
    (copy / "README.md").write_text("a model")
    assert open_checkpoint(str(copy)).content_hash == original
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    with_template = open_checkpoint(str(copy)).content_hash
    edit_tensors(copy, lambda tensors: tensors[EMBEDDING][0].add_(1))
    assert len({original, with_template, open_checkpoint(str(copy)).content_hash}) == 3
