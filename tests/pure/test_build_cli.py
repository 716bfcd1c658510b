"""`pelton build`: what the command decides itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.scripts.build import _default_output


@pytest.mark.parametrize(
    ("model", "name"), [("org/Name", "Name"), ("x/m.Q8_0.gguf", "m.Q8_0"), (".", "here"), ("..", "above")]
)
def test_the_default_output_has_a_name(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "above" / "here"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    assert _default_output(model, "auto") == Path("artifacts") / f"{name}-auto"
