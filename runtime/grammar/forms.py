"""What users ask for, written as a grammar for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import gbnf_to_lark

from ...errors import RequestError
from ..protocol_json import JsonError, read_json
from ..structured import StructuredOutput
from .limits import GrammarLimits
from .patterns import PatternError, full_regex, literal_regex
from .schema import prepare_schema
from .schema_values import SchemaError
from .vocabulary import Vocabulary

MAX_NUM_CHOICES = 10_000
MAX_CHOICE_BYTES = 8 << 10
MAX_NUM_RULES = 1000
FIRST_TAG_LINE = 3
"""Of a grammar of tags: tag i is line `FIRST_TAG_LINE` + i."""

_WHITESPACE = r"(\x0D?\x0A[\x20\x09]{0,8}|[\x20\x09]{1,8})"
"""Between two tokens of JSON, at most once, a line's end with the next one's indentation, or blanks: a model that likes
them cannot go on with them for ever, and empty lines cost a token each.
"""

_ESCAPES = 'nrbtf\\"'
"""Behind a backslash in JSON strings. Without `\\u` no text has two spellings: llguidance tells the names of properties
from other keys by the spelling."""

# Possessive, and to the end of the line where nothing closes: every character of a long text is looked at once.
_IS_LARK = re.compile(r"^[^\S\n]*+\??start\s*+:(?!:)", re.MULTILINE)
# What Lark text can hold besides the names, operators and numbers of a grammar.
_LARK_QUOTED = re.compile(
    r'"(?:[^"\\\n]|\\.)*+(?:"i?|\\?$)|/(?![/*])(?:[^/\\\n]|\\.)++(?:/[imslux]*+|\\?$)|//[^\n]*+|#[^\n]*+',
    re.MULTILINE,
)
_EBNF_QUOTED = re.compile(
    r'"(?:[^"\\\n]|\\.)*+(?:"|\\?$)|\[(?:[^\]\\\n]|\\.)*+(?:\]|\\?$)|#[^\n]*+', re.MULTILINE
)
_LARK_REFUSED = re.compile(r"%(?!ignore\b)\w+|@\w+|<")


def write_grammar(output: StructuredOutput, vocabulary: Vocabulary, limits: GrammarLimits) -> str:
    """Raises `RequestError` naming the field and, in a schema, the place (a JSON pointer)."""
    _check_size(output, limits)
    if output.kind == "json_object":
        return _grammars("json_schema", _schema('{"type":"object"}', output.field, limits))
    if output.kind == "json_schema":
        return _grammars("json_schema", _schema(output.source, output.field, limits))
    if output.kind in ("regex", "grammar") and not output.source.strip():
        raise RequestError(f"{output.field}: it is empty", field=output.field)
    if output.kind == "regex":
        try:
            regex = full_regex(output.source)
        except PatternError as error:
            raise RequestError(f"{output.field}: {error}", field=output.field) from None
        return _lark(f"start: /(?:{regex})/")
    if output.kind == "choice":
        return _lark(f"start: /(?:{'|'.join(_choices(output))})/")
    if output.kind == "grammar":
        return _lark(_user_grammar(output, limits))
    return _lark("\n".join(_tagged_rules(output, vocabulary, limits)))


def _grammars(kind: str, value: object) -> str:
    return json.dumps({"grammars": [{kind: value}]}, ensure_ascii=False, separators=(",", ":"))


def _lark(text: str) -> str:
    return _grammars("lark_grammar", text)


def _check_size(output: StructuredOutput, limits: GrammarLimits) -> None:
    texts = [output.source, output.separator, *output.choices]
    for tag in output.tags:
        texts += (tag.begin, tag.schema, tag.end)
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise RequestError(f"{output.field}: the text is not valid Unicode", field=output.field) from None
    if size > limits.max_bytes:
        raise RequestError(
            f"{output.field}: {size} bytes, more than {limits.max_bytes}; make it smaller", field=output.field
        )


def _schema(source: str, field: str, limits: GrammarLimits) -> dict[str, object]:
    try:
        schema = prepare_schema(read_json(source), max_depth=limits.max_depth)
    except JsonError as error:
        raise RequestError(f"{field} is no JSON: {error}", field=field) from None
    except SchemaError as error:
        at = field + error.pointer
        raise RequestError(f"{at}: {error}", field=at, code="invalid_schema") from None
    options = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES}
    return {**schema, "x-guidance": options}


def _choices(output: StructuredOutput) -> Iterator[str]:
    if not 1 <= len(output.choices) <= MAX_NUM_CHOICES:
        raise RequestError(
            f"{output.field}: between 1 and {MAX_NUM_CHOICES} choices, got {len(output.choices)}",
            field=output.field,
        )
    for index, choice in enumerate(output.choices):
        if not choice:
            field = f"{output.field}[{index}]"
            raise RequestError(f"{field}: a choice must not be empty", field=field)
        if len(choice.encode()) > MAX_CHOICE_BYTES:
            field = f"{output.field}[{index}]"
            raise RequestError(f"{field}: a choice of more than {MAX_CHOICE_BYTES} bytes", field=field)
        yield literal_regex(choice)


def _user_grammar(output: StructuredOutput, limits: GrammarLimits) -> str:
    """Lark if there is a rule `start: ...`, else the EBNF of llama.cpp, with a rule `root ::= ...`."""
    text = output.source
    is_lark = _IS_LARK.search(text) is not None
    bare = (_LARK_QUOTED if is_lark else _EBNF_QUOTED).sub('""', text)
    depth = 0
    for char in bare:
        depth += (char in "([") - (char in ")]")
        if depth > limits.max_depth:
            raise RequestError(
                f"{output.field}: groups more than {limits.max_depth} deep", field=output.field
            )
    if is_lark:
        refused = _LARK_REFUSED.search(bare)
        if refused is not None:
            raise RequestError(
                f"{output.field}: {refused[0]!r} is not supported: a grammar has rules, terminals and %ignore",
                field=output.field,
            )
        return text
    if bare.count("::=") > MAX_NUM_RULES:
        raise RequestError(f"{output.field}: more than {MAX_NUM_RULES} rules", field=output.field)
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises bare Exception
        raise RequestError(f"{output.field}: {str(error)[:200]}", field=output.field) from None


def _tagged_rules(output: StructuredOutput, vocabulary: Vocabulary, limits: GrammarLimits) -> Iterator[str]:
    if not output.tags:
        raise RequestError(f"{output.field}: no tags", field=output.field)
    names = [f"tag_{index}" for index in range(len(output.tags))]
    more = f" ({_text(output.separator, vocabulary)} tag)*" if output.is_repeated else ""
    yield f"start: tag{more}"
    yield f"tag: {' | '.join(names)}"
    for index, (name, tag) in enumerate(zip(names, output.tags, strict=True)):
        schema = _schema(tag.schema, f"{output.field}[{index}]", limits)
        begin, end = _text(tag.begin, vocabulary), _text(tag.end, vocabulary)
        yield f"{name}: {begin} %json {json.dumps(schema, ensure_ascii=False)} {end}"


def _text(text: str, vocabulary: Vocabulary) -> str:
    """Plain text, in which a control token may be itself or be spelled."""
    pattern = "|".join(map(re.escape, sorted(vocabulary.control_token_ids, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    out = []
    for part in filter(None, parts):
        token_id = vocabulary.control_token_ids.get(part)
        spelled = json.dumps(part, ensure_ascii=False)
        if token_id is None or token_id in vocabulary.eos_token_ids:
            out.append(spelled)
        else:
            out.append(f"( <[{token_id}]> | {spelled} )")
    return " ".join(out)
