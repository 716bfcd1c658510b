from __future__ import annotations

import math

import pytest

from pelton.errors import ConfigError
from pelton.runtime.server.gateway import GatewayConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_waiting", -1),
        ("drain_seconds", -0.5),
        ("drain_seconds", math.nan),
        ("hang_seconds", 0.0),
        ("hang_seconds", math.nan),
        ("max_body_bytes", 0),
    ],
)
def test_numbers_that_cannot_work_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        GatewayConfig(**{field: value})  # type: ignore[arg-type]


def test_the_least_that_works() -> None:
    assert GatewayConfig(max_waiting=0, drain_seconds=0.0).max_waiting == 0
