"""Calls and reasoning in text: every format, what is malformed, and that no split of the text changes anything."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.detokenizer import Detokenizer
from pelton.runtime.request import SamplingParams
from pelton.runtime.tokenizer import Tokenizer
from pelton.runtime.tool_calls import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerParser,
    ParsedAnswer,
    ParsedCall,
    parse_answer,
)
from pelton.runtime.tool_calls.reader import MAX_HELD_CHARS, Reading
from support.vocabularies import byte_level_backend

NAMES = ("get_weather", "f")
THINK = REASONING_FORMATS["think"]
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
CITY = '{"city": "Zürich {\\"]}\\\\", "days": [1, {"n": null}], "é": "日本 \\u00e9"}'

ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n<tool_call>\n'
    '{"name": "f", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "f", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}, "id": "abcdefghi"}}, '
    '{"name": "f", "arguments": {}}]',
    "mistral_v11": f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]f[ARGS]{{}}",
    "deepseek_v3": f"{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{CITY}\n```{DS[3]}\n"
    f"{DS[1]}function{DS[2]}f\n```json\n{{}}\n```{DS[3]}{DS[4]}",
    "deepseek_v31": f"{DS[0]}{DS[1]}get_weather{DS[2]}{CITY}{DS[3]}{DS[1]}f{DS[2]}{{}}{DS[3]}{DS[4]}",
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "f", "arguments": {{}}}}]',
}
CALLS = [ParsedCall("get_weather", CITY), ParsedCall("f", "{}")]


def streamed(pieces: Iterable[str], name: str | None, **options: bool) -> ParsedAnswer:
    parser = _parser(name, **options)
    answer = ParsedAnswer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.finish())
    return answer


def parsed(text: str, name: str | None, **options: bool) -> ParsedAnswer:
    return streamed([text], name, **options)


def _parser(name: str | None, *, thinks: bool = False, is_in_reasoning: bool = False) -> AnswerParser:
    return AnswerParser(
        None if name is None else TOOL_FORMATS[name],
        THINK if thinks else None,
        tool_names=NAMES,
        is_in_reasoning=is_in_reasoning,
    )


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_two_calls(name: str) -> None:
    assert parsed(ANSWERS[name], name) == ParsedAnswer(calls=CALLS)
    assert parse_answer(ANSWERS[name], TOOL_FORMATS[name], tool_names=NAMES) == ParsedAnswer(calls=CALLS)
    assert json.loads(CALLS[0].arguments)["city"] == 'Zürich {"]}\\'


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_are_streamed_and_the_name_comes_once(name: str) -> None:
    parser = _parser(name)
    text = ANSWERS[name]
    begin = text.index('"days"')
    early = ParsedAnswer()
    early.add(parser.feed(text[:begin]))
    assert early.calls == [ParsedCall("get_weather", CITY[: CITY.index('"days"')], is_whole=False)]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"llama3_json"}))
def test_content_stands_beside_calls(name: str) -> None:
    answer = parsed(f"I look. \n{ANSWERS[name]}\n", name)
    assert answer == ParsedAnswer("I look.", calls=CALLS)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("text", ["", " ", "Hello,\n\n world \n", '{"city": 1}', "a < b [TOOL] {x} <tool"])
def test_an_answer_without_calls_is_unchanged(name: str, text: str) -> None:
    assert parsed(text, name) == ParsedAnswer(text)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_cut_off_arguments_stay_what_they_were(name: str) -> None:
    end = ANSWERS[name].index('"days": [1') + 10
    answer = parsed(ANSWERS[name][:end], name)
    cut = ParsedCall("get_weather", CITY[: CITY.index("[1") + 2], is_whole=False)
    assert answer == ParsedAnswer(calls=[cut])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>nothing</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'),
        ("hermes", """<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"""),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": " ", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}, "parameters": {}, "name": "f"}</tool_call>'),
        ("llama3_json", '{"name": "Paris", "parameters": {}}'),
        ("llama3_json", '{"name": "f"}'),
        ("llama3_json", '<|python_tag|>search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] [1]"),
        ("mistral", "[TOOL_CALLS]f(1)"),
        ("mistral_v11", '[TOOL_CALLS][ARGS]{"a": 1}'),
        ("deepseek_v3", f"{DS[0]}f{DS[2]}{{}}"),
        ("deepseek_v3", f"{DS[0]}{DS[1]}" + "x" * 400 + f"{DS[2]}{{}}"),
        ("granite", "<|tool_call|>[]"),
    ],
)
def test_a_malformed_call_is_content(name: str, text: str) -> None:
    assert parsed(text, name) == ParsedAnswer(text)
    assert streamed(text, name) == ParsedAnswer(text)


def test_what_follows_a_broken_call_is_content_again() -> None:
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert parsed(f"<tool_call>oh {good}", "hermes") == ParsedAnswer(
        "<tool_call>oh", calls=[ParsedCall("f", '{"a": 1}')]
    )
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'
    assert parsed(broken + good, "hermes") == ParsedAnswer(
        calls=[ParsedCall("f", '{"a": 1', is_whole=False), ParsedCall("f", '{"a": 1}')]
    )
    assert parsed("so </tool_call>", "hermes") == ParsedAnswer("so </tool_call>")
    fenced = f"{DS[0]}{DS[1]}f{DS[2]}" + '{"a": 1]' + f"{DS[3]}{DS[4]} so"
    assert parsed(fenced, "deepseek_v31") == ParsedAnswer(
        "] so", calls=[ParsedCall("f", '{"a": 1', is_whole=False)]
    )
    listed = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": 1}]'
    assert parsed(listed, "mistral") == ParsedAnswer(', {"name": 1}]', calls=[ParsedCall("f", "{}")])


@pytest.mark.parametrize("size", range(MAX_HELD_CHARS - 60, MAX_HELD_CHARS + 60, 7))
def test_a_call_that_is_held_too_long_is_none(size: int) -> None:
    text = f'<tool_call>{{"arguments": {{"a": "{"x" * (size - 60)}"}}, "name": "f"}}</tool_call>'
    answer = parsed(text, "hermes")
    assert streamed(text, "hermes") == answer
    assert answer in (ParsedAnswer(text), parsed(text.replace("arguments", "parameters"), "hermes"))
    assert bool(answer.calls) == (text.index("}</") < MAX_HELD_CHARS)


def test_a_text_full_of_half_calls_takes_no_longer_than_others() -> None:
    steps = 0

    class Counting(TOOL_FORMATS["hermes"].reader):  # type: ignore[misc]
        def _more(self) -> Reading[bool]:
            nonlocal steps
            steps += 1
            return (yield from super()._more())

    def count(size: int) -> int:
        nonlocal steps
        steps = 0
        reader = Counting()
        reader.feed('<tool_call>{"arguments": {"a": "' * size)
        reader.finish()
        return steps

    assert count(800) < 2.5 * count(400)


def test_arguments_may_come_first_be_null_or_be_missing() -> None:
    first = '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>'
    assert parsed(first, "hermes").calls == [ParsedCall("f", '{"a": "}"}')]
    for text in (
        '{"name": "f", "arguments": null}',
        '{"name": "f"}',
        '{"id": [1, "x"], "name": "f", "n": -1.5}',
    ):
        assert parsed(f"<tool_call>{text}</tool_call>", "hermes") == ParsedAnswer(
            calls=[ParsedCall("f", "{}")]
        )


def test_hermes_as_models_write_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>'
    assert (
        parsed(text, "hermes")
        == streamed(text, "hermes")
        == ParsedAnswer(calls=[ParsedCall("f", '{"a": "é"}')])
    )
    listed = (
        '<tool_call>\n[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]\n</tool_call>'
    )
    assert (
        parsed(listed, "hermes")
        == streamed(listed, "hermes")
        == ParsedAnswer(calls=[ParsedCall("f", '{"a": 1}'), ParsedCall("f", "{}")])
    )


@pytest.mark.parametrize(
    ("name", "head", "tail"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ', ', "arguments2": {"x": "y"}}\n</tool_call>'),
        ("hermes", '<tool_call>[{"name": "f", "arguments": ', "}]</tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": ', ', "id": 1}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": ', ', "id": "abcdefghi"} ]'),
        ("deepseek_v3", f"{DS[0]}{DS[1]}function{DS[2]}f\n```json\n", f"\n```{DS[3]}{DS[4]}"),
        ("deepseek_v31", f"{DS[0]}{DS[1]}f{DS[2]}", f"{DS[3]}{DS[4]}"),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": ', "}]"),
    ],
)
def test_an_answer_cut_behind_arguments_shows_nothing_of_the_format(name: str, head: str, tail: str) -> None:
    for size in range(len(tail) + 1):
        text = f'{head}{{"a": 1}}{tail[:size]}'
        expected = ParsedAnswer(calls=[ParsedCall("f", '{"a": 1}')])
        assert parsed(text, name) == streamed(text, name) == expected, text


@pytest.mark.parametrize("bit", ["<tool_call>", "<tool_call> ", "<tool_call>x "])
def test_a_whole_text_full_of_markers_is_read_at_once(bit: str) -> None:
    """Content that is joined, and a buffer that is copied, once for each marker took 6 s."""
    text = bit * 80_000
    started = time.process_time()
    assert parsed(text, "hermes") == ParsedAnswer(text)
    assert time.process_time() - started < 3


def test_formats_of_neighbouring_generations() -> None:
    assert parsed('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "mistral_v11").calls == [
        ParsedCall("f", '{"a": 1}', "123456789")
    ]
    assert parsed('[TOOL_CALLS]f{"a": 1}', "mistral").calls == [ParsedCall("f", '{"a": 1}')]
    assert parsed(ANSWERS["deepseek_v3"], "deepseek_v31").calls == CALLS
    assert parsed(f"<|python_tag|>{ANSWERS['llama3_json']}", "llama3_json").calls == CALLS
    assert parsed('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "granite").calls == [CALLS[1]]


def test_other_text_of_llama_is_content() -> None:
    answer = parsed(' {"name": "f", "parameters": {}}; and more', "llama3_json")
    assert answer == ParsedAnswer("; and more", calls=[ParsedCall("f", "{}")])


@pytest.mark.parametrize(
    ("text", "is_in_reasoning", "reasoning", "content"),
    [
        ("<think>\n so \n</think>\n\nParis. \n", False, "so", "Paris. \n"),
        ("\n<think>so</think>Paris", False, "so", "Paris"),
        ("so </ think>\n</think>\n\nParis", True, "so </ think>", "Paris"),
        ("<think>so</think>Paris", True, "so", "Paris"),
        ("so, and \n", True, "so, and", ""),
        ("Paris <think>so</think>", False, "", "Paris <think>so</think>"),
        ("Paris</think>", False, "", "Paris</think>"),
        ("\n<thi", False, "", "\n<thi"),
        ("<think>\n\n</think>\n\nParis", False, "", "Paris"),
    ],
)
def test_reasoning(text: str, is_in_reasoning: bool, reasoning: str, content: str) -> None:
    expected = ParsedAnswer(content, reasoning)
    assert parsed(text, None, thinks=True, is_in_reasoning=is_in_reasoning) == expected
    assert streamed(text, None, thinks=True, is_in_reasoning=is_in_reasoning) == expected


def test_reasoning_is_streamed() -> None:
    parser = _parser(None, thinks=True)
    early = ParsedAnswer()
    early.add(parser.feed("<think>first second"))
    assert early.reasoning == "first second"


def test_a_parser_may_begin_in_reasoning_whatever_the_prompt_says() -> None:
    answer = parse_answer("so\n</think>\nParis", None, REASONING_FORMATS["deepseek_r1"])
    assert answer == ParsedAnswer("Paris", "so")


def test_calls_in_reasoning_are_none() -> None:
    call = ANSWERS["hermes"]
    answer = parsed(f"<think>{call}</think>{call}", "hermes", thinks=True)
    assert answer == ParsedAnswer(reasoning=call, calls=CALLS)


# Whole answers, and bits of all formats in any order: most of what these make is malformed somewhere.
LITERALS = sorted({literal for each in TOOL_FORMATS.values() for literal in each.literals})
BITS = [
    *LITERALS,
    *ANSWERS.values(),
    *(
        '{"name": "f", "arguments": ',
        '{"name": "f", "parameters": {',
        '"name"',
        '"f"',
        '"arguments": {"',
        '"parameters"',
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        ";",
        '"',
        "\\",
        "\\u00e",
        "```",
        "```json\n",
        "\n",
        "  ",
        "{}",
        '{"a": 1',
        "null",
    ),
    *("<think>", "</think>", "<", "[TOOL", "é", "日本", "👩‍👧", "function", "f", "-1.5e3"),
]
TEXTS = st.lists(st.sampled_from(BITS), max_size=14).map(lambda bits: numbered("".join(bits)))


def numbered(text: str) -> str:
    """With words of which none occurs twice, to be found again; without them too, as they spoil most calls."""
    count = iter(range(10**6))
    return re.sub(r"(?<=f)|(?<=[é:])", lambda _: f" W{next(count)}W ", text) if len(text) % 2 else text


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=80, deadline=None)
@given(text=TEXTS, cuts=st.sets(st.integers(0, 400)), thinks=st.booleans(), is_in_reasoning=st.booleans())
def test_no_split_of_the_text_changes_the_answer(
    name: str, text: str, cuts: set[int], thinks: bool, is_in_reasoning: bool
) -> None:
    options = {"thinks": thinks, "is_in_reasoning": is_in_reasoning}
    whole = parsed(text, name, **options)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert streamed([text[a:b] for a, b in itertools.pairwise(places)], name, **options) == whole
    assert streamed(text, name, **options) == whole


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_text_is_lost(name: str, text: str) -> None:
    answer = parsed(text, name)
    found = answer.content + "".join(f"{call.name}{call.call_id}{call.arguments}" for call in answer.calls)
    arguments = answer.calls[-1].arguments if answer.calls else ""
    cut = (
        text[text.rfind(arguments) + len(arguments) :] if arguments else ""
    )  # may lie within a call's object
    for word in re.findall(r"W\d+W", text):
        assert word in found or word in cut
    if not answer.calls:
        assert answer.content == text


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *LITERALS)
TOKENIZER = Tokenizer(byte_level_backend(SPECIAL), special_tokens=SPECIAL, eos_token_ids=[2])


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=30, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), max_size=40))
def test_no_split_of_the_tokens_changes_the_answer(name: str, text: str, sizes: list[int]) -> None:
    """Through the detokenizer, which hides special tokens but those of the format."""
    text = f"{text}<|im_start|>"
    params = SamplingParams(shown_special_tokens=TOKENIZER.special_ids_of(TOOL_FORMATS[name].literals))
    token_ids = TOKENIZER.encode(text)
    assert "<|im_start|>" not in "".join(_pieces(token_ids, params, []))
    assert parsed_tokens(token_ids, params, name, sizes) == parsed_tokens(token_ids, params, name, [])


def parsed_tokens(
    token_ids: Sequence[int], params: SamplingParams, name: str, sizes: Sequence[int]
) -> ParsedAnswer:
    return streamed(_pieces(token_ids, params, sizes), name)


def _pieces(token_ids: Sequence[int], params: SamplingParams, sizes: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, params)
    pieces = []
    position = 0
    for size in [*sizes, len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[position : position + size]).text)
        position += size
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_markers_that_are_special_tokens_reach_the_reader(name: str) -> None:
    params = SamplingParams(shown_special_tokens=TOKENIZER.special_ids_of(TOOL_FORMATS[name].literals))
    token_ids = TOKENIZER.encode(ANSWERS[name] + "<|im_end|>")
    assert parsed_tokens(token_ids, params, name, [1] * len(token_ids)).calls == CALLS
    assert TOKENIZER.special_ids_of(["<|im_end|>", "no token", "<tool"]) == (2,)
