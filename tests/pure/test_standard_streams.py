"""Commands whose standard streams are closed, or cannot write every character."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A command of the test's own, run as the console script runs one.
PROGRAM = """
import os, sys
import click
from pelton.scripts import cli
@click.command()
@click.argument("words", nargs=-1)
def command(words):
    read = sys.stdin.read()
    click.echo(f"read {read!r} \\u2019")
    sys.stdout.flush()
    click.echo("told", err=True)
    assert [os.path.exists(f"/proc/self/fd/{n}") for n in range(3)] == [True] * 3
    assert os.open(os.devnull, os.O_RDONLY) > 2
    assert [os.get_inheritable(n) for n in range(3)] == [True] * 3
    if "broken" in words:
        raise BrokenPipeError
cli._Commands.get_command = lambda self, ctx, name: command
sys.argv = ["pelton", "command", *sys.argv[1:]]
cli.entry()
"""


def run(redirections: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    shell = ["sh", "-c", f'"$@" {redirections}', "sh", sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(shell, input=b"text", capture_output=True, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("redirections", "stdout", "stderr"),
    [
        ("", "read 'text' \u2019\n", "told\n"),
        ("<&-", "read '' \u2019\n", "told\n"),
        (">&-", "", "told\n"),
        ("2>&-", "read 'text' \u2019\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_a_closed_stream_is_the_null_device(redirections: str, stdout: str, stderr: str) -> None:
    done = run(redirections, PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, stdout, stderr)


def test_a_reader_that_went_away_is_status_1_without_an_output_too() -> None:
    done = run(">&-", "broken")
    assert (done.returncode, done.stderr) == (1, b"told\n")


def test_a_character_that_the_output_lacks_is_escaped() -> None:
    done = run("", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout) == (0, b"read 'text' \\u2019\n")
