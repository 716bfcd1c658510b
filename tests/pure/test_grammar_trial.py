"""The process that compiles on trial: what is its own fault is not the grammar's."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from pelton.errors import EngineError, OverloadedError
from pelton.runtime.grammar import trial_process
from pelton.runtime.grammar.trial import Trial, TrialError

SOUND = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})
ENDLESS = json.dumps({"grammars": [{"json_schema": {"allOf": [{"pattern": f"a{i}.*b"} for i in range(40)]}}]})


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_so_01_descriptors_above_1023_serve() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    trial = Trial()
    try:
        trial.check(SOUND, soon())
    finally:
        trial.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_so_01_a_process_that_cannot_start_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    broken = os.path.join(str(tmp_path), "broken.py")
    with open(broken, "w") as file:
        file.write("raise ImportError('no llguidance here')")
    trial = Trial()
    with monkeypatch.context() as patch:
        patch.setattr(trial_process, "__file__", broken)
        with pytest.raises(EngineError, match=r"exit status 1.*no llguidance here"):
            trial.check(SOUND, soon())
    trial.check(SOUND, soon())
    trial.close()


def test_so_03_what_takes_too_long_is_late_and_its_answer_goes_to_nobody() -> None:
    trial = Trial()
    trial.check(SOUND, soon())
    with pytest.raises(TrialError) as error:
        trial.check(ENDLESS, soon(0.5))
    assert error.value.is_late
    with pytest.raises(OverloadedError):
        trial.check(SOUND, soon(0))  # it is starting again
    trial.check(SOUND, soon())
    trial.close()


def test_so_03_the_process_ends_with_its_input() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", trial_process.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        process.stdin.write(json.dumps(ENDLESS).encode() + b"\n")
        process.stdin.flush()
        time.sleep(0.5)
        process.stdin.close()
        try:
            assert process.wait(10) == 0
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
