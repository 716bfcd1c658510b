"""How much memory a build may use, read from files as the kernel lays them out."""

from __future__ import annotations

import io
from pathlib import Path

import psutil
import pytest

from pelton.compile.host_memory import HostMemory, check_host_memory, host_memory
from pelton.compile.progress import Progress
from pelton.errors import BuildError

GiB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def group(folder: str, limit: str, used: int, inactive: int = 0, *, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\n{names[2]} {inactive}\n",
    }


@pytest.mark.parametrize("path", ["/", "/jobs/7", "/not/here"])
def test_tr_04_a_container_s_limit_is_the_memory_there_is(path: str, tmp_path: Path) -> None:
    """Also where `proc` names the group as it is called outside of the container."""
    root = write(
        tmp_path, {"proc/self/cgroup": f"0::{path}\n", **group("sys/fs/cgroup", str(GiB // 4), 1 << 20)}
    )
    memory = host_memory(root)
    assert (memory.total, memory.available) == (GiB // 4, GiB // 4 - (1 << 20))
    assert memory.owner == "the control group of this process"


def test_the_tightest_group_on_the_way_up_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/7/step\n",
            **group("sys/fs/cgroup/jobs/7/step", "max", 0),
            **group("sys/fs/cgroup/jobs/7", str(GiB // 8), 60 << 20, 50 << 20),
            **group("sys/fs/cgroup/jobs", str(GiB // 2), 60 << 20),
        },
    )
    memory = host_memory(root)
    assert (memory.total, memory.available) == (GiB // 8, GiB // 8 - (10 << 20))


def test_version_one_of_the_groups_is_read_too(tmp_path: Path) -> None:
    unlimited = str(2**63 - 4096)
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/jobs\n0::/\n",
            **group("sys/fs/cgroup/memory/jobs", str(GiB // 8), 0, version=1),
            **group("sys/fs/cgroup/memory", unlimited, 0, version=1),
        },
    )
    assert host_memory(root).total == GiB // 8


def test_without_groups_it_is_the_machine_s(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert (memory.total, memory.owner) == (psutil.virtual_memory().total, "this machine")


def test_a_build_is_refused_above_the_total_and_warned_above_what_is_free() -> None:
    def said(needed: int) -> str:
        stream = io.StringIO()
        check_host_memory(needed, Progress(stream), HostMemory(4 * GiB, 2 * GiB, "this machine"))
        return stream.getvalue()

    assert "warning" not in said(2 * GiB)
    assert "warning: less memory is free" in said(3 * GiB)
    with pytest.raises(BuildError, match=r"up to 5\.0 GiB and this machine has 4\.0 GiB"):
        said(5 * GiB)
