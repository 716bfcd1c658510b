"""Questions about prepared schemas: do two share no value, and is there a finite value at all?"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .schema_values import type_of

Schema = dict[str, Any] | bool

_ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


MAX_NUM_COMPARISONS = 100_000
"""Of one schema; as many take half a second or so."""

_MAX_DEPTH = 64
_MAX_NUM_REFERENCES = 16


class ComparisonsExceeded(Exception):
    """There is too much to compare."""


class Comparisons:
    """Which schemas share no value, as far as types, `enum` and required properties tell.

    Of prepared schemas and the `definitions` that they refer to, none of which may change: answers are kept by their
    identities. Raises `ComparisonsExceeded`, all questions together.
    """

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._budget = MAX_NUM_COMPARISONS
        self._answers: dict[tuple[int, int], bool] = {}
        self._depth = 0
        self._types: dict[int, frozenset[str]] = {}
        self._literals: dict[int, frozenset[str] | None] = {}

    def find_common(self, options: Sequence[Schema]) -> tuple[int, int] | None:
        """Two indices, the lower one first, of options that may share a value."""
        for one, other in self._doubtful(options):
            self._spend(1)
            if not self.are_disjoint(options[one], options[other]):
                return min(one, other), max(one, other)
        return None

    def are_disjoint(self, one: Schema, other: Schema) -> bool:
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        key = (id(one), id(other)) if id(one) < id(other) else (id(other), id(one))
        if key not in self._answers:
            self._spend(1)
            if self._depth >= _MAX_DEPTH:
                return False
            self._answers[key] = False  # while it is looked into: nothing is told apart by itself
            self._depth += 1
            self._answers[key] = self._differ(one, other)
            self._depth -= 1
        return self._answers[key]

    def _differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        types = self._types_of(one) & self._types_of(other)
        if not types:
            return True
        values, other_values = self._literals_of(one), self._literals_of(other)
        if values is not None and other_values is not None:
            self._spend(min(len(values), len(other_values)) // 16)
            if values.isdisjoint(other_values):
                return True
        for schema, against in ((one, other), (other, one)):
            if "$ref" in schema and self.are_disjoint(self._definitions[_name(schema)], against):
                return True
            if "anyOf" in schema and all(self.are_disjoint(option, against) for option in schema["anyOf"]):
                return True
            if any(self.are_disjoint(part, against) for part in schema.get("allOf", ())):
                return True
        if types != {"object"}:
            return False
        properties, other_properties = one.get("properties", {}), other.get("properties", {})
        required = {*one.get("required", ()), *other.get("required", ())}
        self._spend(len(required) // 16)
        return any(
            self.are_disjoint(properties[name], other_properties[name])
            for name in required
            if name in properties and name in other_properties
        )

    def _doubtful(self, options: Sequence[Schema]) -> Iterator[tuple[int, int]]:
        """The pairs that are not told apart by their values, or by those of one required property of objects."""
        values = {
            index: found
            for index, option in enumerate(options)
            if (found := self._values(option)) is not None
        }
        kinds = [
            {} if index in values else self._discriminators(option) for index, option in enumerate(options)
        ]
        counts = Counter(name for kind in kinds for name in kind)
        name = max(counts, key=counts.__getitem__, default="")
        tagged = {index: kind[name] for index, kind in enumerate(kinds) if name in kind}
        for group in (values, tagged):
            self._spend(sum(map(len, group.values())) // 16)
            yield from _sharing(group)
        rest = [index for index in range(len(options)) if index not in values and index not in tagged]
        yield from itertools.combinations(rest, 2)
        for one, other in itertools.combinations((list(values), list(tagged), rest), 2):
            if self._types_of_all(options, one) & self._types_of_all(options, other):
                yield from itertools.product(one, other)

    def _types_of_all(self, options: Sequence[Schema], indices: Sequence[int]) -> frozenset[str]:
        parts = (self._chain(options[index]) for index in indices)
        return frozenset().union(
            *(frozenset.intersection(*map(self._types_of, part)) if part else _ALL_TYPES for part in parts)
        )

    def _values(self, schema: Schema) -> frozenset[str] | None:
        """All values that may be valid, if they are listed."""
        return next(
            (found for part in self._chain(schema) if (found := self._literals_of(part)) is not None), None
        )

    def _discriminators(self, schema: Schema) -> dict[str, frozenset[str]]:
        """Of a schema of objects, the values of the required properties that list them, by name."""
        chain = self._chain(schema)
        if not any(self._types_of(part) == {"object"} for part in chain):
            return {}
        found: dict[str, frozenset[str]] = {}
        required = {name for part in chain for name in part.get("required", ())}
        self._spend(len(required) // 16)
        for part in chain:
            for name in required & part.get("properties", {}).keys():
                values = self._values(part["properties"][name])
                if values is not None:
                    found.setdefault(name, values)
        return found

    def _chain(self, schema: Schema) -> list[dict[str, Any]]:
        """The schema, that which it refers to, and so on: a value is valid under all of them."""
        chain: list[dict[str, Any]] = []
        while isinstance(schema, dict) and len(chain) < _MAX_NUM_REFERENCES:
            chain.append(schema)
            schema = self._definitions[_name(schema)] if "$ref" in schema else True
        return chain

    def _types_of(self, schema: dict[str, Any]) -> frozenset[str]:
        if id(schema) not in self._types:
            self._types[id(schema)] = _types(schema)
        return self._types[id(schema)]

    def _literals_of(self, schema: dict[str, Any]) -> frozenset[str] | None:
        if id(schema) not in self._literals:
            self._literals[id(schema)] = _literals(schema)
        return self._literals[id(schema)]

    def _spend(self, number: int) -> None:
        self._budget -= number
        if self._budget < 0:
            raise ComparisonsExceeded


def _sharing(values: Mapping[int, frozenset[str]]) -> Iterator[tuple[int, int]]:
    """The pairs that have a value in common."""
    owners: dict[str, list[int]] = {}
    for index, items in values.items():
        for item in items:
            others = owners.setdefault(item, [])
            yield from ((other, index) for other in others)
            others.append(index)


def _name(schema: Mapping[str, Any]) -> str:
    reference: str = schema["$ref"]
    return reference.rpartition("/")[2]


def can_end(root: Schema, definitions: Mapping[str, Schema]) -> bool:
    """Whether a finite value exists: no property or item that must be there needs itself within itself."""
    finite: set[str] = set()
    while True:
        size = len(finite)
        # What is found counts at once, and most definitions stand behind those that refer to them.
        for name, schema in reversed(list(definitions.items())):
            if name not in finite and _is_finite(schema, finite):
                finite.add(name)
        if len(finite) == size:
            return _is_finite(root, finite)


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
        return frozenset(map(type_of, schema["enum"]))
    return _ALL_TYPES


def _literals(schema: dict[str, Any]) -> frozenset[str] | None:
    if "enum" not in schema:
        return None
    return frozenset(json.dumps(_canonical(value), sort_keys=True) for value in schema["enum"])


def _canonical(value: Any) -> Any:
    """1 and 1.0 are one number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value
