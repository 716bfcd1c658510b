"""SIGINT held back while modules are imported that would swallow it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pelton.interrupts import held_interrupts, ignore_interrupts

# Takes Ctrl-C as transformers does: for a module that is missing.
SWALLOWING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except KeyboardInterrupt:
    raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from None
"""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    steps = []

    def run() -> None:
        with held_interrupts():
            interrupt()
            interrupt()
            steps.append("done")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_before_an_error_of_the_block() -> None:
    def run() -> None:
        with held_interrupts():
            interrupt()
            raise ModuleNotFoundError

    with pytest.raises(KeyboardInterrupt):
        run()


def test_nothing_comes_where_nothing_came() -> None:
    with held_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_has_no_signals_to_hold() -> None:
    entered = []

    def run() -> None:
        with held_interrupts():
            entered.append(signal.getsignal(signal.SIGINT))
        ignore_interrupts()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["build", "model"], "compile.build"),
        (["serve", "bundle"], "runtime.load"),
        (["bench", "bundle"], "scripts.bench_work"),
        (["generate", "bundle", "hello"], "runtime.llm"),
        (["batch", "bundle", "in", "out"], "runtime.batch.job"),
    ],
)
def test_ctrl_c_while_a_command_imports_is_status_130(
    command: list[str], module: str, tmp_path: Path
) -> None:
    """`module` is one of the test's own, which takes Ctrl-C for something else."""
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    program = f"""
import importlib, importlib.abc, importlib.util, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pelton.{module}":
            return importlib.util.spec_from_file_location(name, {str(tmp_path / "swallowing.py")!r})
sys.meta_path.insert(0, Finder())
from pelton.scripts.cli import main
main({command!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "pelton: interrupted\n")


def test_ctrl_c_again_and_again_is_status_130() -> None:
    """The second one comes when the first has been told, the third as the interpreter ends."""
    program = """
import atexit, os, signal
import click
from pelton.scripts import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(signal.SIGINT)):
        kill(pid, number)
last = Last()
atexit.register(interrupt)
@cli.main.command()
def hang():
    click.echo = interrupt
    raise KeyboardInterrupt
cli._Commands.get_command = lambda self, ctx, name: hang
cli.main(["hang"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
