"""Questions about prepared schemas: do two share no value, and is there a finite value at all?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any] | bool

_ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def are_disjoint(one: Schema, other: Schema, definitions: Mapping[str, Schema], num_levels: int = 16) -> bool:
    """Whether no value is valid under both, as far as types, `enum` and required properties tell.

    Looks through `num_levels` of references, alternatives and properties.
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is False or other is False
    if not num_levels:
        return False
    if not _types(one) & _types(other):
        return True
    values, other_values = _literals(one), _literals(other)
    if values is not None and other_values is not None and not values & other_values:
        return True

    def differ(part: Schema, against: Schema) -> bool:
        return are_disjoint(part, against, definitions, num_levels - 1)

    for schema, against in ((one, other), (other, one)):
        if "$ref" in schema and differ(definitions[_name(schema)], against):
            return True
        if "anyOf" in schema and all(differ(option, against) for option in schema["anyOf"]):
            return True
        if any(differ(part, against) for part in schema.get("allOf", ())):
            return True
    if _types(one) & _types(other) != {"object"}:
        return False
    properties, other_properties = one.get("properties", {}), other.get("properties", {})
    return any(
        differ(properties[name], other_properties[name])
        for name in {*one.get("required", ()), *other.get("required", ())}
        if name in properties and name in other_properties
    )


def _name(schema: Mapping[str, Any]) -> str:
    reference: str = schema["$ref"]
    return reference.rpartition("/")[2]


def can_end(root: Schema, definitions: Mapping[str, Schema]) -> bool:
    """Whether a finite value exists: no property or item that must be there needs itself within itself."""
    finite: set[str] = set()
    while True:
        found = {
            name for name, schema in definitions.items() if name not in finite and _is_finite(schema, finite)
        }
        if not found:
            return _is_finite(root, finite)
        finite |= found


def _is_finite(schema: Schema, finite: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if schema.get("enum") == []:
        return False
    if "$ref" in schema and _name(schema) not in finite:
        return False
    if not all(_is_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_is_finite(option, finite) for option in schema["anyOf"]):
        return False
    types = _types(schema)
    if types == {"object"}:
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        return all(
            _is_finite(properties.get(name, True if "patternProperties" in schema else rest), finite)
            for name in schema.get("required", ())
        )
    if types == {"array"}:
        prefix = schema.get("prefixItems", [])
        size = schema.get("minItems", 0)
        needed = [*prefix[:size], *([schema.get("items", True)] if size > len(prefix) else [])]
        return all(_is_finite(item, finite) for item in needed)
    return True


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    if named is not None:
        names = [named] if isinstance(named, str) else named
        return frozenset("number" if name == "integer" else name for name in names)
    if "enum" in schema:
        return frozenset(map(_type_of, schema["enum"]))
    return _ALL_TYPES


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _literals(schema: dict[str, Any]) -> set[str] | None:
    if "enum" not in schema:
        return None
    return {json.dumps(_canonical(value), sort_keys=True) for value in schema["enum"]}


def _canonical(value: Any) -> Any:
    """1 and 1.0 are one number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value
