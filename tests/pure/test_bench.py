"""`pelton bench`: what surrounds its measurements."""

from __future__ import annotations

import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pelton.errors import PeltonError
from pelton.runtime.engine import EngineConfig
from pelton.scripts import bench_work
from pelton.scripts.bench_work import num_running, time_first_token
from pelton.scripts.engine_options import engine_arguments, engine_config, engine_options
from support.live_server import live_server
from support.tiny_model import scripted_engine


@pytest.mark.parametrize(
    ("requested", "wanted", "built", "running"),
    [(32, None, 64, 32), (32, None, 16, 16), (32, 8, 64, 8), (4, 8, 64, 4), (100, 80, 64, 64)],
)
def test_num_running_is_within_every_limit(
    requested: int, wanted: int | None, built: int, running: int
) -> None:
    assert num_running(requested, wanted=wanted, built=built) == running


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(
            enable_prefix_caching=False,
            max_batch_size=2,
            max_step_tokens=3,
            max_chunk_tokens=4,
            kv_cache_bytes=5,
            num_threads=6,
        ),
    ],
)
def test_every_engine_option_reaches_the_server(config: EngineConfig) -> None:
    seen: list[EngineConfig] = []

    @click.command()
    @engine_options
    def serve(**options: Any) -> None:
        seen.append(engine_config(**options))

    result = CliRunner().invoke(serve, engine_arguments(config))
    assert result.exit_code == 0, result.output
    assert seen == [config]


def test_the_high_water_mark_of_a_status() -> None:
    assert bench_work._vm_hwm("Name:\tpython\nVmPeak:\t  9 kB\nVmHWM:\t  215672 kB\n") == 215672 * 1024
    assert bench_work._vm_hwm("Name:\tkthreadd\n") is None


def server(program: str) -> list[str]:
    """A command that is not `pelton serve`."""
    return [sys.executable, "-c", program]


def test_the_first_token_is_timed() -> None:
    with live_server(scripted_engine()) as live:
        program = f"import sys; print('serving tiny on {live.url}/v1', flush=True); sys.stdin.read()"
        assert 0 < time_first_token(server(program), start_timeout=30, reply_timeout=20) < 50


def test_a_server_that_ends_gives_its_reason() -> None:
    with pytest.raises(PeltonError, match="did not start: bundle: no manifest"):
        time_first_token(server("import sys; sys.exit('pelton: bundle: no manifest')"))


@pytest.mark.parametrize(
    ("ours", "servers"),
    [
        ("glibc.malloc.hugetlb=1", "None"),
        ("glibc.malloc.check=1:glibc.malloc.hugetlb=1", "glibc.malloc.check=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_timed_server_starts_as_from_a_shell(
    ours: str, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pays for its own restart, and it asks for no key."""
    monkeypatch.setenv("GLIBC_TUNABLES", ours)
    monkeypatch.setenv("PELTON_RESTARTED", "1")
    monkeypatch.setenv("PELTON_API_KEY", "secret")
    names = "*map(os.environ.get, ('GLIBC_TUNABLES', 'PELTON_API_KEY', 'PELTON_RESTARTED'))"
    with pytest.raises(PeltonError, match=f"did not start: {servers} None None$"):
        time_first_token(server(f"import os, sys; print({names}, file=sys.stderr); sys.exit(1)"))


def test_a_server_that_says_nothing_is_given_up() -> None:
    with pytest.raises(PeltonError, match=r"did not start within 0\.1 s"):
        time_first_token(server("import signal; signal.pause()"), start_timeout=0.1)


def test_a_server_that_does_not_answer_is_given_up() -> None:
    program = (
        "import signal, socket; s = socket.create_server(('127.0.0.1', 0));"
        "print(f'http://127.0.0.1:{s.getsockname()[1]}/v1', flush=True); signal.pause()"
    )
    with pytest.raises(PeltonError, match="did not answer: timed out"):
        time_first_token(server(program), reply_timeout=0.1)
