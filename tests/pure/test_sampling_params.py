"""`SamplingParams`: what is refused, and under which field's name."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.errors import RequestError
from pelton.runtime.request import SamplingParams

MANY_DIGITS = [10**5000]  # in a list, since pytest writes a number into the name of its test


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop", 5, "must be a string or a list of strings, got 5"),
        ("stop", [5], "1 to 1024 characters"),
        ("stop", b"ab", "1 to 1024 characters"),
        ("stop_token_ids", 5, "must be a list of token ids, got 5"),
        ("stop_token_ids", "a", "'a' is not a token id"),
        ("logit_bias", 5, "must map token ids to numbers, got 5"),
        ("logit_bias", [1], "must map token ids to numbers"),
        ("logit_bias", {5: "x"}, r"logit_bias\[5\] must be a number, got 'x'"),
        ("logit_bias", {"5": 1}, "'5' is not a token id"),
        ("ignore_eos", "no", "must be True or False, got 'no'"),
        ("skip_special_tokens", 1, "must be True or False, got 1"),
        ("include_stop_str_in_output", None, "must be True or False"),
        ("max_tokens", "3", "must be an integer, got '3'"),
        ("min_tokens", MANY_DIGITS, "above max_tokens"),
        ("n", MANY_DIGITS, "between 1 and 128, got one of very many digits"),
        ("temperature", "hot", "must be a number, got 'hot'"),
        ("temperature", MANY_DIGITS, "up to 100, got one of very many digits"),
    ],
)
def test_values_of_a_wrong_type_or_size_name_their_field(field: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        SamplingParams(**{field: MANY_DIGITS[0] if value is MANY_DIGITS else value})
    assert refused.value.field == field


def test_none_is_nothing() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(stop=["a"], stop_token_ids=[5]).stop_token_ids == (5,)  # type: ignore[arg-type]
