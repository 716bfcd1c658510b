"""The Triton kernels of paged attention, interpreted on the CPU, against the operator's reference in float64.

Bound: in each row of the output (a token's head) no element is off by more than `BOUNDS` times the row's largest. The
kernels round softmax weights and output to the queries' type, whose epsilon is 2^-10 (float16) or 2^-7 (bfloat16).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton.errors import BuildError
from pelton.plugins_trt.paged_attention_tactics import (
    TACTICS,
    Problem,
    Tactic,
    Tile,
    default_tactic,
    supports,
    unsupported_reason,
    workspace_elements,
)
from support import attention_cases
from support.attention_cases import SMALL_TACTICS, Case, random_case
from support.interpreted import interpreter

BOUNDS = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
NUM_RANDOM_CASES = 220

LLAMA = Problem(32, 8, 128, 16, torch.float16, torch.float16, 80)


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    with interpreter() as call:
        yield call


def check(call: Callable[..., Any], case: Case) -> None:
    outcome = call(attention_cases.run_case, case)
    assert outcome.error <= BOUNDS[case.query_dtype], (outcome, case)
    assert outcome.padding_is_zero, case
    assert outcome.owned_pages_are_equal, case
    assert outcome.other_pages_are_untouched, case
    assert outcome.forbidden_reads == 0, case


@pytest.mark.parametrize("seed", range(NUM_RANDOM_CASES))
def test_random_steps(call: Callable[..., Any], seed: int) -> None:
    check(call, random_case(seed))


TILE_OF_16 = Tile(16, 16, 4, 1)
NAMED_CASES = {
    "one token": Case((0,), (1,)),
    "chunk that starts and ends on a block": Case((32,), (32,)),
    "chunk that starts on a block": Case((32,), (21,)),
    "chunk that ends on a block": Case((29,), (19,)),
    "chunk inside a block": Case((18,), (9,)),
    "chunk of one token past a block": Case((16,), (17,)),
    "decode at the first slot of a block": Case((32, 64), (1, 1)),
    "decode at the last slot of a block": Case((31, 63), (1, 1)),
    "verify across a block": Case((29, 46), (4, 4)),
    "sequences without rows around": Case((5, 9, 0, 30, 8), (0, 3, 0, 20, 0)),
    "only sequences without rows": Case((5, 0), (0, 0), num_padding_rows=3),
    "padding of a captured graph": Case((40, 3), (1, 1), num_padding_rows=6, num_padding_sequences=6),
    "decodes that the caller knows to be some": Case(
        (40, 3), (1, 2), num_padding_rows=2, tells_max_rows=True
    ),
    "tile borders inside blocks": Case((50,), (30,), block_size=64),
    "blocks inside tiles": Case((70,), (9,), tactic=Tactic(Tile(32, 64, 4, 1), Tile(16, 64, 4, 1), 2)),
    "window inside a block": Case((60, 3), (1, 25), window=5),
    "window of one": Case((33,), (20,), window=1),
    "window as long as a tile": Case((64,), (18,), window=16),
    "window longer than the context": Case((20,), (5,), window=1000),
    "window over splits": Case((90,), (2,), window=70, tactic=Tactic(TILE_OF_16, TILE_OF_16, 4)),
    "sinks over splits": Case((90, 5), (2, 1), sinks=True, tactic=Tactic(TILE_OF_16, TILE_OF_16, 4)),
    "sinks in a prefill": Case((9,), (30,), sinks=True),
    "slopes over splits": Case((90,), (2,), alibi=True, tactic=Tactic(TILE_OF_16, TILE_OF_16, 4)),
    "slopes in a prefill": Case((9,), (30,), alibi=True, soft_cap=5.0),
    "multi-head": Case((40, 3), (1, 12), num_heads=3, num_kv_heads=3),
    "multi-query of 20 heads": Case(
        (40, 3),
        (1, 6),
        num_heads=20,
        num_kv_heads=1,
        tactic=Tactic(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), 2),
    ),
    "float16 cache of bfloat16 queries": Case((40, 3), (1, 12), query_dtype=torch.bfloat16),
    "a tactic by the shapes": Case((40, 3), (1, 12), tactic=None),
}


@pytest.mark.parametrize("name", NAMED_CASES)
def test_named_steps(call: Callable[..., Any], name: str) -> None:
    check(call, NAMED_CASES[name])


@pytest.mark.parametrize("index", range(len(TACTICS)))
def test_every_tactic(call: Callable[..., Any], index: int) -> None:
    """A prefill and a decode of each; heads of 64 and a context of more than two tiles, so that splits are used."""
    tactic = TACTICS[index]
    past = 150 if tactic.splits > 1 else 20
    new = tactic.decode.block_m // 16 + 1
    check(call, Case((past, 3), (1, new), num_heads=16, num_kv_heads=1, block_size=64, tactic=tactic))


def test_each_sequence_is_computed_by_one_kernel(call: Callable[..., Any]) -> None:
    """Of sequences with 1, 9, 0, 4 and 5 rows and decode tiles of 4, each kernel fills its own and no other row."""
    filled = call(attention_cases.rows_filled_by_each_kernel, (1, 9, 0, 4, 5))
    assert filled["decode"] == [True] + [False] * 9 + [True] * 4 + [False] * 5
    assert filled["prefill"] == [not row for row in filled["decode"]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("scale", [1.0, 0.031])
def test_every_float16_is_quantised_as_by_the_reference(
    call: Callable[..., Any], dtype: torch.dtype, scale: float
) -> None:
    assert call(attention_cases.wrongly_quantised, dtype, scale) == []


@pytest.mark.parametrize("query_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_every_byte_is_read_as_by_the_reference(
    call: Callable[..., Any], dtype: torch.dtype, query_dtype: torch.dtype
) -> None:
    assert call(attention_cases.wrongly_read, dtype, query_dtype) == []


def test_pages_past_two_to_the_31st_element(call: Callable[..., Any]) -> None:
    assert call(attention_cases.huge_cache_equals_small_one)


@pytest.mark.parametrize("change", [{"query_dtype": torch.float32}, {"cache_dtype": torch.float8_e5m2},
                                    {"block_size": 8}, {"num_heads": 30}, {"head_dim": 72}, {"head_dim": 512},
                                    {"num_heads": 136, "num_kv_heads": 1}])  # fmt: skip
def test_what_is_not_supported_has_a_reason(change: dict[str, Any]) -> None:
    assert unsupported_reason(LLAMA) is None
    assert unsupported_reason(replace(LLAMA, **change))


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(BuildError, match=r"compute capability 7\.0"):
        supports(TACTICS[0], replace(LLAMA, arch=70))


def test_a_layout_that_the_kernels_do_not_read_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        call(attention_cases.run_with_transposed_heads)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_the_default_tactic(head_dim: int, arch: int) -> None:
    for cache_dtype in (torch.float16, torch.float8_e4m3fn):
        problem = replace(LLAMA, head_dim=head_dim, arch=arch, cache_dtype=cache_dtype)
        one, many = default_tactic(problem, 1, 1), default_tactic(problem, 256, 256)
        assert supports(one, problem)
        assert supports(many, problem)
        assert one.splits > many.splits == 1
        assert workspace_elements(many, problem, 256) == (0, 0)
        verify = default_tactic(problem, 4 * 5, 4)
        assert verify.decode_rows(problem) >= 5


def test_importing_the_operator_does_not_import_triton() -> None:
    code = (
        "import sys, pelton.plugins_trt.paged_attention, pelton.plugins_trt.paged_attention_tactics\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_small_tactics_split() -> None:
    """The random cases would prove little if none of them had several tiles or splits."""
    cases = [random_case(seed) for seed in range(NUM_RANDOM_CASES)]
    assert {case.tactic for case in cases} == set(SMALL_TACTICS)
    assert sum(max(c.past) > 32 and c.tactic is not None and c.tactic.splits > 1 for c in cases) > 30
