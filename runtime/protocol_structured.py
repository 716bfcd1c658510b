"""The fields that ask for an output of a form: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

A call names one form at most. `strict` of a JSON schema changes nothing: the schema is always kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import RequestError
from .protocol_fields import Body
from .protocol_json import dump_json
from .structured import StructuredOutput

_KINDS = ("json", "regex", "choice", "grammar")
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


def structured_output(body: Body) -> StructuredOutput | None:
    """Raises `RequestError` naming the field."""
    forms = [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs)]
    for kind in _KINDS:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            forms.append(_form(kind, value, f"guided_{kind}"))
    if len(forms) > 1:
        names = " and ".join(form.field for form in forms[:2])
        raise RequestError(f"{names} ask for two forms of one output; send one of them", field=forms[1].field)
    return forms[0] if forms else None


def _response_format(value: object) -> Iterator[StructuredOutput]:
    if value is None:
        return
    if not isinstance(value, Mapping) or "type" not in value:
        raise RequestError("response_format must be an object with a type", field="response_format")
    kind = value["type"]
    if kind not in _FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_FORMATS)}, got {str(kind)[:64]!r}",
            field="response_format.type",
            code="unsupported_value",
        )
    _check_keys(value, {"type", "json_schema"} if kind == "json_schema" else {"type"}, "response_format")
    if kind == "json_object":
        yield StructuredOutput("json_object", field="response_format")
    if kind == "json_schema":
        wrapper = value.get("json_schema")
        field = "response_format.json_schema"
        if not isinstance(wrapper, Mapping):
            raise RequestError(f"{field} must be an object with a schema", field=field)
        _check_keys(wrapper, _SCHEMA_KEYS, field)
        if wrapper.get("schema") is None:
            raise RequestError(f"{field}.schema is required", field=f"{field}.schema")
        if not isinstance(wrapper.get("strict"), bool | None):
            raise RequestError(f"{field}.strict must be true or false", field=f"{field}.strict")
        yield _form("json", wrapper["schema"], f"{field}.schema")


def _structured_outputs(value: object) -> Iterator[StructuredOutput]:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise RequestError("structured_outputs must be an object", field="structured_outputs")
    _check_keys(value, {*_KINDS, "json_object"}, "structured_outputs")
    given = {
        kind: item
        for kind, item in value.items()
        if item is not None and (kind, item) != ("json_object", False)
    }
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs must have exactly one of {', '.join(_KINDS)} and json_object, got {len(given)}",
            field="structured_outputs",
        )
    ((kind, item),) = given.items()
    field = f"structured_outputs.{kind}"
    if kind == "json_object":
        if item is not True:
            raise RequestError(f"{field} must be true or false", field=field)
        yield StructuredOutput("json_object", field=field)
    else:
        yield _form(kind, item, field)


def _form(kind: str, value: object, field: str) -> StructuredOutput:
    if kind == "json":
        if isinstance(value, str):
            return StructuredOutput("json_schema", value, field=field)
        if not isinstance(value, Mapping | bool):
            raise RequestError(f"{field} must be a JSON schema: an object, or its text", field=field)
        return StructuredOutput("json_schema", dump_json(value).decode(), field=field)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RequestError(f"{field} must be a list of strings", field=field)
        return StructuredOutput("choice", choices=tuple(value), field=field)
    if not isinstance(value, str):
        raise RequestError(f"{field} must be a string", field=field)
    return StructuredOutput("regex" if kind == "regex" else "grammar", value, field=field)


def _check_keys(value: Mapping[str, object], known: frozenset[str] | set[str], field: str) -> None:
    for key in value:
        if key not in known:
            name = f"{field}.{key[:64]}"
            raise RequestError(f"{name} is not supported", field=name, code="unsupported_parameter")
