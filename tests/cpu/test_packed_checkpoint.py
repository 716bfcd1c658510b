"""AWQ and GPTQ checkpoints from file to engine: the numbers of the dequantised model, every tensor exactly once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import pelton
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pelton.compile.build_plan import BuildRequest, resolve
from pelton.compile.checkpoint import load_model, open_checkpoint
from pelton.compile.model_loading import empty_model, load_tensors
from pelton.compile.packed_checkpoint import placeholders
from pelton.compile.quantize import Int4Linear
from pelton.compile.weight_plan import WeightPlan
from pelton.errors import BuildError
from pelton.plugins_trt.tensorrt import TENSORRT_RTX, find_version
from pelton.scripts.cli import main
from support.checkpoints import tiny_checkpoint
from support.packed import pack_checkpoint, quantization_config, say_how

needs_rtx = pytest.mark.skipif(find_version(TENSORRT_RTX) is None, reason="TensorRT-RTX is not installed")
Tensors = dict[str, torch.Tensor | None]
PROMPT = torch.arange(3, 27)[None]
UP = "model.layers.1.mlp.up_proj"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def loaded(path: Path) -> tuple[torch.nn.Module, list[str]]:
    checkpoint = open_checkpoint(str(path))
    warnings = list(checkpoint.warnings)
    return load_model(checkpoint, torch.float32, warnings.append), warnings


def assert_loads_as(path: Path, restored: Path) -> list[str]:
    """The logits of `path` are those of transformers with the dequantised weights of `restored`; returns warnings."""
    model, warnings = loaded(path)
    expected = logits(AutoModelForCausalLM.from_pretrained(restored, dtype=torch.float32))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    return warnings


def edit_tensors(path: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    copies = {
        name: tensor.clone() for name, tensor in tensors.items() if tensor is not None
    }  # some may be one
    save_file(copies, path / "model.safetensors", metadata={"format": "pt"})
    return path


def packed_llama(path: Path, method: str = "gptq", group_size: int = 32, **options: Any) -> Path:
    pack_checkpoint(tiny_checkpoint("llama", path), method, group_size, **options)
    return path


def invoke(*arguments: str | Path) -> tuple[int, str]:
    """Run the command line in this process; exit status and what it wrote."""
    result = CliRunner().invoke(main, [*map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("method", "group_size", "options"),
    [
        ("awq", 32, {}),
        ("awq", 64, {"plain": ()}),
        ("awq", 128, {"symmetric": True}),
        ("awq", -1, {}),
        ("gptq", 32, {}),
        ("gptq", 64, {"symmetric": True, "plain": ()}),
        ("gptq", 128, {}),
        ("gptq", -1, {}),
        ("gptq", 32, {"act_order": True}),
        ("gptq_v2", 32, {"act_order": True, "symmetric": True}),
        ("gptq_v2", 64, {}),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_packed_model_is_the_dequantised_one(
    family: str, method: str, group_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_checkpoint(family, tmp_path / "packed")
    restored = pack_checkpoint(path, method, group_size, **options)
    assert assert_loads_as(path, restored) == []


def test_no_weight_is_held_that_the_plan_does_not_count(tmp_path: Path) -> None:
    path = packed_llama(tmp_path / "packed", act_order=True)
    checkpoint = open_checkpoint(str(path))
    packed = checkpoint.packed
    assert packed is not None
    with checkpoint.weights.open() as tensors:
        stand_ins = placeholders(tensors, packed, torch.float16)
        model = load_tensors(checkpoint.config, stand_ins, torch.float16, "packed")
    for layer in packed.layers.values():
        weight = model.get_submodule(layer.module).weight
        assert weight.shape == layer.shape
        assert weight.untyped_storage().nbytes() == 2, "one element, also after transformers has loaded it"
    model = load_model(checkpoint, torch.float16)
    kinds = [type(module) for name, module in model.named_modules() if name.endswith("_proj")]
    assert kinds == [Int4Linear] * 14
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    planned = WeightPlan(None, packed).num_bytes(empty_model(checkpoint.config), 2, torch.float16)
    assert planned == pytest.approx(sum(held.values()), rel=0.01)
    assert not any(torch.isnan(parameter).any() for parameter in model.parameters())


def test_layers_that_are_stored_as_they_were_stay_that(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "packed")
    restored = pack_checkpoint(path, "awq", 32, plain=("lm_head", "down_proj"))
    listed = {
        "modules_not_to_convert": ["lm_head", "mlp.down_proj", "proj"]
    }  # `proj` is no whole name of a layer
    say_how(path, quantization_config("awq", 32) | listed)
    assert assert_loads_as(path, restored) == []
    model, _ = loaded(path)
    assert isinstance(model.get_submodule("model.layers.0.mlp.down_proj"), torch.nn.Linear)
    assert isinstance(model.get_submodule("model.layers.0.mlp.up_proj"), Int4Linear)


def test_a_layer_said_to_be_plain_that_is_packed_is_refused(tmp_path: Path) -> None:
    path = packed_llama(tmp_path / "packed", "awq")
    say_how(path, quantization_config("awq", 32) | {"modules_not_to_convert": ["k_proj"]})
    with pytest.raises(
        BuildError, match=r"layers\.0\.self_attn\.k_proj is stored packed, but .* lists k_proj"
    ):
        open_checkpoint(str(path))


def test_ql_04_tied_heads(tmp_path: Path) -> None:
    """Without a head in the file it is the embedding; a packed one is used, with a warning."""
    path = tiny_checkpoint("llama", tmp_path / "tied", tie_word_embeddings=True)
    assert assert_loads_as(path, pack_checkpoint(path, "gptq", 32)) == []
    model, _ = loaded(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight

    path = tiny_checkpoint("llama", tmp_path / "packed", tie_word_embeddings=True)
    edit_tensors(path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    restored = pack_checkpoint(path, "gptq", 32, plain=())
    config = json.loads((restored / "config.json").read_text()) | {"tie_word_embeddings": False}
    (restored / "config.json").write_text(json.dumps(config))
    (warning,) = assert_loads_as(path, restored)
    assert "ties lm_head to the embedding, but the checkpoint holds it packed" in warning


def test_ql_02_a_wrong_label_is_one_warning_for_all_layers(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "packed")
    restored = pack_checkpoint(path, "gptq_v2", 32, symmetric=True)
    say_how(path, quantization_config("gptq", 32, symmetric=True))
    (warning,) = assert_loads_as(path, restored)
    assert warning.startswith("model.layers.0.mlp.down_proj.qzeros and 13 more: labelled gptq, but")


def test_biases_of_zeros_that_no_layer_has_are_dropped_and_others_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "packed")
    restored = pack_checkpoint(path, "gptq", 32)
    edit_tensors(path, lambda tensors: tensors.update({f"{UP}.bias": torch.zeros(96)}))
    assert assert_loads_as(path, restored) == []
    edit_tensors(path, lambda tensors: tensors[f"{UP}.bias"][7:].add_(1))
    with pytest.raises(BuildError, match=rf"have no place in the model: {UP}\.bias"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{UP}.qweight"), rf"{UP}\.qweight: missing"),
        (lambda t: t.pop(f"{UP}.qzeros"), rf"{UP}\.qzeros: missing"),
        (lambda t: t.pop(f"{UP}.scales"), rf"{UP}\.scales: missing"),
        (lambda t: [t.pop(f"{UP}.{leaf}") for leaf in ("qweight", "qzeros", "scales", "g_idx")], rf"{UP}\.weight"),
        (lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][:1]}), rf"{UP}\.scales: shape \[1, 96\]"),
        (lambda t: t.update({f"{UP}.g_idx": torch.zeros(63).int()}), rf"{UP}\.g_idx: .*\[63\] where 64"),
        (lambda t: t.update({f"{UP}.weight": torch.ones(96, 64)}), rf"{UP} is stored both packed and"),
        (lambda t: t.update({"model.layers.1.mlp.extra.weight": torch.ones(2, 2)}), r"mlp\.extra\.weight"),
        (
            lambda t: t.update({k.replace("layers.1", "layers.2"): v for k, v in t.items() if UP in k}),
            r"model\.layers\.2\.mlp\.up_proj\.qweight has no place",
        ),
        (
            lambda t: t.update({k: t[k.replace("up_proj", "down_proj")] for k in list(t) if UP in k}),
            rf"{UP} holds packed weights of \[64, 96\], config.json asks for \[96, 64\]",
        ),
        (
            lambda t: t.update(
                {k.replace(UP, "model.embed_tokens"): v for k, v in t.items() if UP in k}, **{EMBEDDING: None}
            ),
            r"model\.embed_tokens is packed, but no linear layer of the model .Embedding",
        ),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight"),
    ],
    ids=[
        "no qweight", "no qzeros", "no scales", "no layer", "scales", "g_idx", "twice", "extra", "extra layer",
        "transposed", "embedding", "norm",
    ],
)  # fmt: skip
def test_ql_04_every_packed_tensor_exactly_once(
    edit: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    path = edit_tensors(packed_llama(tmp_path / "packed"), edit)
    with pytest.raises(BuildError, match=message) as error:
        open_checkpoint(str(path))
    assert "\n" not in str(error.value)


def in_shards(path: Path) -> Path:
    """The checkpoint in two files with an index, the tensors of each layer in both."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_ql_05_ql_06_shards_of_packed_tensors(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "packed")
    restored = pack_checkpoint(path, "awq", 32)
    in_shards(path)
    name, tensor = next((n, t) for n, t in load_file(path / "a.safetensors").items() if n.endswith("qweight"))
    stale = load_file(path / "b.safetensors") | {name: torch.zeros_like(tensor)}
    save_file(stale, path / "b.safetensors", metadata={"format": "pt"})
    (warning,) = assert_loads_as(path, restored)
    assert "b.safetensors" in warning
    assert name in warning
    (path / "a.safetensors").unlink()
    with pytest.raises(BuildError, match=r"a\.safetensors is named in .* but missing"):
        open_checkpoint(str(path))


def test_values_of_g_idx_that_cannot_be_honoured_are_refused_before_anything_is_lowered(
    tmp_path: Path,
) -> None:
    path = packed_llama(tmp_path / "packed")
    edit_tensors(path, lambda tensors: tensors[f"{UP}.g_idx"].fill_(1))
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(BuildError, match=rf"{UP}\.g_idx: groups of other sizes"):
        load_model(checkpoint, torch.float32)


def test_packed_experts_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path / "packed", num_local_experts=4, num_experts_per_tok=2)
    pack_checkpoint(path, "awq", 32, plain=("lm_head", "gate"))
    with pytest.raises(BuildError, match=r"experts\.0\.w1 is packed and one of several"):
        open_checkpoint(str(path))


def test_packed_tensors_without_a_config_are_refused(tmp_path: Path) -> None:
    path = packed_llama(tmp_path / "packed")
    say_how(path, None)
    with pytest.raises(BuildError, match="no quantization_config that says how; take it from"):
        open_checkpoint(str(path))


def test_a_config_without_packed_tensors_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "plain")
    say_how(path, quantization_config("gptq", 32))
    with pytest.raises(BuildError, match=r"config\.json says gptq, but no tensor is packed"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"bits": 8},
            "gptq with bits 8; the kernels take 4 bits only; use an AWQ or GPTQ checkpoint of 4 bits",
        ),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not read"),
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors' is not read"),
        ({"quant_method": "fp8"}, "quant_method 'fp8' is not read"),
        ({"group_size": 256}, "gptq with group_size 256; supported are 32, 64, 128, -1"),
        ({"dynamic": {"-:lm_head": {}}}, "dynamic (settings that differ between layers)"),
    ],
)
def test_other_formats_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "packed")
    say_how(path, quantization_config("gptq", 32) | change)
    code, output = invoke("build", path, "--dry-run")
    assert code == 2
    assert f"config.json: quantization_config: {message}" in output
    assert "or the original one with --quantize" in output


def test_the_cpu_target_refuses_with_what_to_do(tmp_path: Path) -> None:
    code, output = invoke("build", packed_llama(tmp_path / "packed"), "-o", tmp_path / "out")
    assert code == 2
    assert "gptq weights of 4 bits, and the cpu target has no quantised kernels yet" in output
    assert "--target tensorrt-rtx, or the original checkpoint" in output
    assert not (tmp_path / "out").exists()


@needs_rtx
def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    path = packed_llama(tmp_path / "packed", "awq")
    code, output = invoke("build", path, "--target", TENSORRT_RTX, "--quantize", "int4", "--dry-run")
    assert code == 2
    assert "awq weights of 4 bits already; leave --quantize out" in output


@needs_rtx
def test_the_dry_run_says_int4_and_where_it_comes_from(tmp_path: Path) -> None:
    path = packed_llama(tmp_path / "packed", act_order=True)
    code, output = invoke("build", path, "--target", TENSORRT_RTX, "--dry-run")
    assert code == 0, output
    rows = dict(line.split(maxsplit=1) for line in output.splitlines() if line.count(" ") > 3)
    assert (
        "int4: 14 linear layers as the gptq checkpoint stores them, groups of 32, act-order"
        in rows["quantisation"]
    )
    assert rows["sampling"].endswith(" at most")
    assert f"artifacts/packed-{TENSORRT_RTX}-bfloat16-int4" in output
    assert "--quantize" not in rows["command"]


@needs_rtx
def test_the_content_key_knows_what_the_weights_come_from(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "packed", dtype=torch.float16)
    original = Path(shutil.copytree(path, tmp_path / "original"))
    pack_checkpoint(path, "awq", 32)
    request = BuildRequest(str(original), tmp_path / "out", target=TENSORRT_RTX)
    plans = [
        resolve(other)
        for other in (
            request, replace(request, quantize="int4"), replace(request, quantize="fp8"),
            replace(request, model=str(path)),
        )
    ]  # fmt: skip
    assert len({plan.content_key for plan in plans}) == 4
    whole, int4, fp8, packed = (plan.memory.weights for plan in plans)
    assert whole > fp8 > packed > int4  # groups of 32 take more scales than those of 128


@needs_rtx
def test_a_packed_checkpoint_becomes_a_plan(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "packed", dtype=torch.float16)
    pack_checkpoint(path, "gptq", 32, act_order=True)
    out = tmp_path / "out"
    done = pelton(
        "build", path, "-o", out, "--target", TENSORRT_RTX, "--gpu", "8.9", "--kv-cache-memory", "1MiB"
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["engine"]["quantization"] == {
        "scheme": "int4", "method": "gptq", "group_size": 32, "act_order": True, "num_layers": 14,
    }  # fmt: skip
    assert [proof["subject"] for proof in manifest["quality"]["proofs"]] == ["exported graph"]
    code, output = invoke("inspect", out)
    assert code == 0, output
    assert "act_order=True, group_size=32, method=gptq, num_layers=14, scheme=int4" in output
    layers = json.loads((out / "engine.json").read_text())["layers"]
    names = [name for name, kind, _ in layers if kind == "pelton::int4_linear"]
    # Q/K/V and gate/up of each layer are one.
    assert [name.split(".")[-1] for name in names] == [
        f"{module}/int4_linear" for module in ("q_proj", "o_proj", "gate_proj", "down_proj")
    ] * 2
