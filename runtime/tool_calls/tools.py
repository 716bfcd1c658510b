"""A tool that a model may call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..structured import Tag

_VALUES = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords of JSON Schema whose value is data, and whose value maps names to schemas."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function by name. `parameters` is the JSON schema of its arguments (None: it takes none); `field` is how the
    user named that, for errors.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    field: str = "parameters"

    @property
    def schema(self) -> dict[str, Any]:
        """A schema that only objects satisfy."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    @property
    def schema_text(self) -> str:
        return json.dumps(self.schema, ensure_ascii=False)

    def tag(self, begin: str, end: str) -> Tag:
        """The arguments alone, between `begin` and `end`."""
        return Tag(begin, self.schema_text, end, (("", self.field),))


def nested(schema: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """`schema` as it must read where it stands at `pointer` of a larger one: its own references are prefixed."""
    return {key: _nested(key, value, pointer) for key, value in schema.items()}


def _nested(key: str, value: Any, pointer: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return f"#{pointer}{value[1:]}"
    if key in _VALUES:
        return value
    if key in _BY_NAME and isinstance(value, Mapping):
        return {
            name: nested(each, pointer) if isinstance(each, Mapping) else each for name, each in value.items()
        }
    if isinstance(value, Mapping):
        return nested(value, pointer)
    if isinstance(value, list):
        return [nested(item, pointer) if isinstance(item, Mapping) else item for item in value]
    return value
