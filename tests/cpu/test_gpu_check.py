"""What `gpu_check` checks, without a GPU: kernels under the interpreter, a model on the CPU target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pelton.errors import PeltonError
from pelton.runtime.outputs import CompletionOutput, RequestOutput, TokenLogprob
from pelton.scripts.gpu_checks import attention, measure, models, products
from pelton.scripts.gpu_checks.records import Fact
from pelton.scripts.gpu_checks.units import Unavailable, Unit
from support import gpu_check_cases, kernel_cases
from support.checkpoints import equalise_norms, tiny_checkpoint
from support.interpreted import interpreter

CPU = torch.device("cpu")
F16, BF16, FP8, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
STEP = attention.Case((3, 0, 20), (1, 5, 0), num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
EXPERTS = (
    products.ExpertsCase(4, 2, 4, 32, 48),
    products.ExpertsCase(4, 2, 4, 64, 96, form="int4", group_size=32),
    products.ExpertsCase(4, 2, 4, 32, 48, form="fp8"),
)
DECODE = replace(STEP, past=(40, 40), new=(1, 1))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter() as call:
        call(kernel_cases.correct_arithmetic)
        yield call


ALL_FEATURES = {"window": 4, "soft_cap": 2.0, "has_sinks": True, "has_alibi": True}


@pytest.mark.parametrize(
    "case",
    [
        STEP,
        replace(STEP, cache_dtype=INT8),
        replace(STEP, query_dtype=BF16, cache_dtype=FP8, **ALL_FEATURES),
        products.Int4Case(3, 20, 64, 32),
        products.Int4Case(20, 20, 64, 32, has_bias=True, has_perm=True, dtype=F16),
        products.Fp8Case(3, 32, 64),
        products.Fp8Case(3, 32, 64, is_static=True, per_channel=False, has_bias=True),
        *EXPERTS,
    ],
    ids=lambda case: case.name,
)
def test_kernels_equal_the_references(interpreted: Callable[..., Any], case: Any) -> None:
    is_step = isinstance(case, attention.Case)
    check = gpu_check_cases.check_attention if is_step else gpu_check_cases.check_products
    (record,) = interpreted(check, [case])
    assert record["kind"] == "accuracy"
    assert record["passed"], record
    if getattr(case, "form", None) != "fp8":  # whose reference rounds as the kernels do
        assert record["error"] > 0  # rounded differently: two computations
    assert record["is_state_equal"] is (True if is_step else None)


@pytest.mark.parametrize(
    "case",
    [
        DECODE,
        replace(DECODE, cache_dtype=INT8),
        replace(DECODE, window=8),
        replace(STEP, past=(0,), new=(40,)),
        replace(STEP, past=(7,), new=(40,)),
    ],
    ids=lambda case: case.name,
)
def test_attention_is_timed_beside_torch(interpreted: Callable[..., Any], case: attention.Case) -> None:
    sdpa, default, other = interpreted(gpu_check_cases.time_attention, case, 3)
    assert sdpa["implementation"].startswith("sdpa")
    assert [record["is_default"] for record in (sdpa, default, other)] == [False, True, False]
    assert default["tactic"] != other["tactic"]
    for record in (sdpa, default, other):
        assert record["passed"], record
        assert record["seconds"] > 0
        assert (record["num_bytes"], record["flops"]) == (case.work().num_bytes, case.work().flops)


@pytest.mark.parametrize(
    "case",
    [products.Int4Case(3, 20, 64, 32), products.Fp8Case(3, 32, 64), *EXPERTS],
    ids=lambda case: case.name,
)
def test_products_are_timed_beside_cublas(interpreted: Callable[..., Any], case: products.Case) -> None:
    default, *others = interpreted(gpu_check_cases.time_products, case)
    assert default["is_default"]
    assert default["passed"], default
    assert default["error"] > 0
    assert [record["implementation"].split()[0] for record in others] == ["cublas"] * len(others)
    assert others


def test_real_cases_are_ones_that_the_kernels_take() -> None:
    """On an H200: names are unique, every default tactic exists, torch computes what is timed."""
    for module in (attention, products):
        for cases in (module.CHECKS, module.SPEEDS):
            assert len({case.name for case in cases}) == len(cases)
    for case in (*attention.CHECKS, *attention.SPEEDS):
        problem = replace(attention.problem_of(case, CPU), arch=90)
        tactics = attention.tactics(problem, case)
        assert len({attention.tactic_name(case, tactic) for tactic in tactics}) == len(tactics) > 1
    for case in (*products.CHECKS, *products.SPEEDS):
        tactics = case.tactics()
        assert len({products.tactic_name(tactic) for tactic in tactics}) == len(tactics) > 1
        if isinstance(case, products.ExpertsCase):
            assert case.num_tokens * case.top_k % case.num_busy_experts == 0
    assert all(len({*zip(case.past, case.new, strict=True)}) == 1 for case in attention.SPEEDS)


def test_ceilings() -> None:
    timer = measure.HostTimer(1)
    facts: dict[str, float] = {}
    for records in (
        measure.bandwidth_ceiling(CPU, timer, 1 << 16),
        measure.product_ceiling(CPU, timer, BF16, 64),
    ):
        for record in records:
            assert isinstance(record, Fact)
            facts[record.name] = record.value
    ceilings = measure.ceilings_of(facts)
    assert ceilings is not None
    assert ceilings.bytes_per_s > 0
    assert list(ceilings.flops_per_s) == ["bfloat16"]
    assert measure.ceilings_of({}) is None


def test_the_error_of_a_row() -> None:
    expected = torch.tensor([[4.0, -8.0], [0.0, 0.0]])
    assert measure.row_error(expected, expected) == 0
    assert measure.row_error(expected + torch.tensor([[1.0, 0.0], [0.0, 0.0]]), expected) == 0.125
    assert measure.row_error(expected + torch.tensor([[0.0, 0.0], [0.0, 1e-9]]), expected) > 1
    assert not measure.row_error(expected.where(expected != 4, float("nan")), expected) <= 1e9


WORK = models.Work(
    dtype=torch.float32,
    prompt_lengths=(5, 33, 70),
    num_new_tokens=8,
    switched_lengths=(40, 16, 33, 60, 7),
    chunk_tokens=16,
    shared_tokens=48,
    num_running=4,
    num_requests=6,
    request_tokens=16,
    output_tokens=4,
    ttft_tokens=32,
    repeats=1,
)


@pytest.fixture(scope="module")
def model_units(tiny_bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unit]:
    """Of the bundle that the fixture built from a checkpoint like this one."""
    directory = tmp_path_factory.mktemp("work")
    (directory / "cpu").symlink_to(tiny_bundles["llama"])
    checkpoint = tiny_checkpoint("llama", directory / "model", num_hidden_layers=3)
    equalise_norms(checkpoint)
    return {unit.name: unit for unit in models.units("cpu", CPU, directory, checkpoint, WORK)}


def test_tokens_are_those_of_transformers(model_units: dict[str, Unit]) -> None:
    (agreement,) = model_units["tokens of transformers"].run()
    assert agreement == models.Agreement("transformers in float32", 3, 3, 24, 24, (), 1e-3)


def test_tokens_do_not_depend_on_features(model_units: dict[str, Unit]) -> None:
    records = list(model_units["tokens with features on and off"].run())
    names = ["prefix caching", "chunked prefill", "batching", "all of them"]
    assert records == [models.Agreement(name, 6, 6, 48, 48, (), 1e-3) for name in names]


@pytest.mark.parametrize(("unit", "name"), [("speed", "cpu"), ("speed of transformers", "transformers")])
def test_speed(model_units: dict[str, Unit], unit: str, name: str) -> None:
    (speed,) = model_units[unit].run()
    assert isinstance(speed, models.Speed)
    assert speed.name == name
    assert min(speed.ttft_ms, speed.tpot_ms, speed.output_tokens_per_s) > 0


def test_a_failed_build_says_why_and_nothing_runs_on_it(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    work = replace(WORK, dtype=F16)  # which the target cpu does not have
    build, compare, *_ = models.units("cpu", CPU, tmp_path, checkpoint, work)
    with pytest.raises(PeltonError, match=r"(?s)status 2: .*pelton: dtype: float16 is not supported"):
        build.run()
    with pytest.raises(Unavailable, match="no bundle"):
        compare.run()


def output(token_ids: tuple[int, ...], *logprobs: TokenLogprob) -> RequestOutput:
    return RequestOutput("r", None, (1,), [CompletionOutput(0, token_ids=token_ids, logprobs=logprobs)])


def test_the_gap_of_a_divergence() -> None:
    first, second = (
        TokenLogprob(5, -0.5, ((5, -0.5), (6, -2.5))),
        TokenLogprob(8, -1.0, ((8, -1.0), (9, -1.25))),
    )
    expected = output((5, 8), first, second)
    for tokens, equal, agreed, gaps in (
        ((5, 8), 1, 2, ()),
        ((5, 9), 0, 1, (0.25,)),
        ((6, 8), 0, 0, (2.0,)),
        ((7, 8), 0, 0, (float("inf"),)),
        ((5,), 0, 1, (float("inf"),)),
    ):
        agreement = models.compare("x", [output(tokens)], [expected], 0.3)
        assert agreement == models.Agreement("x", 1, equal, 2, agreed, gaps, 0.3)
        assert agreement.passed == all(gap <= 0.3 for gap in gaps)
