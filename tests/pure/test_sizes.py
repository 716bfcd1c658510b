"""Sizes of memory on the command line."""

from __future__ import annotations

import click
import pytest

from pelton.scripts.sizes import MEMORY


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4096B", 4096),
        ("3kB", 3000),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        (" 2 GiB ", 2 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("1TiB", 2**40),
        ("9007199254740993", 2**53 + 1),  # not a float64
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert MEMORY.convert(text, None, None) == size


def test_a_size_above_every_float_is_a_size() -> None:
    assert MEMORY.convert("1" + "0" * 400, None, None) == 10**400


@pytest.mark.parametrize(
    "text",
    ["", "lots", "GiB", "-1GiB", "+1", "1e9", "1.GiB", ".5GiB", "1,5GB", "1GiBs", "2G", "1 2", "nan", "inf"],
)
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size; write for example 512MiB"):
        MEMORY.convert(text, None, None)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0", "0.9B"])
def test_nothing_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="more than nothing"):
        MEMORY.convert(text, None, None)


def test_a_default_in_bytes_stays() -> None:
    assert MEMORY.convert(1 << 30, None, None) == 1 << 30
