"""What TensorRT says -> which layer of the model, the cause in plain words, what to do.

TensorRT reports through a log and short parser errors that name ONNX nodes. Nodes carry the names of HF modules here
(`compile.onnx_graph`), so the layer can be read from the message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`layer` is the HF module and operator, None where the message names none; `detail` the message itself."""

    layer: str | None
    cause: str
    remedy: str
    detail: str

    def __str__(self) -> str:
        where = f"{self.layer}: " if self.layer else ""
        return f"{where}{self.cause}; {self.remedy} (TensorRT: {self.detail})"


@dataclass(frozen=True, slots=True)
class ParserError:
    """One error of the ONNX parser."""

    node: str
    operator: str
    message: str


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    cause: str
    remedy: str


def _rule(pattern: str, cause: str, remedy: str) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE), cause, remedy)


# The first that matches any message wins: from the particular to the general.
_RULES = (
    _rule(
        r"plugin not found|no importer registered for op: (?P<op>\S+)|getPluginCreator|creator .*not.*registered",
        "the operator is neither TensorRT's nor one of Pelton's plugins",
        "the family needs an operator that cannot be lowered; build it with --target cpu, and report it",
    ),
    _rule(
        r"fp8.*(not supported|unsupported|requires)|(not supported|unsupported).*fp8|float8.*not supported",
        "FP8 is not supported on this GPU",
        "FP8 needs compute capability 8.9 or later: choose another --gpu, or --quantize int4",
    ),
    _rule(
        r"bf16.*(not supported|unsupported)|(not supported|unsupported).*bf16",
        "bfloat16 is not supported on this GPU",
        "bfloat16 needs compute capability 8.0 or later: choose --dtype float16",
    ),
    _rule(
        r"out of memory|OutOfMemory|cuMemAlloc|bad_alloc|insufficient memory|requested amount of (gpu )?memory",
        "memory ran out",
        "lower --max-step-tokens or --max-batch-size, or build on a machine with more memory",
    ),
    _rule(
        r"could not find any implementation|no implementation|Failed to find.*tactic",
        "TensorRT has no kernel for this layer with these shapes and dtypes on this target",
        "try --dtype float16, another --gpu, or smaller limits",
    ),
    _rule(
        r"kMIN|kOPT|kMAX|optimization profile|does not satisfy any|profile.*(dimension|shape)|profileMin",
        "a shape lies outside the optimisation profile",
        "build with larger limits (--max-step-tokens, --max-batch-size, --max-model-len)",
    ),
    _rule(
        r"version tag|serialization.*version|different version|incompatible.*version|magicTag|stdArchiveReader",
        "the plan was written by another version of TensorRT, or is damaged",
        "build the bundle again",
    ),
    _rule(
        r"compute capability|generated on a different|different device|hardware compat|SM ?\d+",
        "the plan is for another GPU",
        "build the bundle again with --gpu for this one",
    ),
    _rule(
        r"at least one output|failed to parse|ModelProto|protobuf|deserializ|truncated|cannot open|"
        r"external.*weights|WeightsContext",
        "the ONNX file is cut or damaged",
        "free some disk space and build again",
    ),
    _rule(
        r"build-time constant|shape tensor|data-dependent|axes input|must be.*constant",
        "a size is computed at run time where TensorRT needs a constant",
        "the family cannot be lowered to TensorRT; build it with --target cpu, and report it",
    ),
    _rule(
        r"only float32 or float16 input is supported",
        "TensorRT has this operator in float16 and float32 only",
        "build it with --dtype float16",
    ),
    _rule(
        r"unsupported|not supported|Assertion failed",
        "TensorRT does not support this operator in this form",
        "build it with --target cpu, and report it",
    ),
)
_GENERAL = (
    "TensorRT could not build the engine",
    "build it with --target cpu, and report what TensorRT says",
)
_MAX_DETAIL = 300

_LAYER_PATTERNS = (
    re.compile(r"\{ForeignNode\[(?P<name>[^\]\s]+?)(?:\.\.\.(?P<last>[^\]\s]+))?\]\}"),
    re.compile(r"node(?: number)? \d+ \[\S+ -> \"[^\"]*\"\].*?Node name: (?P<name>\S+)", re.DOTALL),
    re.compile(r"(?:for node|layer|node) \[?[\"']?(?P<name>[\w.]+/[\w.]+)"),
    re.compile(r"(?P<name>(?:model|transformer|gpt_neox|lm_head)[\w.]*/\w+)"),
)


def diagnose(messages: Sequence[str], parser_errors: Sequence[ParserError] = ()) -> Diagnosis:
    """The cause behind `messages` (errors of TensorRT's log, in order) and what its parser reported."""
    texts = [*(error.message for error in parser_errors), *messages]
    layer = next((error.node for error in parser_errors if error.node), None) or _layer(texts)
    for rule in _RULES:
        for text in texts:
            if rule.pattern.search(text):
                return Diagnosis(layer, rule.cause, rule.remedy, _one_line(text))
    detail = _one_line(texts[0]) if texts else "no message"
    return Diagnosis(layer, *_GENERAL, detail)


def _layer(texts: Sequence[str]) -> str | None:
    for text in texts:
        for pattern in _LAYER_PATTERNS:
            if found := pattern.search(text):
                last = found.groupdict().get("last")
                return f"{found['name']} to {last}" if last else found["name"]
    return None


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_DETAIL else f"{line[: _MAX_DETAIL - 1]}…"
