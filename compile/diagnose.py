"""What TensorRT says of a build -> which layer of the model, the cause in plain words, what to do.

TensorRT reports through a log and short parser errors that name ONNX nodes. Nodes carry the names of HF modules here
(`compile.onnx_graph`), so the layer can be read from the message. What a message means `plugins_trt.messages` knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plugins_trt.messages import Meaning, one_line, recognise


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`layer` is the HF module and operator (or the engine's input) at fault, None where the message names none;
    `detail` the message itself.
    """

    layer: str | None
    cause: str
    remedy: str
    detail: str

    def __str__(self) -> str:
        where = f"{self.layer}: " if self.layer else ""
        return f"{where}{self.cause}; {self.remedy} (TensorRT: {self.detail})"


@dataclass(frozen=True, slots=True)
class ParserError:
    """One error of the ONNX parser; `code` is its kind, such as `UNSUPPORTED_NODE`."""

    node: str
    operator: str
    message: str
    code: str = ""

    @property
    def text(self) -> str:
        """Some messages are only an expression that was false: the operator and the kind say more."""
        about = ", ".join(part for part in (self.operator, self.code) if part)
        return f"{self.message} ({about})" if about else self.message


# By meaning: the cause, and the remedy. What TensorRT says of plans and of steps is no message of a build.
_WORDS: Mapping[Meaning, tuple[str, str]] = {
    Meaning.PLUGIN_MISSING: (
        "the operator is neither TensorRT's nor one of Pelton's plugins",
        "the family needs an operator that cannot be lowered; build it with --target cpu, and report it",
    ),
    Meaning.PLUGIN_REFUSES: (
        "Pelton's plugin does not take this node as it stands in the graph",
        "try the other --dtype (float16, bfloat16), or --target cpu, and report it",
    ),
    Meaning.NO_FP8: (
        "FP8 is not supported on this GPU",
        "FP8 needs compute capability 8.9 or later: choose another --gpu, or --quantize int4",
    ),
    Meaning.NO_BF16: (
        "bfloat16 is not supported on this GPU",
        "bfloat16 needs compute capability 8.0 or later: choose --dtype float16",
    ),
    Meaning.PROFILE_INVALID: (
        "the shapes of the optimisation profile do not go with the network's input",
        "profiles are derived from the limits: `pelton build --dry-run` shows them; report it with that output",
    ),
    Meaning.OPERANDS_DIFFER: (
        "its inputs do not go together (types or sizes)",
        "the exported graph is at fault: build it with --target cpu, and report it",
    ),
    Meaning.WORKSPACE: (
        "it needs more scratch memory than a layer may have",
        "scratch memory grows with a step: lower --max-step-tokens or --max-batch-size",
    ),
    Meaning.OTHER_GPU: (
        "this version of TensorRT does not build for this GPU",
        "install a version that supports it, or choose another --gpu",
    ),
    Meaning.GRAPH_FILE: ("the ONNX file is cut or damaged", "free some disk space and build again"),
    Meaning.SIZE_AT_RUN_TIME: (
        "a size is computed at run time where TensorRT needs a constant",
        "the family cannot be lowered to TensorRT; build it with --target cpu, and report it",
    ),
    Meaning.MEMORY: (
        "memory ran out",
        "lower --max-step-tokens or --max-batch-size, or build on a machine with more memory",
    ),
    Meaning.NO_KERNEL: (
        "TensorRT has no kernel for this layer with these shapes and dtypes on this target",
        "try --dtype float16, another --gpu, or smaller limits",
    ),
    Meaning.ONLY_FLOAT16: (
        "TensorRT has this operator in float16 and float32 only",
        "build it with --dtype float16",
    ),
    Meaning.UNSUPPORTED: (
        "TensorRT does not support this operator in this form",
        "build it with --target cpu, and report it",
    ),
    Meaning.DRIVER: (
        "the CUDA driver is missing, or too old for this TensorRT",
        "install a newer NVIDIA driver, or build with --target tensorrt-rtx, which needs no GPU",
    ),
}
_GENERAL = (
    "TensorRT could not build the engine",
    "build it with --target cpu, and report what TensorRT says",
)
_MAX_DETAIL = 300

_LAYER_PATTERNS = (
    re.compile(r"\{ForeignNode\[(?P<name>.+?)(?:\.\.\.(?P<last>.+?))?\]\}"),
    re.compile(r"Node name: (?P<name>\S+)"),
    re.compile(r"plugin node (?P<name>\S+?)(?= |reported)", re.IGNORECASE),
    re.compile(r"(?:for node|layer|node) \[?[\"']?(?P<name>[\w.]+/\w+)"),
    re.compile(r"\((?P<name>[\w.]+/\w+):"),
    re.compile(r"(?P<name>(?:model|transformer|gpt_neox|lm_head)[\w.]*/\w+)"),
    re.compile(r"import initializer: (?:model\.)?(?P<name>\w+(?:\.\w+)+)"),
    re.compile(r"(?:input tensors?|for tensor) (?P<input>\w+)"),
)


def diagnose(
    messages: Sequence[str], parser_errors: Sequence[ParserError] = (), *, warnings: Sequence[str] = ()
) -> Diagnosis:
    """The cause behind `messages` (errors of TensorRT's log, in order) and what its parser reported.

    `warnings` of the log tell a layer that has no kernel from one whose kernels did not fit into memory.
    """
    texts = [*(error.text for error in parser_errors), *messages]
    node = next((error.node for error in parser_errors if error.node), None)
    found = recognise(texts)
    if found is None:
        detail = texts[0] if texts else "no message"
        return Diagnosis(node or _layer(texts), *_GENERAL, one_line(detail, _MAX_DETAIL))
    meaning, text = found
    if meaning is Meaning.NO_KERNEL and (shortage := _memory_shortage(warnings)) is not None:
        meaning, detail = Meaning.MEMORY, f"{text}; {shortage}"
    else:
        detail = text
    return Diagnosis(
        node or _layer([text, *texts]), *_WORDS.get(meaning, _GENERAL), one_line(detail, _MAX_DETAIL)
    )


def _memory_shortage(warnings: Sequence[str]) -> str | None:
    """The first warning of a kernel that was passed over because its memory could not be had."""
    return next((w for w in warnings if recognise([w]) == (Meaning.MEMORY, w)), None)


def _layer(texts: Sequence[str]) -> str | None:
    for text in texts:
        for pattern in _LAYER_PATTERNS:
            if (found := pattern.search(text)) is None:
                continue
            groups = found.groupdict()
            if "input" in groups:
                return f"input {groups['input']}"
            last = groups.get("last")
            return f"{groups['name']} to {last}" if last else groups["name"]
    return None
