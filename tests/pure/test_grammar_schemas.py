"""Outputs drawn at random under the masks of many schemas are valid; what cannot be promised is refused."""

from __future__ import annotations

import contextlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pelton.errors import EngineError, OverloadedError, RequestError
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.grammar.limits import GrammarLimits
from pelton.runtime.grammar.schema import prepare_schema
from pelton.runtime.structured import StructuredOutput
from pelton.runtime.tokenizer import Tokenizer
from support.constrained import allowed, walk
from support.json_schemas import SCHEMAS
from support.vocabularies import byte_level, sentencepiece

NUM_WALKS = 12
NUM_PADDING = 70


@cache
def vocabulary(kind: str) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = {"byte-level": byte_level, "sentencepiece": sentencepiece}[kind]()
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size + NUM_PADDING)


def draw(output: StructuredOutput, seed: int, kind: str = "byte-level", liked: bytes = b"") -> str:
    tokenizer, compiler = vocabulary(kind)
    rng = random.Random(seed)
    token_ids = walk(
        compiler.compile(output),
        tokenizer,
        tokenizer.vocab_size + NUM_PADDING,
        rng,
        num_free=rng.choice((0, 5, 30)),
        liked=liked,
    )
    return tokenizer.decode(token_ids, skip_special_tokens=False, is_continuation=True)


def form(schema: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema), field="schema")


def refusal(schema: object) -> RequestError:
    with pytest.raises(RequestError) as error:
        vocabulary("byte-level")[1].compile(form(schema))
    return error.value


@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")
@pytest.mark.parametrize("name", SCHEMAS)
def test_so_04_every_output_is_valid(name: str) -> None:
    validator = Draft202012Validator(SCHEMAS[name], format_checker=Draft202012Validator.FORMAT_CHECKER)
    kind = "sentencepiece" if len(name) % 4 == 0 else "byte-level"
    for seed in range(NUM_WALKS):
        text = draw(form(SCHEMAS[name]), seed, kind)
        validator.validate(json.loads(text))


_INTEGER = {"type": "integer"}
_KINDS = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "xy"]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": _INTEGER}}, r'{"\u0061":"x"}'),
        ({"properties": {"é": _INTEGER}}, r'{"\u00e9":"x"}'),
        ({"properties": {"\n": _INTEGER}}, r'{"\u000a":"x"}'),
        (
            {"patternProperties": {"^x": _INTEGER}, "additionalProperties": {"type": "null"}},
            r'{"\u0078":null}',
        ),
        ({"oneOf": _KINDS}, r'{"k":"x","\u006b":"y"}'),
    ],
)
def test_so_04_an_escape_makes_no_other_name(schema: dict[str, Any], text: str) -> None:
    """A key is told from the names of properties by its spelling, so each has one."""
    tokenizer, compiler = vocabulary("byte-level")
    compiled = compiler.compile(form({"type": "object", **schema}))
    matcher = compiled.start()
    assert not all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False)))
    validator = Draft202012Validator(schema)
    for seed in range(20):
        validator.validate(json.loads(draw(form({"type": "object", **schema}), seed, liked=b"\\")))


def test_so_04_short_escapes_are_in_literals() -> None:
    tokenizer, compiler = vocabulary("byte-level")
    for schema in ({"const": '\b\t\n\f\r"\\/é'}, {"enum": [{'\b\t\n\f\r"\\': "\n"}]}):
        value = schema.get("const") or schema["enum"][0]
        matcher = compiler.compile(form(schema)).start()
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False)))
        assert matcher.is_finished


def test_so_04_a_dead_end_is_told_in_plain_words() -> None:
    tokenizer, compiler = vocabulary("byte-level")
    no_key = {"patternProperties": {r"^[^\p{L}\P{L}]$": {}}, "additionalProperties": False}
    matcher = compiler.compile(form({"type": "object", "minProperties": 1, **no_key})).start()
    for char in "{\n" + " " * 8:
        (token_id,) = tokenizer.encode(char, add_special_tokens=False)
        assert matcher.accept(token_id)
    with pytest.raises(EngineError, match=r"^no output can match the form: "):
        allowed(matcher, matcher.vocabulary.num_words)


def test_so_04_an_open_object_stays_open() -> None:
    tokenizer, compiler = vocabulary("byte-level")
    matcher = compiler.compile(form({"type": "object", "properties": {"a": _INTEGER}})).start()
    assert all(map(matcher.accept, tokenizer.encode('{"b":"é\\n"}', add_special_tokens=False)))
    assert matcher.is_finished


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"type": "nope"}, "/type"),
        ({"type": []}, "/type"),
        ({"items": [{"type": "string"}]}, "/items"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "/properties/a/$ref"),
        ({"$ref": "http://example.com/s"}, "/$ref"),
        ({"properties": {"a/b": {"pattern": "("}}}, "/properties/a~1b/pattern"),
        ({"pattern": "^(?=a)b"}, "/pattern"),
        ({"patternProperties": {"(": {}}}, "/patternProperties/("),
        ({"allOf": [{}, {"not": {}}]}, "/allOf/1/not"),
        ({"if": {}, "then": {}}, "/if"),
        ({"uniqueItems": True}, "/uniqueItems"),
        ({"contains": {}}, "/contains"),
        ({"propertyNames": {}}, "/propertyNames"),
        ({"dependentRequired": {}}, "/dependentRequired"),
        ({"unevaluatedProperties": False}, "/unevaluatedProperties"),
        ({"contentEncoding": "base64"}, "/contentEncoding"),
        ({"maxLenght": 3}, "/maxLenght"),
        ({"x": 1}, "/x"),
        ({"format": "regex"}, "/format"),
        ({"format": "date", "pattern": "^2"}, "/format"),
        ({"minLength": 5, "maxLength": 2}, "/minLength"),
        ({"minItems": 2.5}, "/minItems"),
        ({"minLength": True}, "/minLength"),
        ({"maximum": "5"}, "/maximum"),
        ({"exclusiveMinimum": True, "minimum": 3}, "/exclusiveMinimum"),
        ({"maximum": 1e300}, "/maximum"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"multipleOf": 0.1}, "/multipleOf"),
        ({"type": {}}, "/type"),
        ({"type": [[]]}, "/type"),
        ({"format": []}, "/format"),
        ({"format": {}}, "/format"),
        ({"$ref": []}, "/$ref"),
        ({"$ref": "#/allOf/" + "1" * 5000, "allOf": [{}]}, "/$ref"),
        ({"$ref": "#" + "/a" * 5000}, "/$ref"),
        ({"pattern": "a{" + "1" * 5000 + "}"}, "/pattern"),
        ({"enum": []}, "/enum"),
        ({"enum": [1, {"a": 2**60}]}, "/enum/1/a"),
        ({"const": "a\x01b"}, "/const"),
        ({"const": "\x7f"}, "/const"),
        ({"enum": ["a\n", {"k": ["\x00"]}]}, "/enum/1/k/0"),
        ({"const": {"\x0b": 1}}, "/const/\x0b"),
        ({"properties": {"a\x1f": {}}}, "/properties/a\x1f"),
        ({"required": ["a", "\x0e"]}, "/required/1"),
        ({"required": "a"}, "/required"),
        ({"minProperties": 2}, "/minProperties"),
        ({"additionalProperties": 3}, "/additionalProperties"),
        ({"anyOf": []}, "/anyOf"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "/oneOf/1"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "/oneOf/1"),
        ({"properties": {"a": {"$id": "x"}}}, "/properties/a/$id"),
        ({"properties": {"a": {"properties": {f"p{i}": {} for i in range(2000)}}}}, "/properties/a/properties"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "/minimum"),
        ({"items": {"items": {"type": "number", "minimum": 9, "exclusiveMaximum": 9}}}, "/items/items/minimum"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "/exclusiveMinimum"),
        ({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13}, "/multipleOf"),
        ({"type": "integer", "multipleOf": 1.5, "minimum": 1, "maximum": 2.75}, "/multipleOf"),
        ({"type": ["integer"], "exclusiveMinimum": 1, "minimum": 1, "maximum": 1}, "/exclusiveMinimum"),
        ({"anyOf": [{"type": "string", "const": 5}, {}]}, "/anyOf/0/const"),
        ({"type": ["integer", "null"], "enum": ["a", 1.5, True]}, "/enum"),
        # Of no place in particular.
        ({"$ref": "#"}, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}}, "/$defs/a"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ""),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, ""),
        (False, ""),
        (3, ""),
    ],
)  # fmt: skip
def test_so_01_a_schema_that_cannot_be_kept_is_refused_by_its_place(schema: object, at: str) -> None:
    error = refusal(schema)
    assert error.field == f"schema{at}"
    assert str(error).startswith(error.field)


def test_so_01_the_place_of_a_long_name_is_cut() -> None:
    schema = {"properties": {"k" * 100_000: {"properties": {f"p{i}": {} for i in range(1000)} | {"": 3}}}}
    error = refusal(schema)
    assert error.field is not None
    assert error.field.startswith("schema/properties/kkk")
    assert len(error.field) <= len("schema") + 300
    assert len(str(error)) < 1000


def test_so_04_patterns_of_keys_that_mean_the_same_both_hold() -> None:
    tokenizer, compiler = vocabulary("byte-level")
    patterns = {r"^\d$": {"type": "integer"}, "^[0-9]$": {"minimum": 5}}
    compiled = compiler.compile(form({"type": "object", "patternProperties": patterns}))
    for text, is_valid in (('{"1":7}', True), ('{"1":3}', False), ('{"1":"x"}', False)):
        matcher = compiled.start()
        assert all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False))) == is_valid


def crossed(size: int) -> dict[str, Any]:
    names = [f"p{i}" for i in range(size)]
    one, other = (
        {
            "type": "object",
            "properties": {key: {"$ref": f"#/$defs/{name}"} for key in names},
            "required": names,
        }
        for name in "de"
    )
    return {"oneOf": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"}], "$defs": {"d": one, "e": other}}


@pytest.mark.parametrize(
    "schema",
    [
        crossed(8),
        crossed(60),
        crossed(1000),
        {"oneOf": [{"type": "object", "minProperties": i % 2} for i in range(3000)]},
        {"oneOf": [{"allOf": [{"anyOf": [{"const": i}]}]} for i in range(2000)]},
    ],
)
def test_so_03_alternatives_that_take_too_long_to_compare_are_refused(schema: dict[str, Any]) -> None:
    start = time.process_time()
    error = refusal(schema)
    assert time.process_time() - start < 3
    assert str(error.field).startswith("schema/oneOf")


def test_so_03_many_alternatives_with_a_value_of_their_own_are_told_apart_at_once() -> None:
    kinds = [
        {"type": "object", "properties": {"k": {"const": k}, "v": _INTEGER}, "required": ["v", "k"]}
        for k in range(1000)
    ]
    for options in (kinds, [{"const": value} for value in range(5000)], [*kinds[:300], *range(300)]):
        schemas = [option if isinstance(option, dict) else {"const": option} for option in options]
        start = time.process_time()
        prepare_schema({"oneOf": schemas}, max_depth=64)
        assert time.process_time() - start < 1
        assert refusal({"oneOf": [*schemas, schemas[7]]}).field == f"schema/oneOf/{len(schemas)}"


@pytest.mark.parametrize("text", ["{", "", "{]", '{"a": 1, "a": 2}', "NaN", '{"enum": [1e999]}', '"\\ud800"'])
def test_so_01_a_schema_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^guided_json is no JSON: "):
        vocabulary("byte-level")[1].compile(StructuredOutput("json_schema", text, field="guided_json"))


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chosen(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}, "v": schema}, "required": ["k", "v"]}
                for k in (1, 2)
            ]
        }
    return schema


def test_so_03_depth_and_size_are_bounded() -> None:
    _, compiler = vocabulary("byte-level")
    assert compiler.compile(form(nested(28)))
    assert compiler.compile(form(chosen(4)))
    assert "levels deep" in str(refusal(nested(40)))
    assert "levels deep" in str(refusal(nested(60)))
    assert "bytes" in str(refusal(chosen(12)))
    assert "bytes" in str(refusal({"description": "x" * 2_000_000}))


def test_so_03_a_form_that_waits_for_others_is_not_at_fault() -> None:
    tokenizer, _ = vocabulary("byte-level")
    compiler = GrammarCompiler(
        tokenizer, tokenizer.vocab_size, limits=GrammarLimits(deadline_seconds=1.0, num_threads=1)
    )
    compiler.warm_up()
    endless = form({"allOf": [{"pattern": f"a{i}.*b"} for i in range(40)]})
    simple = form({"type": "integer"})
    with ThreadPoolExecutor(1) as other:
        refused = other.submit(compiler.compile, endless)
        time.sleep(0.3)
        with contextlib.suppress(OverloadedError):
            compiler.compile(simple)
        with pytest.raises(RequestError) as error:
            refused.result()
    assert error.value.code == "grammar_too_complex"
    assert compiler.compile(simple)
    compiler.close()


@pytest.mark.parametrize(
    ("blanks", "num_taken"),
    [("\t" * 20, 8), ("\n" + "\t" * 20, 9), ("\r\n\t\t", 4), ("\n\n", 1), ("\n\t\t\n", 3), ("\t\n", 1)],
)
def test_so_02_white_space_ends(blanks: str, num_taken: int) -> None:
    tokenizer, compiler = vocabulary("byte-level")
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    for output in (StructuredOutput("json_object"), form(schema)):
        matcher = compiler.compile(output).start()
        for char in '{"a":[1]}':
            (token_id,) = tokenizer.encode(char, add_special_tokens=False)
            assert matcher.accept(token_id)
            if char in "{[:,":
                taken = 0
                for blank in blanks:
                    (token_id,) = tokenizer.encode(blank, add_special_tokens=False)
                    if not matcher.accept(token_id):
                        break
                    taken += 1
                assert taken == num_taken, char
        assert matcher.is_finished


def test_so_02_strings_keep_their_white_space() -> None:
    tokenizer, compiler = vocabulary("byte-level")
    in_string = compiler.compile(form({"type": "string"})).start()
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    (space,) = tokenizer.encode(" ", add_special_tokens=False)
    assert all(map(in_string.accept, [quote, *[space] * 100, quote]))
    assert in_string.is_finished


def chain(length: int) -> dict[str, Any]:
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(length)
    }
    return {"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def test_so_01_what_would_bring_the_compiler_down_is_refused() -> None:
    rules = "\n".join(f'a{i}: "x" a{i + 1}' for i in range(6000))
    for form_ in (form(chain(450)), StructuredOutput("grammar", f'start: a0\n{rules}\na6000: "x"')):
        with pytest.raises(RequestError, match="nested too deeply"):
            vocabulary("byte-level")[1].compile(form_)
    assert vocabulary("byte-level")[1].compile(form(chain(40)))
    assert "more than 500 definitions" in str(refusal(chain(600)))


def test_so_03_a_compilation_without_end_is_ended() -> None:
    tokenizer, _ = vocabulary("byte-level")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, limits=GrammarLimits(deadline_seconds=1.0))
    compiler.warm_up()
    assert compiler.compile(form({"type": "integer", "multipleOf": 101}))
    with pytest.raises(RequestError, match=r"too long|longer than 1 s"):
        compiler.compile(form({"allOf": [{"pattern": f"a{i}.*b"} for i in range(40)]}))
    assert compiler.compile(form({"type": "integer", "multipleOf": 103}))
    compiler.close()
    with pytest.raises(RuntimeError):
        compiler.compile(form({"type": "integer", "multipleOf": 7}))
