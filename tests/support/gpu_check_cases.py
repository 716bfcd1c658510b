"""What the tests of `gpu_check` run in the interpreter's process: its own checks, on CPU tensors of tiny shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pelton.scripts.gpu_checks import attention, products
from pelton.scripts.gpu_checks.measure import HostTimer
from pelton.scripts.gpu_checks.records import as_json
from pelton.scripts.gpu_checks.units import Unit

CPU = torch.device("cpu")


def check_attention(cases: list[attention.Case]) -> list[dict[str, Any]]:
    return _found(attention.check_units(CPU, cases))


def check_products(cases: list[products.Case]) -> list[dict[str, Any]]:
    return _found(products.check_units(CPU, cases))


def time_attention(case: attention.Case, count: int) -> list[dict[str, Any]]:
    """Torch's attention and the first tactics."""
    return _found(list(attention.speed_units(CPU, HostTimer(1), [case]))[:count])


def time_products(case: products.Case) -> list[dict[str, Any]]:
    """The default tactic and cuBLAS's part."""
    units = list(products.speed_units(CPU, HostTimer(1), [case]))
    return _found([units[0], units[-1]])


def _found(units: Iterable[Unit]) -> list[dict[str, Any]]:
    return [as_json(record) for unit in units for record in unit.run()]
