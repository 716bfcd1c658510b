"""What a person reads while the checks run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .records import Accuracy, Agreement, Fact, Failure, Record, Skip, Speed, Timing


def describe_record(record: Record) -> str | None:
    """A line, or None for what `describe_outcome` sums up."""
    mark = "ok  " if record.passed else "FAIL"
    match record:
        case Fact():
            value = f"{record.value:.4g}" if isinstance(record.value, float) else record.value
            return f"       {record.name}: {value}"
        case Accuracy():
            state = "" if record.is_state_equal is not False else ", and the pages differ"
            return f"  {mark} {record.name}: error {record.error:.1e} of {record.bound:.1e}{state}"
        case Timing():
            if record.passed:
                return None
            return f"  {mark} {record.name}: error {record.error:.1e} of {record.bound:.1e}"
        case Agreement():
            gaps = f", gaps up to {max(record.gaps):.3g} of {record.bound:.3g}" if record.gaps else ""
            return (
                f"  {mark} tokens, {record.name}: {record.num_equal_prompts} of {record.num_prompts} prompts equal, "
                f"{record.num_agreed_tokens} of {record.num_tokens} tokens before the first divergence{gaps}"
            )
        case Speed():
            return (
                f"       {record.name}: TTFT {record.ttft_ms:.1f} ms, TPOT {record.tpot_ms:.2f} ms, "
                f"{record.output_tokens_per_s:.0f} output tokens/s"
            )
        case Failure():
            return f"  {mark} {record.name}: {record.error}"
        case Skip():
            return f"  skip {record.name}: {record.reason}"


def describe_outcome(outcome: dict[str, Any], rooflines: Sequence[dict[str, Any]]) -> str:
    """A section's end: its cases against the roofline, and its status."""
    timed = {record["case"] for record in outcome["records"] if record["kind"] == "timing"}
    lines = [line for entry in rooflines if entry["case"] in timed for line in _describe_case(entry)]
    why = f": {outcome['reason']}" if outcome["reason"] else ""
    lines.append(f"{outcome['name']}: {outcome['status']} in {outcome['seconds']:.0f} s{why}")
    return "\n".join(lines)


def _describe_case(entry: dict[str, Any]) -> Iterator[str]:
    yield f"       {entry['case']}"
    reached = [("best", entry["best"]), ("default", entry["default"]), *entry["others"].items()]
    for name, result in reached:
        if result is not None:
            fraction = "" if result["fraction"] is None else f", {result['fraction']:.0%} of the roofline"
            tactic = f" [{result['tactic']}]" if result["tactic"] else ""
            rates = f"{result['gb_per_s']:.0f} GB/s, {result['tflop_per_s']:.1f} TFLOP/s"
            yield f"         {name}: {result['us']:.1f} us, {rates}{fraction}{tactic}"
