"""The memory that a plan promises, against what is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pelton.compile.build_plan import BuildRequest, resolve
from pelton.compile.bundle import Limits, ModelFacts
from pelton.compile.memory import plan_gpu_memory, plan_memory
from pelton.compile.model_loading import empty_model
from pelton.compile.quantize import Quantization, quantize_linears
from pelton.compile.quantize_experts import quantize_experts
from pelton.compile.weight_plan import WeightPlan
from pelton.plugins_trt.paged_attention_cpu import attend, pack_work
from support.checkpoints import tiny_checkpoint, tiny_model
from support.trt_bundle import VOCAB_SIZE, limits, open_fake

# Heads as SmolLM2-135M has them, and next to nothing else.
FACTS = ModelFacts(
    source="some/model",
    model_type="llama",
    num_parameters=1000,
    num_layers=2,
    num_attention_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=1,
    vocab_size=1,
    max_position_embeddings=4096,
)
LIMITS = Limits(
    max_model_len=4096, max_batch_size=8, max_step_tokens=512, block_size=32, kv_cache_bytes=1 << 20
)


def activations(dtype: torch.dtype, *, has_tiles: bool) -> int:
    return plan_memory(FACTS, LIMITS, dtype, is_tied=False, has_tiles=has_tiles).activations


def attention_peak(past: list[int], new: list[int], windows: list[int]) -> int:
    """Bytes at the peak of one layer's attention in bfloat16 over the first of `windows`, and the masks of them all."""
    lengths = np.add(past, new).astype(np.int32)
    width = LIMITS.max_blocks_per_sequence
    table = np.arange(len(new) * width, dtype=np.int32).reshape(len(new), width)
    work = pack_work(
        table, lengths, np.cumsum([0, *new]).astype(np.int32),
        block_size=LIMITS.block_size, padding_page=table.size, windows=windows, tile_dtype=torch.bfloat16,
    )  # fmt: skip
    k_pages = torch.zeros(table.size + 1, 3, 64, LIMITS.block_size, dtype=torch.bfloat16)
    v_pages = k_pages.transpose(2, 3).contiguous()
    query = torch.zeros(sum(new), 9, 64, dtype=torch.bfloat16)
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(past, new, strict=True)])
    with (
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        attend(
            query,
            k_pages,
            v_pages,
            positions,
            work.rows[0],
            work.tile_groups[0],
            work.output_index,
            0.1,
            0,
            0.0,
        )
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak = max(np.cumsum([event.nbytes() for event in events]))
    return int(peak) + sum(group.mask.nbytes for groups in work.tile_groups for group in groups)


def test_activations_bound_the_largest_step_of_tiles() -> None:
    new = [449, *[9] * 7]  # 11 tiles in 512 tokens of 8 sequences, each at the end of the longest context
    used = attention_peak([4096 - n for n in new], new, [0, 4095])
    rows = activations(torch.bfloat16, has_tiles=False) * 8 * 8 // 512
    tiles = activations(torch.bfloat16, has_tiles=True) - rows
    assert used <= tiles
    # K and V are packed once more where AMX multiplies them: 11 tiles, 4096 positions, 3 heads of 64 in two bytes.
    packed = 0 if torch.cpu._is_amx_tile_supported() else 11 * 4096 * 2 * 3 * 64 * 2
    assert used > 0.7 * (tiles - packed), "the bound is not so far off that it says nothing"


def test_without_tiles_every_token_is_a_row() -> None:
    # 512 rows over 128 pages of 32 positions, 9 heads of 64; then 512 tokens of a hidden size and a vocabulary of 1.
    rows = 512 * 128 * 9 * (64 + 32 + 2) * 4
    assert activations(torch.float32, has_tiles=False) == rows + 512 * (16 * 4 + 4)
    assert activations(torch.bfloat16, has_tiles=False) == rows + 512 * (16 * 2 + 4)


def test_the_page_that_padding_points_at_is_counted() -> None:
    block = 32 * 2 * 2 * 3 * 64 * 2
    plan = plan_memory(
        FACTS, replace(LIMITS, kv_cache_bytes=10 * block + 1), torch.bfloat16, is_tied=False, has_tiles=True
    )
    assert (plan.num_blocks, plan.block_bytes, plan.kv_pages) == (10, block, 11 * block)


def test_a_soft_cap_on_scores_is_planned_without_tiles(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("gemma2", tmp_path / "gemma2")
    plan = resolve(BuildRequest(str(checkpoint), tmp_path / "bundle", dtype="bfloat16"))
    expected = plan_memory(plan.facts, plan.limits, torch.bfloat16, is_tied=True, has_tiles=False)
    assert plan.memory == expected
    uncapped = tiny_checkpoint("gemma2", tmp_path / "uncapped", attn_logit_softcapping=0.0)
    other = resolve(BuildRequest(str(uncapped), tmp_path / "bundle", dtype="bfloat16"))
    assert other.memory != expected


@pytest.mark.parametrize(
    "sizes", [{}, {"max_batch_size": 2, "max_step_tokens": 40_000}], ids=["small", "wide"]
)
def test_a_build_says_what_a_gpu_executor_sets_aside_for_sampling(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    built = limits(**sizes)
    facts = replace(FACTS, vocab_size=VOCAB_SIZE)
    plan = plan_gpu_memory(facts, built, torch.float16, 1000, torch.float16)
    executor = open_fake(tmp_path, built).executor
    assert plan.sampling == executor.memory.sampling.device_bytes > 0
    executor.close()
    assert plan.total == 1000 + plan.kv_pages + plan.activations + plan.sampling


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "quantization",
    [
        Quantization("int4"),
        Quantization("int4", 32, symmetric=True),
        Quantization("int4", 64),
        Quantization("int4", -1),
        Quantization("fp8"),
        None,
    ],
    ids=str,
)
def test_quantised_weights_are_planned_as_they_are_stored(
    quantization: Quantization | None, is_tied: bool
) -> None:
    """Sizes that no group and no block of 32 features divides."""
    sizes = {"hidden_size": 72, "intermediate_size": 200, "tie_word_embeddings": is_tied}
    model = tiny_model("qwen2", **sizes).to(torch.bfloat16)
    planned = WeightPlan(quantization, None).num_bytes(empty_model(model.config), 2, torch.bfloat16)
    if quantization is not None:
        assert quantize_linears(model, "model.layers", quantization) == 14
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    assert planned == pytest.approx(sum(held.values()), rel=0.01)


@pytest.mark.parametrize(
    "quantization", [Quantization("int4", 32), Quantization("int4", -1, symmetric=True), Quantization("fp8")],
    ids=str,
)  # fmt: skip
def test_quantised_experts_are_planned_as_they_are_stored(quantization: Quantization) -> None:
    model = tiny_model("mixtral", hidden_size=64, intermediate_size=96).to(torch.bfloat16)
    planned = WeightPlan(quantization, None).num_bytes(empty_model(model.config), 2, torch.bfloat16)
    quantize_linears(model, "model.layers", quantization)
    assert quantize_experts(model, "model.layers", quantization) == 2
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    assert planned == pytest.approx(sum(held.values()), rel=0.01)
