"""A bundle with drafter heads: the engine gives the model's hidden states, and the heads draft from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import pelton_here

from pelton import LLM, SpeculationConfig
from pelton.compile.bundle import read_manifest
from pelton.errors import ConfigError
from pelton.plugins_trt.cpu_engine import EngineProgram
from pelton.runtime.executor import StepOutput
from pelton.runtime.executor_cpu import CpuExecutor
from pelton.runtime.inputs import pack
from pelton.runtime.plan import PlanItem, StepPlan
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import DraftAsk
from pelton.runtime.speculate.heads import load_heads
from support.checkpoints import tiny_checkpoint, tiny_model
from support.drafters import random_drafter

PROMPT = (5, 17, 300, 42, 8, 8, 131)


def step(executor: CpuExecutor, sequence: Sequence, num_tokens: int) -> StepOutput:
    item = PlanItem(sequence, sequence.num_computed_tokens, num_tokens)
    output = executor.execute(pack(StepPlan((item,))))
    sequence.num_computed_tokens += num_tokens
    return output


def test_the_engine_gives_the_hidden_states_of_the_model(heads_bundle: Path) -> None:
    executor = CpuExecutor(heads_bundle, read_manifest(heads_bundle), kv_cache_bytes=1 << 20)
    sequence = Sequence(Request("r", PROMPT, SamplingParams()), block_ids=[3, 1])
    chunk = step(executor, sequence, 4)
    assert isinstance(chunk.hidden, torch.Tensor)
    assert chunk.hidden.shape == (0, 64)
    hidden = [step(executor, sequence, 3).hidden]
    for token in (9, 77):
        sequence.token_ids.append(token)
        hidden.append(step(executor, sequence, 1).hidden)
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, 9, 77]])
        states = tiny_model("llama")(ids, output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(torch.cat(hidden), states[len(PROMPT) - 1 :], rtol=1e-4, atol=1e-5)
    executor.close()


def test_the_heads_of_the_bundle_draft_from_them(heads_bundle: Path) -> None:
    manifest = read_manifest(heads_bundle)
    executor = CpuExecutor(heads_bundle, manifest, kv_cache_bytes=1 << 20)
    heads = load_heads(heads_bundle, manifest, executor.limits, min_probability=0.0)
    sequence = Sequence(Request("r", PROMPT, SamplingParams()), block_ids=[0, 1])
    output = step(executor, sequence, len(PROMPT))
    sequence.token_ids.append(int(np.asarray(output.logits)[0].argmax()))
    assert output.hidden is not None
    heads.observe(output.hidden, [sequence], [0])
    (draft,) = heads.propose([DraftAsk(sequence, 3)])
    assert len(draft) == 3
    assert all(0 <= token < manifest.model.vocab_size for token in draft.token_ids)
    executor.close()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "frequency_penalty": 1.5, "min_tokens": 10, "logit_bias": {7: 2.0}},
        {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    ],
    ids=["greedy", "processed", "seeded"],
)
def test_drafts_of_heads_change_nothing_that_a_client_sees(
    heads_bundle: Path, params: dict[str, Any]
) -> None:
    """In batches and over chunked prompts; random heads are right by chance alone, which is enough to be accepted."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, **params)
    prompts = [[(7 * i + 3 * j) % 500 for j in range(5 + 9 * i)] for i in range(6)]
    settings = [sampling if i % 3 else replace(sampling, num_draft_tokens=0) for i in range(6)]
    seen = []
    for speculation in (None, SpeculationConfig("heads", 3, is_adaptive=False)):
        options: dict[str, Any] = {
            "max_chunk_tokens": 16,
            "check_invariants": True,
            "speculation": speculation,
        }
        with LLM(heads_bundle, **options) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, settings)]
            seen.append([(o.token_ids, o.logprobs, o.finish_reason) for o in outputs])
            num_drafted = llm.engine.stats().num_draft_tokens
    assert seen[0] == seen[1]
    assert num_drafted > 50


def test_a_bundle_without_heads_gives_no_states_and_says_how_to_get_heads(
    tiny_bundles: dict[str, Path],
) -> None:
    bundle = tiny_bundles["llama"]
    manifest = read_manifest(bundle)
    assert manifest.drafter is None
    assert EngineProgram.read(bundle).hidden is None
    executor = CpuExecutor(bundle, manifest, kv_cache_bytes=1 << 20)
    sequence = Sequence(Request("r", PROMPT, SamplingParams()), block_ids=[0])
    assert step(executor, sequence, len(PROMPT)).hidden is None
    with pytest.raises(
        ConfigError, match=r"has none; train some with `pelton train-drafter`, build with --drafter"
    ):
        LLM(bundle, speculation=SpeculationConfig("heads"))
    executor.close()


def test_the_manifest_covers_the_heads_and_inspect_shows_them(heads_bundle: Path) -> None:
    manifest = json.loads((heads_bundle / "manifest.json").read_text())
    assert {"drafter.json", "drafter.safetensors"} < set(manifest["files"])
    assert manifest["drafter"] == {
        "kind": "eagle", "hidden_size": 64, "draft_vocab_size": 100, "num_draft_tokens": 3,
    }  # fmt: skip
    assert all(proof["hidden_error"] < 1e-5 for proof in manifest["quality"]["proofs"])
    shown = pelton_here("inspect", heads_bundle, "--verify")
    assert shown.exit_code == 0, shown.output
    assert "eagle, up to 3 tokens out of 100" in shown.output


def test_a_drafter_of_another_model_ends_a_build_with_2(tmp_path: Path) -> None:
    drafter = random_drafter(tiny_checkpoint("llama", tmp_path / "one"), tmp_path / "drafter")
    other = tiny_checkpoint("llama", tmp_path / "other", hidden_size=128)
    done = pelton_here("build", other, "--drafter", drafter, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "hidden_size: it is for a model with 64" in done.output
    assert not (tmp_path / "out").exists()
