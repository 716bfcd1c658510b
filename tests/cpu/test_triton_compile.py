"""Ahead-of-time compilation of Triton kernels, with no GPU, for all architectures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from pelton.errors import BuildError
from pelton.plugins_trt.architectures import ARCHITECTURES, shared_memory_limit
from pelton.plugins_trt.paged_attention_tactics import Tactic, Tile, shared_memory
from pelton.plugins_trt.paged_attention_triton import Problem, default_tactic, kernel_variants
from pelton.plugins_trt.triton_compile import KernelVariant, compile_kernel
from pelton.scripts.kernel_report import Needs, command, page

LLAMA = Problem(32, 8, 128, 32, torch.float16, torch.float16, 90)


def variant(name: str, problem: Problem, tactic: Tactic | None = None) -> KernelVariant:
    return kernel_variants(problem, tactic or default_tactic(problem, 8, 8))[name]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_compiles_without_spills(arch: int) -> None:
    """A decode of float8 pages, which each architecture reads in its own way, and a prefill with all features."""
    wide = replace(LLAMA, arch=arch, cache_dtype=torch.float8_e4m3fn)
    narrow = replace(LLAMA, arch=arch, head_dim=64, has_window=True, has_sinks=True)
    for name, problem in (("decode", wide), ("prefill", narrow)):
        kernel = variant(name, problem).compile(arch)
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.name == f"{name}_kernel"
        assert not kernel.spills, kernel
        assert 0 < kernel.registers <= 255
        tile = getattr(default_tactic(problem, 8, 8), name)
        results = torch.float32 if name == "decode" else torch.float16
        assert kernel.shared_bytes <= shared_memory(tile, problem, results) <= shared_memory_limit(arch)


def test_a_kernel_says_what_it_takes() -> None:
    problem = replace(LLAMA, has_sinks=True)
    kernel = variant("reduce", problem).compile(80)
    assert kernel.parameters == (
        ("out_ptr", "*fp16"),
        ("partial_ptr", "*fp32"),
        ("stats_ptr", "*fp32"),
        ("seq_lens_ptr", "*i32"),
        ("query_start_loc_ptr", "*i32"),
        ("sinks_ptr", "*fp32"),
        ("v_scale", "fp32"),
        ("window", "i32"),
    )
    assert kernel.arch == 80
    assert kernel.num_warps == 4


def test_spills_are_seen() -> None:
    """A tile that is far too large for its warps."""
    tile = Tile(64, 64, 1, 1)
    kernel = variant("decode", replace(LLAMA, arch=80), Tactic(tile, tile, 1)).compile(80)
    assert kernel.spill_store_bytes > 1000
    assert kernel.spill_load_bytes > 1000
    assert kernel.spills


def test_wrong_parameters_are_named() -> None:
    reduce = variant("reduce", LLAMA)
    signature = {name: type for name, type in reduce.signature.items() if name != "stats_ptr"} | {
        "other": "i32"
    }
    with pytest.raises(BuildError, match="reduce_kernel: missing or unknown parameters: other, stats_ptr"):
        compile_kernel(reduce.kernel, signature, reduce.constants, arch=80, num_warps=4, num_stages=1)


def test_what_does_not_compile_is_named() -> None:
    reduce = variant("reduce", LLAMA)
    with pytest.raises(BuildError, match="reduce_kernel does not compile for sm_80"):
        replace(reduce, constants=dict(reduce.constants) | {"PADDED_DIM": 100}).compile(80)


def test_an_interpreted_kernel_is_refused() -> None:
    with pytest.raises(BuildError, match="TRITON_INTERPRET"):
        compile_kernel(print, {}, {}, arch=80, num_warps=4, num_stages=1)


def test_the_report_tabulates_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [replace(variant("reduce", LLAMA), name="joining", is_quick=True), variant("write_kv", LLAMA)]
    monkeypatch.setattr("pelton.scripts.kernel_report.OPERATORS", ("paged_attention",))
    monkeypatch.setattr("pelton.plugins_trt.paged_attention_triton.report_variants", lambda: variants)
    result = CliRunner().invoke(command, ["--quick", "--arch", "80", "--arch", "90"])
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert table[0] == "| kernel | warps | 8.0 | 9.0 |"
    assert [line.split(" | ")[0] for line in table[2:]] == ["| joining"]
    assert "**2 kernels compiled; 0 spill.**" in result.stdout


def test_the_page_has_a_line_per_kernel() -> None:
    needs = Needs("int4_linear", "64x64x32", 80, True, 8, 120, 49152, 0)
    rows = [
        needs,
        replace(needs, arch=90, num_warps=4, registers=255, spilled_bytes=24),
        replace(needs, kernel="permute", arch=90, shared_bytes=0),
        replace(needs, operator="split_k", kernel="add_parts", shared_bytes=512),
    ]
    text = page(rows)
    assert "| 64x64x32 | 4/8 | 120, 48 | 255, 48 **24** |\n" in text
    assert "| permute | 8 |  | 120, 0 |\n" in text
    assert "\n## split_k\n" in text
    assert "**4 kernels compiled; 1 spill: int4_linear 64x64x32 on 9.0.**" in text


def test_the_report_fails_on_hot_spills_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(64, 64, 1, 1)
    hot = variant("decode", replace(LLAMA, arch=80), Tactic(tile, tile, 1))
    for is_hot, status in ((True, 1), (False, 0)):
        variants = [replace(hot, is_hot=is_hot)]
        monkeypatch.setattr("pelton.scripts.kernel_report.OPERATORS", ("paged_attention",))
        monkeypatch.setattr("pelton.plugins_trt.paged_attention_triton.report_variants", lambda v=variants: v)
        result = CliRunner().invoke(command, ["--arch", "80"])
        assert result.exit_code == status
        assert ("spills registers: paged_attention decode_kernel on sm_80" in result.stderr) == is_hot
