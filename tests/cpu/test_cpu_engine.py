"""What an engine reads and allocates before its libraries run, and the example step that they are compiled with."""

from __future__ import annotations

import errno
import json
import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pelton.compile.targets import cpu
from pelton.errors import BundleError, ConfigError
from pelton.plugins_trt import cpu_engine
from pelton.plugins_trt.cpu_engine import EngineProgram, LibraryUse, SegmentProgram
from pelton.plugins_trt.paged_attention_cpu import TILE

PROGRAM = EngineProgram(
    dtype="bfloat16",
    block_size=16,
    use_tiles=True,
    tile=TILE,
    windows=(0,),
    kv_heads=(2,),
    head_dims=(16,),
    segments=(
        SegmentProgram(
            library=LibraryUse("layer_0.so", {"weight_0": "w0"}),
            row_library=LibraryUse("layer_0_rows.so", {"weight_0": "w0"}),
            inputs=("input_ids",),
            outputs=("logits",),
            windows=(0,),
        ),
    ),
)


def write(program: EngineProgram, directory: Path) -> Path:
    (directory / "engine.json").write_text(json.dumps(program.to_json()))
    return directory


def test_a_program_reads_back_equal(tmp_path: Path) -> None:
    assert EngineProgram.read(write(PROGRAM, tmp_path)) == PROGRAM


def test_tiles_of_another_size_are_refused(tmp_path: Path) -> None:
    other = replace(PROGRAM, tile=TILE // 2)
    with pytest.raises(
        BundleError, match=r"engine\.json: built for tiles of 64 tokens.*build the bundle again"
    ):
        EngineProgram.read(write(other, tmp_path))
    without = replace(other, use_tiles=False)
    assert EngineProgram.read(write(without, tmp_path)) == without


def test_memory_that_cannot_be_had_names_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^kv_cache_memory: .* \d+ MiB cannot be allocated \(.*\); lower it"
    ):
        cpu_engine._zeros((1 << 58,), torch.bfloat16)
    header = json.dumps({"w0": {"dtype": "F32", "shape": [1 << 57], "data_offsets": [0, 1 << 59]}}).encode()
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match=r"weights\.safetensors: weights: \d+ MiB cannot be allocated"):
        cpu_engine._load_weights(weights)


class PlainMemory(mmap.mmap):
    """Of a kernel without huge pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_kernel_without_huge_pages_gives_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", PlainMemory)
        assert torch.equal(cpu_engine._zeros((3, 5), torch.float32), torch.zeros(3, 5))
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert torch.equal(cpu_engine._zeros((3, 5), torch.float32), torch.zeros(3, 5))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_no_two_sizes_of_the_example_step_are_equal(block_size: int) -> None:
    sizes = [cpu._TOKENS, cpu._ITEMS, cpu._ROWS, cpu._ITEMS_PER_ROW, cpu._BLOCKS, TILE, block_size]
    sizes += [
        size for tiles, pages in cpu._TILE_GROUPS for size in (tiles, tiles * TILE, pages, pages * block_size)
    ]
    assert len(set(sizes)) == len(sizes)
    assert min(sizes) > 1


def test_a_step_reads_the_weights_of_the_library_for_rows() -> None:
    """Both forms are in memory; a decode step runs the one for rows."""
    engine = object.__new__(cpu_engine.CpuEngine)
    (segment,) = PROGRAM.segments
    rows = LibraryUse("layer_0_rows.so", {"weight_0": "w1"})
    engine.program = replace(PROGRAM, segments=(replace(segment, inputs=("hidden",), row_library=rows),))
    engine._weights = {"w0": torch.zeros(3), "w1": torch.zeros(5)}
    assert engine.num_step_weight_bytes == 5 * 4
