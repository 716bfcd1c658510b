"""Suffix decoding against naive counting over all texts, and the bounds of what a server keeps of them."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import DraftAsk
from pelton.runtime.speculate.learned import LearnedTexts
from pelton.runtime.speculate.suffix import SuffixDrafter, vote

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=25)


def sequence_of(prompt: list[int], output: list[int] | None = None, salt: str = "") -> Sequence:
    sequence = Sequence(Request("r", tuple(prompt), SamplingParams(), cache_salt=salt))
    sequence.token_ids.extend(output or [])
    return sequence


def propose(drafter: SuffixDrafter, sequence: Sequence, num_tokens: int) -> list[int]:
    (draft,) = drafter.propose([DraftAsk(sequence, num_tokens)])
    assert draft.probs is None
    assert len(draft) <= num_tokens
    return list(draft.token_ids)


def teach(drafter: SuffixDrafter, prompt: list[int], output: list[int], salt: str = "") -> None:
    sequence = sequence_of(prompt, output, salt)
    propose(drafter, sequence, 1)
    drafter.end(sequence)


def agreement(tokens: list[int], end: int, last: list[int]) -> int:
    length = 0
    while length < min(end, len(last)) and tokens[end - length - 1] == last[-length - 1]:
        length += 1
    return length


def naive_draft(own: list[int], texts: list[list[int]], asked: int) -> list[int]:
    """Continuations behind the longest agreement, as whole lists, counted by their beginnings."""
    places = [(agreement(own, end, own), own, end) for end in range(1, len(own))]
    places += [(agreement(text, end, own), text, end) for text in texts for end in range(1, len(text))]
    longest = max((length for length, _, _ in places), default=0)
    if longest < 2:
        return []
    goes_on = []
    for length, text, end in places:
        if length == longest:
            rest = text[end:]
            goes_on.append((rest * (asked + 1))[:asked] if text is own else rest)
    draft: list[int] = []
    while len(draft) < min(asked, 2 * longest):
        n = len(draft)
        counts = Counter(rest[n] for rest in goes_on if len(rest) > n and rest[:n] == draft)
        top = max(counts.values(), default=0)
        if top / len(goes_on) < 0.1:
            break
        (token,) = [t for t in counts if counts[t] == top] if list(counts.values()).count(top) == 1 else [-1]
        if token < 0:
            break  # equal votes: the newest wins, which this does not know
        draft.append(token)
    return draft


@settings(max_examples=200)
@given(st.lists(TEXT, max_size=3), TEXT, st.integers(1, 12))
def test_drafts_are_what_most_places_of_the_longest_agreement_go_on_with(
    texts: list[list[int]], own: list[int], asked: int
) -> None:
    drafter = SuffixDrafter()
    for text in texts:
        teach(drafter, text[:1], text[1:])
    taught = [text for text in texts if len(text) > 1]
    draft = propose(drafter, sequence_of(own), asked)
    pairs = [text[i : i + 2] for text in [own, *taught] for i in range(len(text) - 1)]
    if max(Counter(map(tuple, pairs)).values(), default=0) <= 12:  # all places of any pair vote
        expected = naive_draft(own, taught, asked)
        assert draft[: len(expected)] == expected
        assert bool(draft) == bool(expected) or len(expected) == 0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), TEXT), max_size=5),
    TEXT,
    st.lists(st.integers(1, 9), min_size=1),
)
def test_learned_places_are_all_places_of_the_same_salt(
    texts: list[tuple[str, list[int]]], last: list[int], pieces: list[int]
) -> None:
    learned = LearnedTexts(3000, 2, 4)
    for i, (salt, text) in enumerate(texts):
        learned.add(salt, text)
        learned.index(pieces[i % len(pieces)])
    learned.index(1000)
    expected = Counter(
        (length, *[*text, -1][end : end + 3])
        for salt, text in texts
        for end in range(1, len(text))
        if salt == "a" and (length := agreement(text, end, last)) >= 2
    )
    found: Counter[tuple[int, ...]] = Counter()
    for length, tokens, end in learned.find("a", array("i", last), 1000):
        following = list(tokens[end : end + 3])
        stop = following.index(-1) + 1 if -1 in following else 3
        found[(length, *following[:stop])] += 1
    assert found == expected


@settings(max_examples=50)
@given(
    st.integers(0, 400),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 150), st.integers(0, 60)), max_size=30),
)
def test_what_is_kept_is_bounded_over_all_salts(max_tokens: int, steps: list[tuple[str, int, int]]) -> None:
    learned = LearnedTexts(max_tokens, 2, 4)
    for i, (salt, length, room) in enumerate(steps):
        learned.add(salt, [i] * length)
        assert learned.num_tokens <= max_tokens
        learned.index(room)
        assert learned.num_tokens <= max_tokens


def test_the_oldest_text_goes_first() -> None:
    learned = LearnedTexts(300, 2, 4)
    for i in range(9):
        learned.add("", [i, i + 1, i + 2] * 10)
        learned.index(100)
    kept = [i for i in range(9) if learned.find("", array("i", [i, i + 1, i + 2, i]), 1)]
    assert kept == list(range(kept[0], 9))
    assert 3 <= len(kept) <= 7


def test_an_output_is_drafted_for_the_next_request_like_it() -> None:
    drafter = SuffixDrafter()
    teach(drafter, [1, 2, 3], [50, 51, 52, 53, 54])
    assert propose(drafter, sequence_of([9, 2, 3]), 4) == [50, 51, 52, 53]
    assert propose(drafter, sequence_of([9, 52, 53]), 4) == [54]


def test_the_most_frequent_output_wins() -> None:
    drafter = SuffixDrafter()
    for last in (60, 70, 60, 60, 70):
        teach(drafter, [1, 2], [50, 51, last])
    assert propose(drafter, sequence_of([50, 51]), 4) == [60]


def test_a_longer_agreement_wins_over_many_shorter() -> None:
    drafter = SuffixDrafter()
    for _ in range(20):
        teach(drafter, [1, 2], [50, 51, 60])
    teach(drafter, [1, 2], [49, 50, 51, 70])
    assert propose(drafter, sequence_of([49, 50, 51]), 1) == [70]


def test_other_salts_learn_nothing() -> None:
    drafter = SuffixDrafter()
    teach(drafter, [1, 2, 3], [50, 51, 52], salt="tenant")
    assert propose(drafter, sequence_of([1, 2, 3]), 4) == []
    assert propose(drafter, sequence_of([1, 2, 3], salt="other"), 4) == []
    assert propose(drafter, sequence_of([1, 2, 3], salt="tenant"), 4) == [50, 51, 52]


def test_prompts_are_not_learned_but_for_the_context_of_the_output() -> None:
    drafter = SuffixDrafter()
    teach(drafter, list(range(100, 130)), [50, 51])
    assert propose(drafter, sequence_of([100, 101]), 4) == []
    assert propose(drafter, sequence_of([128, 129]), 4) == [50, 51]


def test_a_sequence_teaches_once() -> None:
    drafter, sequence = SuffixDrafter(), sequence_of([1, 2], [3, 4])
    propose(drafter, sequence, 1)
    drafter.end(sequence)
    held = drafter._learned.num_tokens
    drafter.end(sequence)
    assert drafter._learned.num_tokens == held > 0
    assert not drafter._indexes


def test_unlikely_continuations_end_a_draft() -> None:
    tokens = array("i", [token for i in range(12) for token in (7, 8, 9, 20 + i, -1)])
    places = [(tokens, 5 * i + 2) for i in range(12)]
    assert vote(places, array("i"), 5) == (9,)


@pytest.mark.parametrize("max_tokens", [0, 10])
def test_a_server_may_keep_nothing(max_tokens: int) -> None:
    drafter = SuffixDrafter(max_tokens)
    teach(drafter, [1, 2, 3], [50, 51, 52])
    assert propose(drafter, sequence_of([1, 2, 3]), 4) == []
    assert propose(drafter, sequence_of([1, 2, 3, 1, 2]), 4) == [3, 1, 2, 3]
