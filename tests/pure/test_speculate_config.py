"""Settings of speculation: defaults by method, and what cannot work names its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pelton.errors import ConfigError
from pelton.runtime.speculate.config import SpeculationConfig

BUNDLE = Path("artifacts/draft")


def test_each_method_has_its_own_number_of_drafts() -> None:
    assert SpeculationConfig("ngram").draft_limit == 10
    assert SpeculationConfig("suffix").draft_limit == 16
    assert SpeculationConfig("draft-model", draft_bundle=BUNDLE).draft_limit == 5
    assert SpeculationConfig("heads").draft_limit == 4
    assert SpeculationConfig("heads", num_draft_tokens=2).draft_limit == 2


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (2, 16)),
        ({"min_ngram": 20}, (20, 20)),
        ({"max_ngram": 1}, (1, 1)),
        ({"max_ngram": 5}, (2, 5)),
        ({"min_ngram": 4, "max_ngram": 4}, (4, 4)),
    ],
)
def test_the_default_of_one_ngram_size_gives_way_to_the_other(
    given: dict[str, int], sizes: tuple[int, int]
) -> None:
    assert SpeculationConfig("ngram", **given).ngram_sizes == sizes


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("method", {"method": "eagle"}),
        ("method", {"method": None}),
        ("num_draft_tokens", {"method": "ngram", "num_draft_tokens": 0}),
        ("num_draft_tokens", {"method": "ngram", "num_draft_tokens": True}),
        ("num_draft_tokens", {"method": "ngram", "num_draft_tokens": 2.0}),
        ("is_adaptive", {"method": "ngram", "is_adaptive": 1}),
        ("draft_bundle", {"method": "draft-model"}),
        ("draft_bundle", {"method": "draft-model", "draft_bundle": 3}),
        ("draft_bundle", {"method": "ngram", "draft_bundle": BUNDLE}),
        ("draft_bundle", {"method": "suffix", "draft_bundle": BUNDLE}),
        ("draft_bundle", {"method": "heads", "draft_bundle": BUNDLE}),
        ("min_ngram", {"method": "suffix", "min_ngram": 2}),
        ("max_ngram", {"method": "heads", "max_ngram": 2}),
        ("min_ngram", {"method": "ngram", "min_ngram": 0}),
        ("max_ngram", {"method": "ngram", "max_ngram": "4"}),
        ("min_ngram", {"method": "ngram", "min_ngram": 5, "max_ngram": 4}),
    ],
)
def test_what_cannot_work_is_refused_with_the_field(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}\b"):
        SpeculationConfig(**given)
