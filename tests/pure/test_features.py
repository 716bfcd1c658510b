"""The README's table is what the code refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.features import FEATURES, refused_pairs, unsupported_reason
from pelton.scripts.feature_matrix import matrix

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_the_table_as_it_is_now() -> None:
    assert matrix() in README.read_text(encoding="utf-8"), (
        "remake it: python -m pelton.scripts.feature_matrix"
    )


def test_reasons_do_not_depend_on_the_order() -> None:
    pairs = list(refused_pairs())
    assert len(pairs) > 30
    for first, second, reason in pairs:
        assert unsupported_reason(first, second) == unsupported_reason(second, first) == reason
    assert unsupported_reason("ngram drafts", "structured output") is None


def test_what_is_no_feature_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no feature"):
        unsupported_reason("cpu", "beam search")
    assert len(set(FEATURES)) == len(FEATURES) <= 26
