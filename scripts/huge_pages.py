"""Huge pages for what malloc gives out: an engine's activations.

A step's activations are scattered over megabytes, and 4 KiB pages cost up to a quarter of its time in TLB misses. glibc
reads the setting when a process starts, and at no other time:
https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"
_SETTING = f"{_TUNABLE}=1"


def restart_with_huge_pages() -> None:
    """Start this process again with the setting, unless the environment has a say in it. Goes on where it cannot."""
    tunables = os.environ.get(_VARIABLE, "")
    if sys.platform != "linux" or _TUNABLE in tunables:
        return
    environment = {**os.environ, _VARIABLE: f"{tunables}:{_SETTING}".removeprefix(":")}
    with suppress(OSError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def before_restart(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as it was before `restart_with_huge_pages`."""
    others = dict(environment)
    tunables = [setting for setting in others.pop(_VARIABLE, "").split(":") if setting not in ("", _SETTING)]
    return others | ({_VARIABLE: ":".join(tunables)} if tunables else {})
