"""How much memory a build may use: the machine's, or less where a control group (a container, a job) limits it.

Sources: `man 5 proc` (meminfo), the kernel's Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from ..errors import BuildError
from .progress import Progress, format_bytes


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes in all and free; `owner` says whose limit that is."""

    total: int
    available: int
    owner: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The tightest of the machine's memory and the limits of the control groups that this process is in.

    `root` is where `proc` and `sys` are.
    """
    machine = psutil.virtual_memory()
    bounds = [HostMemory(machine.total, machine.available, "this machine")]
    for group in _groups(root):
        with suppress(OSError, ValueError):
            bounds.append(_bound(group))
    total = min(bounds, key=lambda bound: bound.total)
    return HostMemory(total.total, min(bound.available for bound in bounds), total.owner)


def check_host_memory(needed: int, progress: Progress, memory: HostMemory | None = None) -> None:
    """Say what a build will need: a warning if that is more than is free, `BuildError` if more than there is in all."""
    memory = memory or host_memory()
    progress.note(
        f"the build needs up to {format_bytes(needed)} of host memory, {format_bytes(memory.available)} are free"
    )
    if needed > memory.total:
        raise BuildError(
            f"host memory: the build needs up to {format_bytes(needed)} and {memory.owner} has "
            f"{format_bytes(memory.total)}; build on a larger machine, or raise the limit of the container"
        )
    if needed > memory.available:
        progress.warning("less memory is free than the build may need: the system may end it")


def _groups(root: Path) -> Iterator[Path]:
    """Directories of the control groups of this process and of those around them, whichever version keeps memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        home = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = PurePosixPath(path).parts[1:]
        # In a container the path may be the one outside of it: then only the mount itself is there.
        yield from (home.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def _bound(group: Path) -> HostMemory:
    """Raises `OSError` or `ValueError` where `group` has no limit."""
    limit = _read(group, ("memory.max", "memory.limit_in_bytes"))
    used = _read(group, ("memory.current", "memory.usage_in_bytes"))
    # Pages of files that were not used lately are given up before the limit ends anything.
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    files = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return HostMemory(limit, max(0, limit - max(0, used - files)), "the control group of this process")


def _read(group: Path, names: Sequence[str]) -> int:
    """The first of the files `names` that is there; `max` is no number."""
    name = next((name for name in names if (group / name).is_file()), names[0])
    return int((group / name).read_text())
