"""Standard input, output and error as every command may rely on them."""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Put the null device where a stream was closed, and let no character be one that cannot be written.

    A closed descriptor (`pelton ... <&-`) is None in `sys`, and would be the number of the next file that is opened:
    a compiler started later would write its errors into that. What the locale's encoding lacks is written as a
    backslash escape.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
