"""JSON schemas of mixed difficulty that structured output honours, by name."""

from __future__ import annotations

from typing import Any

_NAME = {"type": "string", "maxLength": 12}
_POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def _closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object of exactly these properties, all required unless told which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _kind(name: str, **properties: Any) -> dict[str, Any]:
    return _closed(kind={"const": name}, **properties)


SCHEMAS: dict[str, Any] = {
    "any": {},
    "true": True,
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": {"type": "string"},
    "several types": {"type": ["integer", "null", "string"]},
    "annotations": {
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [1],
        "x-origin": 1,
        "type": "integer",
    },
    # Numbers.
    "range": {"type": "integer", "minimum": -7, "maximum": 130},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    "both minima": {"type": "integer", "minimum": 3, "exclusiveMinimum": 3, "maximum": 9},
    "fraction range": {"type": "number", "minimum": 0.25, "exclusiveMaximum": 1.5},
    "negative range": {"type": "number", "minimum": -2.5, "maximum": -1.25},
    "large maximum": {"type": "integer", "maximum": 20000000000},
    "large minimum": {"type": "integer", "minimum": 9007199254740000},
    "fraction bounds of an integer": {"type": "integer", "minimum": 0.5, "maximum": 3.5},
    "multiple of": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "multiple of a fraction": {"type": "number", "multipleOf": 0.5},
    "bounds without a type": {"minimum": 3, "maximum": 5},
    "no number but null": {"type": ["integer", "null"], "minimum": 5, "maximum": 2},
    "one whole number": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    "one multiple": {"type": "integer", "multipleOf": 7, "minimum": 7, "maximum": 7},
    "a whole multiple of a fraction": {"type": "integer", "multipleOf": 1.5, "minimum": 3, "maximum": 3},
    "negative multiples": {"type": "integer", "multipleOf": 4, "exclusiveMinimum": -8, "maximum": -4},
    "a whole constant": {"type": "integer", "const": 1.0},
    # Strings.
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "fixed length": {"type": "string", "minLength": 4, "maxLength": 4},
    "lengths without a type": {"minLength": 2, "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]+$"},
    "pattern within": {"type": "string", "pattern": "b[aeiou]d", "maxLength": 6},
    "pattern of alternatives": {"type": "string", "pattern": "^ab|cd$|^$", "maxLength": 5},
    "pattern of classes": {"type": "string", "pattern": r"^\w+\s\d{2}[^\W\d]\.[\u00e4-\u00ff\]\-]$"},
    "pattern with a length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    "pattern within, with a length": {"type": "string", "pattern": "[0-9]", "minLength": 4, "maxLength": 6},
    "pattern without a type": {"pattern": "^x+$"},
    "pattern of quotes and escapes": {"type": "string", "pattern": r'^["\\/\n\t]{3}$'},
    "pattern of what Rust reads otherwise": {"type": "string", "pattern": "^[a&&b[:x~~]+[--/]$"},
    "dot": {"type": "string", "pattern": "^.{3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri"},
    "format with a length": {"type": "string", "format": "email", "maxLength": 12, "minLength": 9},
    "format with a pattern": {"type": "string", "format": "date", "pattern": "^20"},
    "library's format with a pattern": {
        "type": "string",
        "format": "ipv6",
        "pattern": "^[0-9:]+$",
        "maxLength": 20,
    },
    "format without a type": {"format": "date"},
    # Values.
    "const": {"const": {"a": [1, None, "x"], "b": 2.5}},
    "const of odd text": {"const": 'quote " slash \\ tab \t é 日本 \U0001f600'},
    "enum": {"enum": ["red", "green", 3, None, True, [1, {"a": 2}]]},
    "enum with a type": {"type": "string", "enum": ["a", "ab", 3, "abc"]},
    "enum and bounds": {"enum": [1, 5, 9, "x"], "minimum": 4},
    "enum of floats": {"enum": [0.1, 1e-7, 1.0, -2.75, 9007199254740992]},
    # Arrays.
    "array": {"type": "array", "items": {"type": "boolean"}},
    "array lengths": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    "tuple and more": {
        "prefixItems": [{"const": 1}],
        "items": {"type": "null"},
        "type": "array",
        "maxItems": 3,
    },
    "short tuple": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
    "not unique": {"type": "array", "items": {"const": 1}, "uniqueItems": False, "maxItems": 3},
    "items without a type": {"items": {"type": "integer"}, "minItems": 1},
    # Objects.
    "object": {"type": "object"},
    "required and optional": _closed(["a", "c"], a={"type": "integer"}, b=_NAME, c={"type": "null"}),
    "only optional": _closed([], a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"}),
    "open object": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "map of one or more": {
        "type": "object",
        "additionalProperties": _NAME,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "required without properties": {"type": "object", "required": ["a", "b"], "additionalProperties": _NAME},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "integer"}, "^y": {"type": "null"}},
        "additionalProperties": False,
    },
    "pattern and named properties": {
        "type": "object",
        "properties": {"xa": {"maximum": 5}, "b": {"type": "null"}},
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
        "required": ["xa"],
    },
    "odd keys": _closed(**{'a"b\\c\n': {"type": "null"}, "é~/": {"type": "null"}, "": {"type": "null"}}),
    "properties without a type": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "nested": _closed(a=_closed(b=_closed(c={"type": "array", "items": _POINT, "maxItems": 2}))),
    # Combinations.
    "any of": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}, _POINT]},
    "any of with siblings": {
        "type": "object",
        "required": ["a"],
        "anyOf": [_closed(a=_NAME), _closed(a={"const": 1})],
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}, {"multipleOf": 2}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 5}, "b": {"type": "null"}}, "required": ["b"]},
        ],
        "properties": {"c": {"type": "boolean"}},
    },
    "any of and one of": {
        "anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
        "oneOf": [{"minimum": 3, "type": "integer"}, {"type": "string", "minLength": 2}],
    },
    "enum and const": {"enum": [1, 2], "const": 2},
    "all of strings": {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 4}]},
    "closed before all of": {
        "additionalProperties": False,
        "allOf": [{"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}],
        "properties": {"a": {}},
        "type": "object",
    },
    "one of types": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"type": "null"}]},
    "one of kinds": {"oneOf": [_kind("a", v={"type": "integer"}), _kind("b", w=_NAME), _kind("c")]},
    "one of numbers": {"oneOf": [_closed(v={"const": 1}), _closed(v={"enum": [2, 3]})]},
    "one of references": {
        "$defs": {"A": _kind("a", v={"$ref": "#/$defs/N"}), "B": _kind("b"), "N": {"type": "integer"}},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind"},
    },
    # References.
    "reference": {"$defs": {"p": _POINT}, "type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2},
    "old definitions": {"definitions": {"a b/c": {"type": "null"}}, "$ref": "#/definitions/a%20b~1c"},
    "reference with siblings": {
        "$defs": {"i": {"type": "integer"}},
        "$ref": "#/$defs/i",
        "minimum": 5,
        "maximum": 7,
    },
    "reference into properties": _closed(a={"type": "integer", "maximum": 3}, b={"$ref": "#/properties/a"}),
    "tree": {
        "$defs": {
            "n": _closed(["v"], v={"type": "integer"}, c={"type": "array", "items": {"$ref": "#/$defs/n"}})
        },
        "$ref": "#/$defs/n",
    },
    "list": {"anyOf": [{"type": "null"}, _closed(head={"type": "integer"}, tail={"$ref": "#"})]},
    "expression": {
        "$defs": {
            "lit": _kind("lit", value={"type": "integer"}),
            "add": _kind("add", left={"$ref": "#/$defs/e"}, right={"$ref": "#/$defs/lit"}),
            "e": {"oneOf": [{"$ref": "#/$defs/lit"}, {"$ref": "#/$defs/add"}]},
        },
        "$ref": "#/$defs/e",
    },
    "direct recursion of kinds": {
        "$defs": {
            "lit": _kind("lit", value={"type": "integer"}),
            "neg": _kind("neg", of={"oneOf": [{"$ref": "#/$defs/lit"}, {"$ref": "#/$defs/neg"}]}),
        },
        "oneOf": [{"$ref": "#/$defs/lit"}, {"$ref": "#/$defs/neg"}],
    },
    "many optional": _closed(
        [], **{f"p{i}": {"type": ["string", "integer", "null"], "maxLength": 3} for i in range(40)}
    ),
}
