"""Engines of builds with a drafter give the hidden states that the logits were made from; others are as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pelton.compile import export as export_module
from pelton.compile.build_plan import BuildPlan, BuildRequest, resolve
from pelton.compile.checkpoint import load_model, open_checkpoint
from pelton.compile.export import export, kv_geometry
from pelton.compile.passes import optimise
from pelton.compile.piecewise import cut_at_attention
from pelton.compile.proof import FlatStep, ProofResult, StepResult, compare, exported_step, record
from pelton.compile.segments import cut, layer_prefix, step_results
from pelton.compile.train_drafter import write_drafter
from pelton.errors import BuildError
from support.checkpoints import tiny_checkpoint, tiny_model
from support.drafters import head_config, random_drafter, random_weights


def proved(family: str, dtype: torch.dtype) -> ProofResult:
    model = tiny_model(family).to(dtype)
    program = export(model, block_size=16, with_hidden=True)
    trace = record(model, windows=[], block_size=16, with_hidden=True)
    return compare(trace, exported_step(program, kv_geometry(model.config), trace, dtype), "graph")


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_the_graph_gives_what_the_head_of_the_model_reads(family: str) -> None:
    result = proved(family, torch.float32)
    assert result.hidden_error is not None
    assert result.hidden_error < 1e-6
    assert result.relative_error < 1e-6


def test_in_bfloat16_the_states_may_err_as_much_as_the_models_own() -> None:
    result = proved("llama", torch.bfloat16)
    assert result.hidden_error is not None
    assert 1e-3 < result.hidden_error < 0.02


def test_a_form_with_wrong_states_or_none_is_refused() -> None:
    model = tiny_model("llama")
    program = export(model, block_size=16, with_hidden=True)
    trace = record(model, windows=[], block_size=16, with_hidden=True)
    geometry = kv_geometry(model.config)

    def wrong(scale: float) -> object:
        run = exported_step(program, geometry, trace, torch.float32)

        def step(flat: FlatStep) -> StepResult:
            result = run(flat)
            assert result.hidden is not None
            return replace(result, hidden=result.hidden * scale)

        return step

    compare(trace, wrong(1.0), "graph")  # type: ignore[arg-type]
    with pytest.raises(
        BuildError, match=r"graph does not reproduce.* of the hidden states, at most 1.00e-04"
    ):
        compare(trace, wrong(1.001), "graph")  # type: ignore[arg-type]
    without = exported_step(export(model, block_size=16), geometry, trace, torch.float32)
    with pytest.raises(BuildError, match="relative error nan of the hidden states"):
        compare(trace, without, "graph")


def test_segments_and_pieces_end_in_logits_and_states() -> None:
    model = tiny_model("llama")
    num_layers = model.config.num_hidden_layers
    for with_hidden in (False, True):
        program = export(model, block_size=16, with_hidden=with_hidden)
        graph_module = optimise(program.module(check_guards=False))
        logits, *hidden = (node.name for node in step_results(graph_module))
        assert len(hidden) == with_hidden
        segments = cut(graph_module, layer_prefix(model, num_layers), num_layers)
        assert [node.name for node in segments[-1].outputs] == [*hidden, logits]
        pieces = cut_at_attention(graph_module)
        assert [node.name for node in pieces[-1].segment.outputs] == [*hidden, logits]


def test_a_head_that_is_not_called_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def unseen(model: nn.Module, *, are_wanted: bool) -> Iterator[list[Tensor]]:
        yield []

    monkeypatch.setattr(export_module, "head_inputs", unseen)
    with pytest.raises(BuildError, match="drafter: LlamaForCausalLM calls its head 0 times"):
        export(tiny_model("llama"), block_size=16, with_hidden=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


def plan(checkpoint: Path, drafter: Path | None = None, **options: str) -> BuildPlan:
    return resolve(BuildRequest(str(checkpoint), drafter=drafter, **options))  # type: ignore[arg-type]


def test_the_content_key_covers_the_drafter_and_nothing_without_one(checkpoint: Path, tmp_path: Path) -> None:
    without = plan(checkpoint)
    first = plan(checkpoint, random_drafter(checkpoint, tmp_path / "first"))
    assert plan(checkpoint).content_key == without.content_key
    assert first.content_key != without.content_key
    same = random_drafter(checkpoint, tmp_path / "same")
    other = random_drafter(checkpoint, tmp_path / "other", seed=1)
    assert plan(checkpoint, same).content_key == first.content_key
    assert plan(checkpoint, other).content_key != first.content_key
    assert f"--drafter {tmp_path}/first" in first.command
    assert "--drafter" not in without.command
    assert (
        first.memory.weights - without.memory.weights
        == (tmp_path / "first/drafter.safetensors").stat().st_size
    )
    assert first.output != without.output
    assert ("drafter", "eagle, up to 3 tokens out of 100") in first.explain()
    assert first.warnings == without.warnings


@pytest.mark.parametrize("target", ["tensorrt-rtx", "tensorrt", "cuda"])
def test_targets_whose_engines_give_no_states_refuse_a_drafter(
    checkpoint: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pelton.compile import build_plan

    monkeypatch.setattr(
        build_plan, "_target", lambda *_: None
    )  # what these need of a machine is not the question
    drafter = random_drafter(checkpoint, tmp_path / "drafter")
    with pytest.raises(BuildError, match=f"drafter: target is {target}, but only engines of target cpu give"):
        plan(checkpoint, drafter, target=target)


def test_a_drafter_for_another_model_is_refused_with_the_field(checkpoint: Path, tmp_path: Path) -> None:
    fitting = random_drafter(checkpoint, tmp_path / "fitting")
    wider = tiny_checkpoint("llama", tmp_path / "wider", hidden_size=128)
    with pytest.raises(BuildError, match=r"hidden_size: it is for a model with 64, .*wider has 128"):
        plan(wider, fitting)
    larger = tiny_checkpoint("llama", tmp_path / "larger", vocab_size=384)
    with pytest.raises(BuildError, match=r"vocab_size: it is for a model with 320, .*larger has 384"):
        plan(larger, fitting)
    swapped = tiny_checkpoint("llama", tmp_path / "swapped")
    text = (swapped / "tokenizer.json").read_text()
    (swapped / "tokenizer.json").write_text(
        text.replace('"a":', '"@@":').replace('"b":', '"a":').replace('"@@":', '"b":')
    )
    with pytest.raises(
        BuildError, match="vocabulary: it was trained with a tokenizer whose ids stand for other"
    ):
        plan(swapped, fitting)
    with pytest.raises(BuildError, match=r"drafter: .*nothing is no directory"):
        plan(checkpoint, tmp_path / "nothing")
    (fitting / "drafter.json").write_text('{"kind": "oracle"}')
    with pytest.raises(BuildError, match=r"drafter: .*drafter\.json: \w+: "):
        plan(checkpoint, fitting)


def test_other_weights_of_the_same_vocabulary_are_only_warned_of(checkpoint: Path, tmp_path: Path) -> None:
    drafter = random_drafter(checkpoint, tmp_path / "drafter")
    tuned = tiny_checkpoint("llama", tmp_path / "tuned", seed=5)
    (warning,) = set(plan(tuned, drafter).warnings) - set(plan(tuned).warnings)
    assert "was trained on another checkpoint" in warning


def test_the_hidden_states_stay_in_the_dtype_of_the_model(checkpoint: Path) -> None:
    model = load_model(open_checkpoint(str(checkpoint)), torch.bfloat16)
    program = export(model, block_size=16, with_hidden=True)
    trace = record(model, windows=[], block_size=16, with_hidden=True)
    run = exported_step(program, kv_geometry(model.config), trace, torch.bfloat16)
    seen: list[StepResult] = []
    compare(trace, lambda step: seen.append(run(step)) or seen[-1], "graph")
    assert {result.hidden.dtype for result in seen if result.hidden is not None} == {torch.bfloat16}
    assert seen[0].logits.dtype == torch.float32


def test_an_existing_directory_that_is_no_drafter_is_not_overwritten(tmp_path: Path) -> None:
    config = head_config()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(BuildError, match="exists and is no drafter"):
        write_drafter(tmp_path / "mine", config, random_weights(config))
    write_drafter(tmp_path / "drafter", config, random_weights(config))
    write_drafter(tmp_path / "drafter", config, random_weights(config, seed=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "mine"]
