"""`StructuredOutput` as Python users write it."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.errors import RequestError
from pelton.runtime.llm import LLM
from pelton.runtime.request import SamplingParams
from pelton.runtime.structured import StructuredOutput, Tag
from support.tiny_model import scripted_engine

SCHEMA = {"type": "object", "properties": {"ä": {"const": 1}}, "required": ["ä"]}


def test_lists_and_dicts_are_taken() -> None:
    assert StructuredOutput("choice", choices=["a", "b"]) == StructuredOutput("choice", choices=("a", "b"))  # type: ignore[arg-type]
    form = StructuredOutput("json_schema", SCHEMA)  # type: ignore[arg-type]
    text = '{"type":"object","properties":{"ä":{"const":1}},"required":["ä"]}'
    assert form == StructuredOutput("json_schema", text)
    assert hash(form) == hash(StructuredOutput("json_schema", text))
    assert StructuredOutput("json_schema", True).source == "true"  # type: ignore[arg-type]
    tags = [Tag("<", "{}", ">")]
    assert StructuredOutput("tagged", tags=tags).tags == tuple(tags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"kind": "json"}, "kind"),
        ({"kind": ["choice"]}, "kind"),
        ({"kind": "regex", "source": b"a"}, "source"),
        ({"kind": "regex", "source": SCHEMA}, "source"),
        ({"kind": "json_schema", "source": ["a"]}, "source"),
        ({"kind": "json_schema", "source": {"const": object()}}, "source"),
        ({"kind": "json_object", "source": "{}"}, "source"),
        ({"kind": "choice", "source": "a"}, "source"),
        ({"kind": "choice", "choices": "ab"}, "choices"),
        ({"kind": "choice", "choices": 1}, "choices"),
        ({"kind": "choice", "choices": [1]}, "choices"),
        ({"kind": "regex", "source": "a", "choices": ["a"]}, "choices"),
        ({"kind": "tagged", "tags": [("a", "{}", "b")]}, "tags"),
    ],
)
def test_what_is_of_a_wrong_type_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutput(**arguments)
    assert caught.value.field == f"structured_output.{field}"
    assert str(caught.value).startswith(caught.value.field)


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (StructuredOutput("choice"), "structured_output"),
        (StructuredOutput("tagged"), "structured_output"),
        (StructuredOutput("json_schema", '{"not": {}}'), "structured_output/not"),
    ],
)
def test_mistakes_that_compiling_finds_have_the_name_of_the_parameter(
    form: StructuredOutput, field: str
) -> None:
    with LLM.from_engine(scripted_engine()) as llm, pytest.raises(RequestError) as caught:
        llm.generate("a", SamplingParams(structured_output=form))
    assert caught.value.field == field
