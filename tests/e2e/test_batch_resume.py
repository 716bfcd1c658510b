"""`pelton batch` as users run it: the command, a real model, and kill -9."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_LINES = 500
PELTON = Path(sys.executable).with_name("pelton")


def write_job(path: Path, model: str) -> None:
    """Chats and completions, greedy and sampled, with and without a seed; short, as 500 of them run twice."""
    rows = []
    for i in range(NUM_LINES):
        options = {
            "model": model,
            "max_tokens": 1 + (i % 4 == 0) + (i % 16 == 0),
            "temperature": 0.0 if i % 3 else 1.0,
        }
        if i % 10 == 0:
            options |= {"seed": i, "temperature": 1.0}
        if i % 125 == 0:
            url, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": f"Is {i} odd?"}]}
        else:
            url, prompt = "/v1/completions", {"prompt": f"No {i}"}
        rows.append({"custom_id": f"line {i}", "method": "POST", "url": url, "body": {**options, **prompt}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(bundle: Path, source: Path, output: Path) -> subprocess.Popen[str]:
    command = [str(PELTON), "batch", str(bundle), str(source), str(output)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(bundle: Path, source: Path, output: Path) -> tuple[int, str, str]:
    process = start(bundle, source, output)
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def signal_at(process: subprocess.Popen[str], number: signal.Signals, output: Path, num_records: int) -> None:
    """Send `number` once the output holds `num_records`."""
    while not output.exists() or output.read_bytes().count(b"\n") < num_records:
        try:
            process.wait(timeout=0.02)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"ended with status {process.returncode}: {process.communicate()}")
    process.send_signal(number)
    process.communicate()


def read_records(path: Path) -> list[dict[str, Any]]:
    return sorted(
        (json.loads(line) for line in path.read_bytes().splitlines()), key=lambda each: str(each["id"])
    )


def test_bj_02_killed_three_times_equals_an_uninterrupted_run(
    smollm2_float32_bundle: Path, tmp_path: Path
) -> None:
    source, output, reference = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "reference.jsonl"))
    write_job(source, smollm2_float32_bundle.resolve().name)
    assert finish(smollm2_float32_bundle, source, reference)[0] == 0
    expected = read_records(reference)
    assert len({record["custom_id"] for record in expected}) == NUM_LINES

    pick = random.Random(20)
    num_before = 0
    for low, high in ((20, 100), (150, 220), (280, 350)):
        process = start(smollm2_float32_bundle, source, output)
        signal_at(process, signal.SIGKILL, output, pick.randrange(low, high))
        assert process.returncode == -signal.SIGKILL
        data = output.read_bytes()
        assert num_before < data.count(b"\n") < NUM_LINES
        num_before = data.count(b"\n") - 1
        output.write_bytes(data[: data.rindex(b"\n") - pick.randrange(1, 50)])  # as if killed in a write

    process = start(smollm2_float32_bundle, source, output)
    signal_at(process, signal.SIGINT, output, 400)
    assert process.returncode == 130

    status, stdout, stderr = finish(smollm2_float32_bundle, source, output)
    assert status == 0
    assert f"{NUM_LINES} answers, 0 errors" in stdout
    assert "lines are done already" in stderr
    assert read_records(output) == expected


def test_bj_01_bj_04_bad_ids_are_status_2_bad_lines_status_1(
    smollm2_float32_bundle: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    row = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "A", "max_tokens": 2},
    }
    source.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    status, _, stderr = finish(smollm2_float32_bundle, source, output)
    assert status == 2
    assert "duplicate on line 2 (as on line 1)" in stderr
    assert not output.exists()

    too_long = row | {"custom_id": "b", "body": {"prompt": "word " * 100_000, "max_tokens": 2}}
    source.write_text(f"{json.dumps(row)}\nnot json\n\n{json.dumps(too_long)}\n")
    status, stdout, _ = finish(smollm2_float32_bundle, source, output)
    assert status == 1
    assert "1 answers, 2 errors, 1 blank lines skipped" in stdout
    found = {(record["custom_id"], record["response"]["status_code"]) for record in read_records(output)}
    assert found == {("a", 200), (None, 400), ("b", 400)}
