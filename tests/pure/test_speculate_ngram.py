"""Prompt lookup against a naive search of the whole sequence."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate import ngram, occurrences
from pelton.runtime.speculate.draft import DraftAsk
from pelton.runtime.speculate.ngram import NgramDrafter
from pelton.runtime.speculate.occurrences import OccurrenceIndex

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence(Request("r", tuple(tokens), SamplingParams()))


def agreement(tokens: list[int], end: int, last: list[int]) -> int:
    length = 0
    while length < min(end, len(last)) and tokens[end - length - 1] == last[-length - 1]:
        length += 1
    return length


def naive(tokens: list[int], low: int, high: int, asked: int) -> list[int]:
    lengths = {end: agreement(tokens, end, tokens[-high:]) for end in range(1, len(tokens))}
    length, end = max(((length, end) for end, length in lengths.items()), default=(0, 0))
    if length < low:
        return []
    draft: list[int] = []
    while len(draft) < min(asked, 2 * length):
        at = end + len(draft)
        draft.append(tokens[at] if at < len(tokens) else draft[at - len(tokens)])
    return draft


@given(TOKENS, st.integers(1, 3), st.integers(0, 9), st.integers(1, 20), st.data())
def test_the_longest_newest_occurrence_goes_on_however_the_tokens_came(
    tokens: list[int], low: int, more: int, asked: int, data: st.DataObject
) -> None:
    drafter = NgramDrafter(low, low + more)
    cuts = data.draw(st.sets(st.integers(1, len(tokens)), max_size=8)) | {len(tokens)}
    sequence = sequence_of(tokens[: min(cuts)])
    for cut in sorted(cuts):
        sequence.token_ids.extend(tokens[sequence.num_tokens : cut])
        (draft,) = drafter.propose([DraftAsk(sequence, asked)])
        expected = naive(tokens[:cut], low, low + more, asked)
        assert len(draft) <= asked
        # of more than 16 places of an n-gram only the newest are compared
        if max(tokens[:cut].count(token) for token in set(tokens[:cut])) <= 16:
            assert list(draft.token_ids) == expected
        assert bool(draft.token_ids) == bool(expected)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=120), st.lists(st.integers(1, 30), min_size=1), st.data()
)
def test_places_are_all_earlier_occurrences_whatever_the_pieces_and_tables(
    tokens: list[int], pieces: list[int], data: st.DataObject
) -> None:
    short, long = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 6)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(occurrences, "_TABLE_PLACES", data.draw(st.integers(1, 40)))
        index, at = OccurrenceIndex(short, long), 0
        while at < len(tokens):
            piece = pieces[at % len(pieces)]
            index.extend(tokens[at : at + piece])
            at += piece
        last = tokens[-8:]
        found = index.find(array("i", last), len(tokens))
    lengths = {end: agreement(tokens, end, last) for end in range(1, len(tokens))}
    assert sorted(found) == sorted((length, end) for end, length in lengths.items() if length >= short)
    newest_first = [end for length, end in found if length >= long]
    assert newest_first == sorted(newest_first, reverse=True)


def test_a_place_that_is_far_back_is_found_among_many_short_ones() -> None:
    copied = [1, 2, 3, 4, 5, 6, 7, 8]
    tokens = [*copied, 9, 9, *([5, 6, 0] * 200), *copied[:6]]
    (draft,) = NgramDrafter(2, 16).propose([DraftAsk(sequence_of(tokens), 4)])
    assert draft.token_ids == (7, 8, 9, 9)
    assert draft.probs is None


def test_sp_04_text_that_repeats_is_drafted_beyond_its_end() -> None:
    (draft,) = NgramDrafter(2, 16).propose([DraftAsk(sequence_of([4, 5, 6] * 5), 10)])
    assert draft.token_ids == (4, 5, 6, 4, 5, 6, 4, 5, 6, 4)


def test_a_short_agreement_is_worth_a_short_draft() -> None:
    tokens = [1, 2, *range(10, 30), 1, 2]
    (draft,) = NgramDrafter(2, 16).propose([DraftAsk(sequence_of(tokens), 10)])
    assert draft.token_ids == (10, 11, 12, 13)


def test_a_long_prompt_is_indexed_in_pieces_and_the_others_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "INDEXED_PER_CALL", 16)
    long, short = sequence_of([*range(100, 150), 100, 101]), sequence_of([1, 2, 3, 1, 2])
    drafter = NgramDrafter(2, 16)
    drafts = [drafter.propose([DraftAsk(long, 2), DraftAsk(short, 2)]) for _ in range(6)]
    assert [draft.token_ids for _, draft in drafts] == [(3, 1)] * 6
    # 52 tokens: 11 in the first call, which had 5 others to index, 16 in each of the next
    assert [draft.token_ids for draft, _ in drafts] == [(102, 103)] * 6


def test_what_is_not_indexed_yet_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INDEXED_PER_CALL", 16)
    sequence = sequence_of([*range(100, 140), 130, 131])
    drafter = NgramDrafter(2, 16)
    drafts = [drafter.propose([DraftAsk(sequence, 2)])[0].token_ids for _ in range(4)]
    assert drafts == [(), (), (132, 133), (132, 133)]


def test_an_ended_sequence_is_forgotten_and_found_again_when_it_asks() -> None:
    drafter, sequence = NgramDrafter(2, 16), sequence_of([1, 2, 3, 1, 2])
    ask = [DraftAsk(sequence, 3)]
    first = drafter.propose(ask)[0].token_ids
    drafter.end(sequence)
    drafter.end(sequence)
    assert not drafter._indexes
    assert drafter.propose(ask)[0].token_ids == first == (3, 1, 2)


def test_sequences_do_not_see_each_other() -> None:
    drafter = NgramDrafter(2, 16)
    asks = [DraftAsk(sequence_of([1, 2, 3, 4]), 3), DraftAsk(sequence_of([8, 9, 1, 2]), 3)]
    assert [draft.token_ids for draft in drafter.propose(asks)] == [(), ()]
