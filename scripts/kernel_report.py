"""Compile every Triton kernel for every architecture, with no GPU, and tabulate what it needs of one.

    python -m pelton.scripts.kernel_report -o docs/kernels.md
    python -m pelton.scripts.kernel_report --quick --arch 80 --arch 90

Exit status 1 if a hot kernel spills registers: spills are memory traffic in the innermost loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..plugins_trt.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from ..plugins_trt.triton_compile import CompiledKernel, KernelVariant

# Each has `report_variants()` in `plugins_trt/<operator>_triton.py` (`KernelVariant` says more).
OPERATORS = ("paged_attention", "int4_linear", "fp8_linear", "moe_experts", "split_k")


@click.command(name="kernel-report")
@click.option(
    "--arch", "archs", type=click.Choice([str(a) for a in ARCHITECTURES]), multiple=True, help="Only these."
)
@click.option("--quick", is_flag=True, help="Only the variants that stand for the others.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the table here.")
def command(archs: tuple[str, ...], quick: bool, output: Path | None) -> None:
    """Registers, shared memory and spills of Pelton's Triton kernels."""
    rows, spilling = [], []
    for variant, kernel in _compiled([int(arch) for arch in archs] or list(ARCHITECTURES), quick=quick):
        rows.append(_row(variant, kernel))
        click.echo(f"{variant.name}, sm_{kernel.arch}", err=True)
        if kernel.spills and variant.is_hot:
            spilling.append(f"{variant.name} on sm_{kernel.arch}")
    table = _table(rows)
    if output is None:
        click.echo(table, nl=False)
    else:
        output.write_text(table)
    for name in spilling:
        click.echo(f"spills registers: {name}", err=True)
    if spilling:
        sys.exit(1)


def _compiled(archs: list[int], *, quick: bool) -> Iterator[tuple[KernelVariant, CompiledKernel]]:
    for operator in OPERATORS:
        module = import_module(f"..plugins_trt.{operator}_triton", __package__)
        for variant in module.report_variants():
            if quick and not variant.is_quick:
                continue
            for arch in archs:
                if arch in variant.architectures:
                    yield variant, variant.compile(arch)


def _row(variant: KernelVariant, kernel: CompiledKernel) -> tuple[str, ...]:
    return (
        variant.name,
        f"{kernel.arch / 10:.1f}",
        str(kernel.num_warps),
        str(kernel.registers),
        f"{kernel.shared_bytes / 1024:.1f}",
        f"{kernel.spill_store_bytes} / {kernel.spill_load_bytes}",
        f"{len(kernel.cubin) / 1024:.0f}",
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    """Markdown, the rows of a kernel together."""
    header = ("kernel", "SM", "warps", "registers", "shared KiB", "spill store / load bytes", "cubin KiB")
    order = {name: i for i, name in reversed(list(enumerate(row[0] for row in rows)))}
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *sorted(rows, key=lambda row: order[row[0]])]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    command()
