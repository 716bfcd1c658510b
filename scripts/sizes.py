"""Sizes of memory on the command line: `512MiB`, `2GiB`, `1.5GB`, plain bytes."""

from __future__ import annotations

import re
from decimal import Decimal

import click

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


class MemorySize(click.ParamType):  # type: ignore[type-arg] # generic only in newer releases of click
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
        if match is None or match[2] not in _UNITS:
            self.fail(f"{value!r} is not a size; write for example 512MiB or 2GiB", param, ctx)
        size = int(Decimal(match[1]) * _UNITS[match[2]])
        if size < 1:
            self.fail("must be more than nothing", param, ctx)
        return size


MEMORY = MemorySize()
