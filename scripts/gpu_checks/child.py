"""One section in a process of its own: `python -m pelton.scripts.gpu_checks.child SECTION JOURNAL SECONDS WORK MODEL`.

SECONDS that it may take, WORK a directory that outlasts the process, MODEL the checkpoint of the sections that build
one, empty if there is none. Exit status 0 when all units have been run or journaled as skipped, 70 when the device is
broken; started again on the same journal, it goes on behind the unit that broke it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from . import attention, measure, models, products
from .units import DeviceBroken, Journal, Unit, leave_broken_device, run_units

DEVICE_BROKEN = 70


def units_of(
    section: str, device: torch.device, timer: measure.Timer, work: Path, model: str
) -> Iterator[Unit]:
    """The units of `section`, which `sections.py` describes."""
    if section == "facts":
        yield from measure.units(device, timer)
    elif section == "attention":
        yield from attention.check_units(device)
    elif section == "products":
        yield from products.check_units(device)
    elif section == "attention-speed":
        yield from attention.speed_units(device, timer)
    elif section == "products-speed":
        yield from products.speed_units(device, timer)
    else:
        yield from models.units(section, device, work, Path(model))


def main(section: str, journal: str, seconds: str, work: str, model: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    units = units_of(section, device, measure.CudaTimer(device), Path(work), model)
    try:
        run_units(
            units,
            Journal(Path(journal)),
            seconds=float(seconds),
            check_device=lambda: torch.cuda.synchronize(device),
        )
    except DeviceBroken as error:
        print(error, file=sys.stderr, flush=True)
        leave_broken_device(DEVICE_BROKEN)


if __name__ == "__main__":
    main(*sys.argv[1:])
