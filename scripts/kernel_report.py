"""Compile every Triton kernel for every architecture, with no GPU, and tabulate what it needs of one.

    python -m pelton.scripts.kernel_report -o docs/kernels.md
    python -m pelton.scripts.kernel_report --quick --arch 80 --arch 90

Exit status 1 if a hot kernel spills registers: spills are memory traffic in the innermost loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..plugins_trt.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from ..plugins_trt.triton_compile import KernelVariant

# Each has `report_variants()` in `plugins_trt/<operator>_triton.py` (`KernelVariant` says more).
OPERATORS = ("paged_attention", "int4_linear", "fp8_linear", "moe_experts", "split_k")


@dataclass(frozen=True, slots=True)
class Needs:
    """What one kernel needs of one architecture. Bytes spilled are those stored and loaded, per thread."""

    operator: str
    kernel: str
    arch: int
    is_hot: bool
    num_warps: int
    registers: int  # per thread
    shared_bytes: int
    spilled_bytes: int


@click.command(name="kernel-report")
@click.option(
    "--arch", "archs", type=click.Choice([str(a) for a in ARCHITECTURES]), multiple=True, help="Only these."
)
@click.option("--quick", is_flag=True, help="Only the variants that stand for the others.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the page here.")
def command(archs: tuple[str, ...], quick: bool, output: Path | None) -> None:
    """Registers, shared memory and spills of Pelton's Triton kernels, as a page of Markdown."""
    rows = []
    for needs in _compiled([int(arch) for arch in archs] or list(ARCHITECTURES), quick=quick):
        rows.append(needs)
        click.echo(f"{needs.operator} {needs.kernel}, sm_{needs.arch}", err=True)
    text = page(rows)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text)
    spilling = [row for row in rows if row.is_hot and row.spilled_bytes]
    for row in spilling:
        click.echo(f"spills registers: {row.operator} {row.kernel} on sm_{row.arch}", err=True)
    if spilling:
        sys.exit(1)


def _compiled(archs: list[int], *, quick: bool) -> Iterator[Needs]:
    for operator in OPERATORS:
        module = import_module(f"..plugins_trt.{operator}_triton", __package__)
        for variant in module.report_variants():
            if quick and not variant.is_quick:
                continue
            for arch in archs:
                if arch in variant.architectures:
                    yield _needs(operator, variant, arch)


def _needs(operator: str, variant: KernelVariant, arch: int) -> Needs:
    kernel = variant.compile(arch)
    return Needs(
        operator=operator,
        kernel=variant.name.removeprefix(operator).strip(),
        arch=arch,
        is_hot=variant.is_hot,
        num_warps=kernel.num_warps,
        registers=kernel.registers,
        shared_bytes=kernel.shared_bytes,
        spilled_bytes=kernel.spill_store_bytes + kernel.spill_load_bytes,
    )


def page(rows: Sequence[Needs]) -> str:
    """One table per operator, one line per kernel, one column per architecture."""
    archs = sorted({row.arch for row in rows})
    spilling = [row for row in rows if row.spilled_bytes]
    found = ", ".join(f"{row.operator} {row.kernel} on {row.arch / 10:.1f}" for row in spilling)
    lines = [
        "# What the kernels need of each architecture",
        "",
        "    python -m pelton.scripts.kernel_report -o docs/kernels.md",
        "",
        "compiles Pelton's Triton kernels ahead of time, with no GPU, and writes this page "
        f"(Triton {version('triton')}).",
        "A cell has the registers of a thread (of 255) and the KiB of shared memory of a program. Where threads spill",
        "registers to memory, the bytes that each stores and loads are behind it in bold.",
        "",
        f"**{len(rows)} kernels compiled; {len(spilling)} spill{f': {found}' if found else ''}.**",
    ]
    for operator, group in groupby(rows, key=lambda row: row.operator):
        lines += ["", f"## {operator}", "", *_table(list(group), archs)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Needs], archs: Sequence[int]) -> Iterator[str]:
    kernels: dict[str, dict[int, Needs]] = {}
    for row in rows:
        kernels.setdefault(row.kernel, {})[row.arch] = row
    yield f"| kernel | warps | {' | '.join(f'{arch / 10:.1f}' for arch in archs)} |"
    yield f"| --- {'| ---: ' * (len(archs) + 1)}|"
    for kernel, by_arch in kernels.items():
        warps = "/".join(str(number) for number in sorted({row.num_warps for row in by_arch.values()}))
        cells = " | ".join(_cell(by_arch.get(arch)) for arch in archs)
        yield f"| {kernel} | {warps} | {cells} |"


def _cell(row: Needs | None) -> str:
    if row is None:
        return ""
    spills = f" **{row.spilled_bytes}**" if row.spilled_bytes else ""
    return f"{row.registers}, {row.shared_bytes / 1024:.0f}{spills}"


if __name__ == "__main__":
    command()
