"""The command group: which commands restart themselves with huge pages, and how."""

from __future__ import annotations

import os
import sys

import pytest

from pelton.scripts import cli

ORIG_ARGV = ["python-as-typed", "-X", "utf8", "-m", "pelton.scripts.cli"]
Restart = tuple[str, list[str], dict[str, str]]


class Commands:
    """Runs `pelton` as its console script does, with what it would have become or done written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.restarts: list[Restart] = []
        self.num_runs = 0
        self.refusal: Exception | None = None
        monkeypatch.setattr(os, "execve", self._execve)
        monkeypatch.setattr(cli, "main", self._main)
        monkeypatch.setattr(sys, "platform", "linux")

    def __call__(self, *arguments: str, tunables: str | None = None) -> None:
        self._monkeypatch.setattr(sys, "argv", ["pelton", *arguments])
        self._monkeypatch.setattr(sys, "orig_argv", [*ORIG_ARGV, *arguments])
        if tunables is None:
            self._monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
        else:
            self._monkeypatch.setenv("GLIBC_TUNABLES", tunables)
        cli.entry()

    def _execve(self, path: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.restarts.append((path, arguments, environment))
        if self.refusal is not None:
            raise self.refusal

    def _main(self) -> None:
        self.num_runs += 1


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch)


@pytest.mark.parametrize("name", ["serve", "batch", "generate", "bench"])
@pytest.mark.parametrize(
    ("tunables", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
    ],
)
def test_a_command_with_an_engine_restarts_once(
    name: str, tunables: str | None, expected: str, commands: Commands
) -> None:
    commands(name, "bundle", "--threads", "1", tunables=tunables)
    ((path, arguments, environment),) = commands.restarts
    assert path == sys.executable
    assert arguments == [sys.executable, *ORIG_ARGV[1:], name, "bundle", "--threads", "1"]
    assert environment == {**os.environ, "GLIBC_TUNABLES": expected, "PELTON_RESTARTED": "1"}
    commands(name, "bundle", "--threads", "1", tunables=environment["GLIBC_TUNABLES"])
    assert len(commands.restarts) == 1


def test_a_restart_whose_setting_was_taken_out_is_not_repeated(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc does so for a program with file capabilities. Processes that it starts decide for themselves."""
    monkeypatch.setenv("PELTON_RESTARTED", "1")
    commands("serve", "bundle")
    assert commands.restarts == []
    assert commands.num_runs == 1
    assert "PELTON_RESTARTED" not in os.environ
    commands("serve", "bundle")
    assert len(commands.restarts) == 1


def test_without_a_known_interpreter_nothing_restarts(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    commands("serve", "bundle")
    assert commands.restarts == []
    assert commands.num_runs == 1


def test_who_has_set_it_is_left_alone(commands: Commands) -> None:
    commands("serve", "bundle", tunables="glibc.malloc.hugetlb=0")
    assert commands.restarts == []
    assert commands.num_runs == 1


@pytest.mark.parametrize("refusal", [PermissionError("not allowed here"), ValueError("embedded null byte")])
def test_a_restart_that_is_refused_is_done_without(refusal: Exception, commands: Commands) -> None:
    commands.refusal = refusal
    commands("serve", "bundle")
    assert len(commands.restarts) == 1
    assert commands.num_runs == 1


@pytest.mark.parametrize("arguments", [("build", "m"), ("inspect", "b"), ("--help",), ("-h", "serve"), ()])
def test_a_command_without_an_engine_does_not_restart(arguments: tuple[str, ...], commands: Commands) -> None:
    commands(*arguments)
    assert commands.restarts == []
    assert commands.num_runs == 1


def test_elsewhere_than_on_linux_nothing_restarts(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    commands("serve", "bundle")
    assert commands.restarts == []
