"""JSON schemas of users, made ready for llguidance: what it would ignore or get wrong is refused or rewritten.

The dialect is JSON Schema 2020-12, with these bounds:

- every keyword is an annotation, or honoured, or refused; names that are no keyword are refused too (`x-...` is an
  annotation), for a misspelt one must not go unnoticed;
- `$ref` points into the schema itself (`#`, `#/...`), and never back to itself without an object or array between;
- bounds that leave no number, and literal values of another type than the one beside them, are mistakes;
- `oneOf` needs alternatives that are told apart by type, by `const` or `enum`, or by such a property that is required;
- objects have their properties in the order of the schema.

Objects of different form may not be told apart by `minProperties`: the grammar cannot count different keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from .formats import FORMATS, LIBRARY_FORMATS
from .patterns import PatternError, search_regex
from .place import Place, read_pointer
from .schema_choice import Comparisons, ComparisonsExceeded, can_end
from .schema_values import SchemaError, check_number, check_range, check_text, check_types, check_value

Schema = dict[str, Any] | bool

MAX_NUM_NODES = 20_000
MAX_NUM_REFERENCES = 500  # to different places
MAX_NUM_PROPERTIES = 1500
"""Of one object, or fewer in many: the time to compile grows with the sum of squares."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ANNOTATIONS = frozenset(
    {"$schema", "$comment", "$defs", "definitions", "title", "description", "default", "example", "examples"}
    | {"deprecated", "readOnly", "writeOnly"}
)


def prepare_schema(schema: object, *, max_depth: int) -> dict[str, Any]:
    """A schema of the same values that llguidance honours whole. Raises `SchemaError`."""
    reader = _Reader(schema, max_depth)
    root = reader.read(schema, Place())
    reader.read_definitions()
    reader.check_cycles()
    reader.check_choices()
    if isinstance(root, bool):
        root = {} if root else {"enum": []}
    if not can_end(root, reader.definitions):
        raise SchemaError(Place(), "the schema allows no value that ever ends")
    return root | ({"$defs": reader.definitions} if reader.definitions else {})


class _Reader:
    def __init__(self, root: object, max_depth: int) -> None:
        self._root = root
        self._max_depth = max_depth
        self._num_nodes = 0
        self._num_squares = 0
        self._names: dict[str, str] = {}  # of definitions, by the pointer that they stand for
        self._in_place: dict[str, set[str]] = {}  # pointer -> pointers that describe the very same value
        self._edges: set[str] = set()  # those of what is being read
        self._choices: list[tuple[Place, list[Schema]]] = []
        self.definitions: dict[str, Schema] = {}

    def read(self, schema: object, place: Place) -> Schema:
        self._num_nodes += 1
        if self._num_nodes > MAX_NUM_NODES:
            raise SchemaError(place, f"more than {MAX_NUM_NODES} subschemas")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(place, "a schema must be an object or a boolean")
        if place.depth > self._max_depth:
            raise SchemaError(place, f"nested more than {self._max_depth} levels deep")
        result: dict[str, Any] = {}
        in_place: list[dict[str, Any]] = []
        for key, value in schema.items():
            at = place / key
            if key in _IN_PLACE:
                in_place.append(_IN_PLACE[key](self, value, at))
            elif key in _PLAIN:
                result |= _PLAIN[key](self, value, at)
            elif not self._is_annotation(key, schema, place):
                raise SchemaError(at, _refusal(key))
        self._settle(result, place, schema)
        # Behind the plain ones, for those must stand together. Where two became one keyword, both hold.
        all_of: list[Schema] = result.pop("allOf", [])
        for part in in_place:
            if "allOf" in part:
                all_of += part["allOf"]
            elif part.keys() & result.keys():
                all_of.append(part)
            else:
                result |= part
        return result | ({"allOf": all_of} if all_of else {})

    def read_definitions(self) -> None:
        """Read what references point at, and what those point at."""
        while pending := [pointer for pointer in self._names if pointer not in self._in_place]:
            for pointer in pending:
                place = read_pointer(pointer)
                self._edges = self._in_place[pointer] = set()
                self.definitions[self._names[pointer]] = self.read(self._target(place, place), place)

    def check_choices(self) -> None:
        """`oneOf` stands as `anyOf` in what was read; so no two alternatives may share a value."""
        comparisons = Comparisons(self.definitions)
        for at, options in self._choices:
            try:
                common = comparisons.find_common(options)
            except ComparisonsExceeded:
                raise SchemaError(
                    at,
                    "telling its alternatives apart takes too long; give each another const of one required "
                    "property, or use anyOf",
                ) from None
            if common is not None:
                raise SchemaError(
                    at / common[1],
                    f"it may share values with alternative {common[0]}; tell them apart by type, or by the "
                    "const or enum of a required property, or use anyOf",
                )

    def check_cycles(self) -> None:
        """A reference that comes back to itself describes no value."""
        state: dict[str, int] = {}  # 1: on the way, 2: known to end
        for start in self._in_place:
            stack = [(start, iter(self._in_place[start]))]
            if state.setdefault(start, 1) == 2:
                continue
            while stack:
                pointer, following = stack[-1]
                target = next(following, None)
                if target is None:
                    state[pointer] = 2
                    stack.pop()
                elif state.get(target) == 1:
                    raise SchemaError(read_pointer(target), "a $ref that leads back to itself")
                elif state.get(target) is None:
                    state[target] = 1
                    stack.append((target, iter(self._in_place.get(target, ()))))

    def _is_annotation(self, key: str, schema: Mapping[str, object], place: Place) -> bool:
        if key == "$id":
            return place.parent is None
        if key == "discriminator":
            return "oneOf" in schema or "anyOf" in schema
        return key in _ANNOTATIONS or key.startswith("x-") or (key == "uniqueItems" and schema[key] is False)

    def _settle(self, plain: dict[str, Any], place: Place, schema: Mapping[str, object]) -> None:
        """What several keywords decide together."""
        for low, high in (
            ("minLength", "maxLength"),
            ("minItems", "maxItems"),
            ("minProperties", "maxProperties"),
        ):
            if low in plain and plain[low] > plain.get(high, plain[low]):
                raise SchemaError(place / low, f"it is above {high}")
        check_range(plain, place)
        check_types(plain, place, schema)
        named = len(plain.get("required", ()))
        if plain.get("minProperties", 0) > named + 1:
            raise SchemaError(
                place / "minProperties", "at most one more than the required properties can be promised"
            )
        known = FORMATS.get(str(schema.get("format")))
        if known is not None:
            if "pattern" in plain:
                plain["allOf"] = [{"type": "string", "pattern": f"^(?:{known})$"}]
                if schema.get("type") != "string":
                    raise SchemaError(place / "format", 'with a pattern it needs "type": "string"')
            else:
                plain["pattern"] = f"^(?:{known})$"

    # -- keywords that describe the same value

    def ref(self, value: object, at: Place) -> dict[str, Any]:
        if not isinstance(value, str):
            raise SchemaError(at, "it must be a string")
        if value != "#" and not value.startswith("#/"):
            raise SchemaError(
                at, f"{value[:80]!r} is outside the schema; only '#' and '#/...' can be followed"
            )
        target = "".join(f"/{part}" for part in unquote(value[1:]).split("/")[1:])
        if target.count("/") > self._max_depth:
            raise SchemaError(at, f"it points more than {self._max_depth} levels deep")
        self._target(read_pointer(target), at)
        self._edges.add(target)
        name = self._names.setdefault(target, f"d{len(self._names)}")
        if len(self._names) > MAX_NUM_REFERENCES:
            raise SchemaError(at, f"more than {MAX_NUM_REFERENCES} definitions")
        return {"$ref": f"#/$defs/{name}"}

    def all_of(self, value: object, at: Place) -> dict[str, Any]:
        return {"allOf": self._list(value, at)}

    def any_of(self, value: object, at: Place) -> dict[str, Any]:
        return {"anyOf": self._list(value, at)}

    def one_of(self, value: object, at: Place) -> dict[str, Any]:
        options = self._list(value, at)
        self._choices.append((at, options))
        return {"anyOf": options}

    def enum(self, value: object, at: Place) -> dict[str, Any]:
        if not isinstance(value, list) or not value:
            raise SchemaError(at, "it must be a list of at least one value")
        for index, item in enumerate(value):
            check_value(item, at / index, self._max_depth)
        return {"enum": value}

    def const(self, value: object, at: Place) -> dict[str, Any]:
        check_value(value, at, self._max_depth)
        return {"enum": [value]}

    # -- keywords of one type

    def type(self, value: object, at: Place) -> dict[str, Any]:
        names = value if isinstance(value, list) else [value]
        if not names:
            raise SchemaError(at, "it must name at least one type")
        for name in names:
            if name not in _TYPES:
                raise SchemaError(at, f"{str(name)[:64]!r} is no type; the types are {', '.join(_TYPES)}")
        return {"type": value if isinstance(value, str) else list(dict.fromkeys(names))}

    def count(self, value: object, at: Place) -> dict[str, Any]:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise SchemaError(at, f"it must be an integer from 0 to {2**31 - 1}")
        return {at.key: value}

    def bound(self, value: object, at: Place) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SchemaError(at, "it must be a number")
        check_number(value, at)
        return {at.key: value}

    def multiple_of(self, value: object, at: Place) -> dict[str, Any]:
        self.bound(value, at)
        assert isinstance(value, (int, float))
        if value <= 0:
            raise SchemaError(at, "it must be above 0")
        if Fraction(value) != Fraction(str(value)):
            raise SchemaError(
                at,
                "only a whole number or a sum of 1/2, 1/4, 1/8 ... is exact in binary; for cents use integers",
            )
        return {"multipleOf": value}

    def pattern(self, value: object, at: Place) -> dict[str, Any]:
        return {"pattern": _pattern(value, at)}

    def format(self, value: object, at: Place) -> dict[str, Any]:
        if not isinstance(value, str):
            raise SchemaError(at, "it must be a string")
        if value in FORMATS:
            return {}  # becomes a pattern
        if value not in LIBRARY_FORMATS:
            names = ", ".join(sorted({*FORMATS, *LIBRARY_FORMATS}))
            raise SchemaError(at, f"the format {value[:64]!r} cannot be honoured; there is {names}")
        return {"format": value}

    def items(self, value: object, at: Place) -> dict[str, Any]:
        if isinstance(value, list):
            raise SchemaError(at, "a list of schemas is the form of older drafts; write it as prefixItems")
        return {"items": self._below(value, at)}

    def prefix_items(self, value: object, at: Place) -> dict[str, Any]:
        return {
            "prefixItems": [
                self._below(item, at / index) for index, item in enumerate(self._options(value, at))
            ]
        }

    def properties(self, value: object, at: Place) -> dict[str, Any]:
        members = self._members(value, at)
        for key in members:
            check_text(key, at / key)
        return {"properties": members}

    def pattern_properties(self, value: object, at: Place) -> dict[str, Any]:
        patterns: dict[str, Schema] = {}
        for key, member in self._members(value, at).items():
            pattern = _pattern(key, at / key)
            known = patterns.get(pattern)  # of a key that means the same
            patterns[pattern] = member if known is None else {"allOf": [known, member]}
        return {"patternProperties": patterns}

    def additional_properties(self, value: object, at: Place) -> dict[str, Any]:
        return {"additionalProperties": self._below(value, at)}

    def required(self, value: object, at: Place) -> dict[str, Any]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise SchemaError(at, "it must be a list of names")
        self._count_names(len(value), at)
        for index, name in enumerate(value):
            check_text(name, at / index)
        return {"required": list(dict.fromkeys(value))}

    # -- what they share

    def _count_names(self, count: int, at: Place) -> None:
        self._num_squares += count * count
        if (
            count > MAX_NUM_PROPERTIES or self._num_squares > 2 * MAX_NUM_PROPERTIES**2
        ):  # `properties` and `required`
            raise SchemaError(
                at, f"more than {MAX_NUM_PROPERTIES} properties, or too many in several objects"
            )

    def _members(self, value: object, at: Place) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise SchemaError(at, "it must be an object of schemas")
        self._count_names(len(value), at)
        return {key: self._below(member, at / key) for key, member in value.items()}

    def _below(self, value: object, at: Place) -> Schema:
        """A schema of a part of the value: references in it may lead anywhere."""
        edges, self._edges = self._edges, set()
        schema = self.read(value, at)
        self._edges = edges
        return schema

    def _list(self, value: object, at: Place) -> list[Schema]:
        return [self.read(option, at / index) for index, option in enumerate(self._options(value, at))]

    def _options(self, value: object, at: Place) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise SchemaError(at, "it must be a list of at least one schema")
        return value

    def _target(self, place: Place, at: Place) -> Any:
        """What stands at `place`; `at` is who asks."""
        if place.parent is None:
            return self._root
        value, key = self._target(place.parent, at), place.key
        if isinstance(value, dict) and key in value:
            return value[key]
        if isinstance(value, list) and key.isdecimal() and len(key) < 8 and int(key) < len(value):
            return value[int(key)]
        raise SchemaError(at, f"nothing stands at '#{place}'")


_IN_PLACE: Mapping[str, Callable[[_Reader, object, Place], dict[str, Any]]] = {
    "$ref": _Reader.ref,
    "allOf": _Reader.all_of,
    "anyOf": _Reader.any_of,
    "oneOf": _Reader.one_of,
    "enum": _Reader.enum,
    "const": _Reader.const,
}
_PLAIN: Mapping[str, Callable[[_Reader, object, Place], dict[str, Any]]] = {
    "type": _Reader.type,
    "minLength": _Reader.count,
    "maxLength": _Reader.count,
    "minItems": _Reader.count,
    "maxItems": _Reader.count,
    "minProperties": _Reader.count,
    "maxProperties": _Reader.count,
    "minimum": _Reader.bound,
    "maximum": _Reader.bound,
    "exclusiveMinimum": _Reader.bound,
    "exclusiveMaximum": _Reader.bound,
    "multipleOf": _Reader.multiple_of,
    "pattern": _Reader.pattern,
    "format": _Reader.format,
    "items": _Reader.items,
    "prefixItems": _Reader.prefix_items,
    "properties": _Reader.properties,
    "patternProperties": _Reader.pattern_properties,
    "additionalProperties": _Reader.additional_properties,
    "required": _Reader.required,
}


def _pattern(value: object, at: Place) -> str:
    if not isinstance(value, str):
        raise SchemaError(at, "it must be a string")
    try:
        return f"^(?:{search_regex(value)})$"
    except PatternError as error:
        raise SchemaError(at, str(error)) from None


def _refusal(key: str) -> str:
    return f"the keyword {key[:64]!r} is not supported; leave it out"
