"""Patterns: what is drawn for them is what Python's `re` finds too; what reads differently elsewhere is refused."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from pelton.errors import RequestError
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.structured import Grammar, StructuredOutput
from support.constrained import walk
from support.vocabularies import byte_level

TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)


def draw(form: StructuredOutput, seed: int) -> str:
    rng = random.Random(seed)
    ids = walk(COMPILER.compile(form), TOKENIZER, TOKENIZER.vocab_size, rng, num_free=rng.choice((2, 6)))
    return TOKENIZER.decode(ids, skip_special_tokens=False, is_continuation=True)


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = grammar.start()
    end = min(TOKENIZER.eos_token_ids)
    return all(map(matcher.accept, [*TOKENIZER.encode(text, add_special_tokens=False), end]))


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize(
    "pattern",
    [
        "abc",
        "^abc$",
        "^a|b$",
        "a|^b|^c$",
        "^(?:a|b){2,3}$",
        "^(a|(?P<n>b))c?$",
        r"^\d{2}[^\d]\w\W$",
        r"^[\s]\S[^\s]{2}[^\S]$",
        r"^\x41\u0042[\u0043-E]$",
        r"^a{2,}?b*?c+?d??$",
        r"^[^a-y]$",
        r"^[\]a]$",
        r"^[a\-z][-a][a-]$",
        r"^[&&a~~b|]$",
        r"^[[:alpha:\]]$",
        r"^a{x}\{,3\}$",
        r"^\^\$\.\*\+\?\(\)\[\]\{\}\|\/\\$",
        r"""^["\\\]/#<>%@!~`'=:;,&-]$""",
        r"^é[à-ü]日$",
        "^.$",
        "^$",
        "",
    ],
)
def test_what_is_drawn_has_a_match(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern, "maxLength": 20}
    for seed in range(8):
        text = json.loads(draw(StructuredOutput("json_schema", json.dumps(schema)), seed))
        assert re.search(pattern, text), text
        if pattern not in ("^$", ""):
            assert re.fullmatch(pattern, draw(StructuredOutput("regex", pattern), seed))


def test_a_class_without_both_sides_of_the_surrogates_has_neither() -> None:
    pattern = r"[^\x20-\ud7ff\ue000-\ufffd]"
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    for form, quote in (
        (StructuredOutput("regex", pattern), ""),
        (StructuredOutput("json_schema", json.dumps(schema)), '"'),
    ):
        grammar = COMPILER.compile(form)
        assert [accepts(grammar, quote + char + quote) for char in "\ud7ff\ue000\U0001f600"] == [
            False,
            False,
            True,
        ]


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "[a", "(" * 50, "a**", "*a", "a{3,2}", "a{1}{2}", "a{999999}", "[z-a]", r"[a-\d]"),
        *("\\", r"\cA", r"\z", r"\q", r"\b", r"\1", r"\ud800"),
        *("(?=a)", "(?!a)", "(?<=a)", "(?i)a", r"(?P<n>a)(?P=n)", "a^b", "a$b", "(^a)"),
    ],
)
def test_what_cannot_be_kept_is_refused(pattern: str) -> None:
    for form in (
        StructuredOutput("regex", pattern, field="f"),
        StructuredOutput("json_schema", json.dumps({"pattern": pattern}), field="f"),
    ):
        with pytest.raises(RequestError) as error:
            COMPILER.compile(form)
        assert error.value.field == ("f" if form.kind == "regex" else "f/pattern")
        assert "cannot be honoured" in str(error.value)


@pytest.mark.parametrize(
    "pattern",
    [
        r'[^"\\]{1,30}', r"[^\\]+", r'[^"]+', r"[^\n]+", r'[^\n"]+', r"[^\\\n\r]+", r'[^a"]*', r"[^a\\]+|a",
        r'[^<>:"/\\|?*]+', r"[\x00-!#-\[\]-\uffff]+", r'(?:[^"\\]|\\["\\])*', r"[^\t\r\f\x08]+", r"[^ -~]+",
        r"[!-~]+", r"[\x00-\x20]+", r"[\x00-\x1f]+", r"[a\x01\n]+", r'[^"\x00-\x1f]+', r"(?:.|\r)+", r"\s+",
        r"\S+", r"\W+", r"\D+", r"(?:\w|é)+", r"[\Da]+", r"[\s\S]*", r"[^\s]+", r"[^\S]+", r'"?\\?\n?', r"\\n|\n\t",
    ],
)  # fmt: skip
def test_a_pattern_holds_for_the_string_that_json_spells(pattern: str) -> None:
    whole = f"^(?:{pattern})$"
    value = COMPILER.compile(
        StructuredOutput("json_schema", json.dumps({"type": "string", "pattern": whole}))
    )
    list_schema = {"type": "array", "items": {"type": "string", "pattern": whole}}
    items = COMPILER.compile(StructuredOutput("json_schema", json.dumps(list_schema)))
    key_schema = {"type": "object", "patternProperties": {whole: {}}, "additionalProperties": False}
    keys = COMPILER.compile(StructuredOutput("json_schema", json.dumps(key_schema)))
    for chars in itertools.product('"\\\n\t\r\b\fanf/ é', repeat=2):
        for text in {"".join(chars), chars[0]}:
            spelled = json.dumps(text, ensure_ascii=False)
            is_match = re.fullmatch(pattern, text) is not None
            assert accepts(value, spelled) == is_match, text
            assert accepts(items, f"[{spelled}]") == is_match, text
            assert accepts(keys, f"{{{spelled}:1}}") == is_match, text


@pytest.mark.parametrize(
    "pattern",
    [
        r"a\x01b",
        "a\x01",
        r"\u007f?",
        r"a|\0",
        r"\v",
        "[\x01-\x05]",
        r"[\x7f\x0e]",
        "(\x1f)",
        "[]",
        r"[^\s\S]",
        r"[^\x00-\ud7ff\ue000-\u{10ffff}]",
        r"[^\x08-\r -\u{10ffff}]",
    ],
)
def test_a_control_character_that_json_has_no_short_escape_for_is_refused(pattern: str) -> None:
    for schema, at in (
        ({"pattern": pattern}, "f/pattern"),
        ({"patternProperties": {pattern: {}}}, f"f/patternProperties/{pattern}"),
    ):
        with pytest.raises(RequestError, match="strings of JSON") as error:
            COMPILER.compile(StructuredOutput("json_schema", json.dumps(schema), field="f"))
        assert error.value.field == at


def test_a_regex_of_plain_text_has_every_control_character() -> None:
    grammar = COMPILER.compile(StructuredOutput("regex", r"a\x01[\x02-\x05]\x7f[^\n]"))
    assert accepts(grammar, "a\x01\x03\x7f\x00")


def test_a_form_without_any_output_is_refused_in_plain_words() -> None:
    with pytest.raises(RequestError, match=r"^f cannot be compiled: no output can match$"):
        COMPILER.compile(StructuredOutput("regex", r"[^\s\S]", field="f"))
