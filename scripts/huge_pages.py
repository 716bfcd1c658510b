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
# Tells a process that it has been started again already. The setting itself does not: glibc takes it out of the
# environment of a program with capabilities of its own (ld.so(8), "Secure-execution mode").
_MARKER = "PELTON_RESTARTED"


def restart_with_huge_pages() -> None:
    """Start this process again with the setting, unless the environment has a say in it. Goes on where it cannot.

    Processes that this one starts decide anew: the marker of a restart does not stay in the environment.
    """
    is_restarted = os.environ.pop(_MARKER, None) is not None
    tunables = os.environ.get(_VARIABLE, "")
    if is_restarted or sys.platform != "linux" or _TUNABLE in tunables or not sys.executable:
        return
    setting = f"{tunables}:{_SETTING}".removeprefix(":")
    environment = {**os.environ, _VARIABLE: setting, _MARKER: "1"}
    with suppress(OSError, ValueError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def before_restart(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as it was before `restart_with_huge_pages`."""
    others = {name: value for name, value in environment.items() if name != _MARKER}
    tunables = [setting for setting in others.pop(_VARIABLE, "").split(":") if setting not in ("", _SETTING)]
    return others | ({_VARIABLE: ":".join(tunables)} if tunables else {})
