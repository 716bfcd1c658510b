"""Stop strings: found anywhere, nothing of them leaks, nothing else is held."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.detokenizer import Detokenizer, TextStep
from pelton.runtime.request import SamplingParams


class Words:
    """A vocabulary whose token i is the text `words[i]`; token 99 is special."""

    special_token_ids = frozenset([99])

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def token_bytes(self, token_id: int) -> bytes:
        return b"<special>" if token_id == 99 else self._words[token_id].encode()


def run(words: Sequence[str], *stops: str, **params: object) -> tuple[list[TextStep], str]:
    """Push word after word up to the stop; the steps, and what `finish` released."""
    detokenizer = Detokenizer(Words(words), SamplingParams(stop=stops, **params))  # type: ignore[arg-type]
    steps = []
    for token_id in range(len(words)):
        steps.append(detokenizer.push([token_id]))
        if steps[-1].stop_reason is not None:
            break
    return steps, detokenizer.finish()


def test_st_06_stop_string_across_tokens() -> None:
    steps, rest = run(["DEF", "G", "HI", "J", "K"], "DEFGHIJ")
    assert [step.text for step in steps] == ["", "", "", ""]
    assert steps[-1] == TextStep("", 1, "DEFGHIJ")
    assert rest == ""


def test_st_06_included_stop_string_across_tokens() -> None:
    steps, rest = run(["DEF", "G", "HI", "J", "K"], "DEFGHIJ", include_stop_str_in_output=True)
    assert [step.text for step in steps] == ["", "", "", "DEFGHIJ"]
    assert rest == ""


@pytest.mark.parametrize(("included", "text"), [(False, " "), (True, " Pari")])
def test_st_06_stop_inside_a_token(included: bool, text: str) -> None:
    steps, rest = run([" Paris", " is"], "Pari", include_stop_str_in_output=included)
    assert steps == [TextStep(text, 1, "Pari")]
    assert rest == ""


@pytest.mark.parametrize("included", [False, True])
def test_st_06_stop_that_never_completes_is_released_unchanged(included: bool) -> None:
    steps, rest = run(["DEF", "G", "HI", "J", "K"], "DEFX", include_stop_str_in_output=included)
    assert [step.text for step in steps] == ["", "DEFG", "HI", "J", "K"]
    assert rest == ""
    steps, rest = run(["a DE", "F"], "DEFX")
    assert [step.text for step in steps] == ["a ", ""]
    assert rest == "DEF"


def test_st_06_only_a_real_prefix_of_a_stop_is_held() -> None:
    steps, _ = run(["<div", "><", "b>", "</", "tool", "_x>"], "</tool_call>")
    assert [step.text for step in steps] == ["<div", ">", "<b>", "", "", "</tool_x>"]


@pytest.mark.parametrize(("included", "text"), [(False, "DEF"), (True, "DEFGHI")])
def test_st_06_overlapping_stops_the_first_complete_wins(included: bool, text: str) -> None:
    steps, _ = run(["DEF", "G", "HI", "J"], "DEFGHIJ", "GHI", include_stop_str_in_output=included)
    assert "".join(step.text for step in steps) == text
    assert steps[-1].stop_reason == "GHI"


@pytest.mark.parametrize("stops", [("HIJ", "GHIJ"), ("GHIJ", "HIJ")])
def test_st_06_of_stops_complete_at_once_the_longest_wins(stops: tuple[str, str]) -> None:
    steps, _ = run(["DEF", "G", "HI", "J"], *stops)
    assert "".join(step.text for step in steps) == "DEF"
    assert steps[-1].stop_reason == "GHIJ"


def test_st_06_stop_that_begins_again_inside_itself() -> None:
    steps, _ = run(list("aabaabaaab"), "aabaaa")
    assert "".join(step.text for step in steps) == "aab"


def test_stop_strings_reach_over_skipped_tokens_and_characters() -> None:
    detokenizer = Detokenizer(Words(["日", "本", "語"]), SamplingParams(stop=("本語",)))
    assert detokenizer.push([0, 1]) == TextStep("日", 2)
    assert detokenizer.push([99, 2, 0]) == TextStep("", 2, "本語")
    assert detokenizer.push([0]) == TextStep("", 0, "本語")
    assert detokenizer.finish() == ""


def test_tokens_after_the_stop_in_one_push_are_not_consumed() -> None:
    detokenizer = Detokenizer(Words(["a", "b", "STOP", "c"]), SamplingParams(stop=("STOP",)))
    assert detokenizer.push([0, 1, 2, 3, 3]) == TextStep("ab", 3, "STOP")


@pytest.mark.parametrize("count", range(4))
def test_no_stop_string_before_min_tokens(count: int) -> None:
    """Complete in token n, a stop string counts if n > min_tokens; it may begin before that."""
    steps, rest = run(["a", "ST", "OP", "b"], "STOP", min_tokens=count, max_tokens=9)
    text = "".join(step.text for step in steps) + rest
    assert text == ("a" if count < 3 else "aSTOPb")
    assert (steps[-1].stop_reason is None) == (count >= 3)


def test_a_stop_passed_over_may_begin_another() -> None:
    steps, _ = run(["ab", "ab", "c"], "abab", "abc", min_tokens=2, max_tokens=9)
    assert "".join(step.text for step in steps) == "ab"
    assert steps[-1].stop_reason == "abc"


words = st.lists(st.text("ab", min_size=1, max_size=4), max_size=12)
stop_sets = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3, unique=True)


@settings(max_examples=200, deadline=None)
@given(words, stop_sets, st.booleans(), st.integers(0, 4))
def test_st_06_equals_the_definition(words: list[str], stops: list[str], included: bool, count: int) -> None:
    """Character by character: the earliest end wins, then the longest; only proper prefixes are held."""
    text, cut, winner = "", None, None
    released: list[int] = []
    for number, word in enumerate(words, 1):
        for char in word:
            text += char
            complete = [stop for stop in stops if text.endswith(stop)] if number > count else []
            if complete:
                winner = max(complete, key=len)
                cut = len(text) - (0 if included else len(winner))
                break
        if winner:
            released.append(cut or 0)
            break
        sizes = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        released.append(len(text) - max(sizes))
    steps, rest = run(words, *stops, include_stop_str_in_output=included, min_tokens=count, max_tokens=99)
    streamed = [step.text for step in steps]
    assert [len("".join(streamed[: i + 1])) for i in range(len(streamed))] == released
    assert "".join(streamed) + rest == text[:cut]
    assert (steps[-1].stop_reason if steps else None) == winner
