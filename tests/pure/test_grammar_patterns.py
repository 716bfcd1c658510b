"""Patterns: what is drawn for them is what Python's `re` finds too; what reads differently elsewhere is refused."""

from __future__ import annotations

import json
import random
import re

import pytest

from pelton.errors import RequestError
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.structured import StructuredOutput
from support.constrained import walk
from support.vocabularies import byte_level

TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)


def draw(form: StructuredOutput, seed: int) -> str:
    rng = random.Random(seed)
    ids = walk(COMPILER.compile(form), TOKENIZER, TOKENIZER.vocab_size, rng, num_free=rng.choice((2, 6)))
    return TOKENIZER.decode(ids, skip_special_tokens=False, is_continuation=True)


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
