"""KV pages of one byte: the option, scales measured on text, and what the pages cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from pelton.compile import kv_cache
from pelton.compile.bundle import Limits, ModelFacts
from pelton.compile.checkpoint import load_tokenizer, open_checkpoint
from pelton.compile.export import export, kv_geometry
from pelton.compile.kv_cache import CacheScales, calibrate, evaluation_ids, measure, quantised_dtype
from pelton.compile.memory import plan_gpu_memory
from pelton.compile.proof import Trace, compare, exported_step, record
from pelton.compile.segments import PAGED_ATTENTION, attention_of, with_scales
from pelton.errors import BuildError
from support.checkpoints import tiny_checkpoint, tiny_model

BLOCK_SIZE = 16
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@pytest.mark.parametrize(
    ("asked", "target", "expected"),
    [
        ("auto", "cpu", None),
        ("auto", "tensorrt", None),
        ("fp8", "cuda", FP8),
        ("int8", "tensorrt-rtx", INT8),
    ],
)
def test_dtypes_by_name(asked: str, target: str, expected: torch.dtype | None) -> None:
    assert quantised_dtype(asked, target) is expected


@pytest.mark.parametrize(
    ("asked", "target", "message"),
    [
        ("fp4", "tensorrt", "kv_cache_dtype: 'fp4' is unknown; choose one of auto, fp8, int8"),
        ("fp8", "cpu", "kv_cache_dtype: fp8 is not supported on cpu.*--target tensorrt-rtx"),
    ],
)
def test_a_dtype_that_cannot_be_had_names_the_option(asked: str, target: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        quantised_dtype(asked, target)


@pytest.fixture(scope="module")
def model() -> Any:
    """Values grow from layer to layer."""
    model = tiny_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.v_proj.weight.mul_(4.0**i)
    return model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(open_checkpoint(str(tiny_checkpoint("llama", tmp_path_factory.mktemp("llama")))))


@pytest.fixture(scope="module")
def trace(model: Any, tokenizer: Any) -> Trace:
    return record(model, windows=[0], block_size=BLOCK_SIZE, text=evaluation_ids(tokenizer, model.config))


def calibrated(model: Any, tokenizer: Any, dtype: torch.dtype) -> tuple[ExportedProgram, CacheScales]:
    program = export(model, block_size=BLOCK_SIZE, cache_dtype=dtype)
    scales = calibrate(
        program, kv_geometry(model.config), tokenizer, model.config, cache_dtype=dtype, block_size=BLOCK_SIZE
    )
    return program, scales


@pytest.mark.parametrize(("dtype", "largest", "most"), [(FP8, 448, 0.04), (INT8, 127, 0.03)])
def test_a_calibrated_graph_is_the_model_but_for_its_pages(
    model: Any, tokenizer: Any, trace: Trace, dtype: torch.dtype, largest: int, most: float
) -> None:
    program, scales = calibrated(model, tokenizer, dtype)
    nodes = list(program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION))
    assert [(attention_of(n).k_scale, attention_of(n).v_scale) for n in nodes] == list(
        zip(scales.k_scales, scales.v_scales, strict=True)
    )
    assert [int(str(node.args[4]).rpartition("_")[2]) for node in nodes] == [0, 1, 2]
    assert 1 < scales.v_scales[1] / scales.v_scales[0] < 16
    assert 1 < scales.v_scales[2] / scales.v_scales[1] < 16
    for scale, seen in zip(
        (*scales.k_scales, *scales.v_scales), (*scales.largest_keys, *scales.largest_values), strict=True
    ):
        assert 0.4 * largest < seen / scale < largest

    geometry = kv_geometry(model.config)
    exact = compare(trace, exported_step(program, geometry, trace, torch.float32), "graph")
    assert exact.relative_error < 1e-5
    result = measure(trace, program, geometry, dtype)
    assert 1e-3 < result.relative_error < most
    assert result.tolerance == 0.2
    assert 0 < result.kl_divergence < 1e-2

    for node, k_scale, v_scale in zip(nodes, scales.k_scales, scales.v_scales, strict=True):
        with_scales(node, k_scale / 8, v_scale / 8)  # nearly all saturates
    program.graph_module.recompile()
    with pytest.raises(BuildError, match=r"the (fp8|int8) KV cache does not.*--kv-cache-dtype auto"):
        measure(trace, program, geometry, dtype)


def test_what_is_not_finite_has_no_scale() -> None:
    for largest in (float("inf"), float("nan")):
        with pytest.raises(BuildError, match="kv_cache_dtype: keys of layer 3 are not finite"):
            kv_cache._scale(3, "keys", largest, FP8)


def test_values_that_are_all_zero_have_a_scale() -> None:
    assert kv_cache._scale(0, "values", 0.0, INT8) == 1.0


def test_pages_of_one_byte_hold_twice_the_tokens() -> None:
    facts = ModelFacts(
        source="some/model", model_type="llama", num_parameters=1000, num_layers=2, num_attention_heads=8,
        num_kv_heads=4, head_dim=64, hidden_size=512, vocab_size=1000, max_position_embeddings=4096,
    )  # fmt: skip
    limits = Limits(
        max_model_len=4096, max_batch_size=8, max_step_tokens=512, block_size=32, kv_cache_bytes=1 << 20
    )
    plain = plan_gpu_memory(facts, limits, torch.bfloat16, 1 << 20, torch.bfloat16)
    quantised = plan_gpu_memory(facts, limits, torch.bfloat16, 1 << 20, FP8)
    assert (plain.block_bytes, plain.num_blocks) == (2 * 2 * 2 * 32 * 4 * 64, 16)
    assert quantised == replace(plain, block_bytes=plain.block_bytes // 2, num_blocks=32)


def test_text_of_the_proof_is_not_that_of_the_calibration(tokenizer: Any, trace: Trace) -> None:
    text = tokenizer.decode([token for ids in trace.token_ids for token in ids])
    assert "Bread is one of the oldest" in text
    assert "The harbour" not in text
