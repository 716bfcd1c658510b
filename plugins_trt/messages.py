"""What TensorRT says: its log, and what a message means. The one place that knows TensorRT's words.

Builder and runtime report through a log, in words that differ from release to release. `recognise` gives them a
meaning; who asked says it in words of its own situation, and what to do about it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

_MAX_MESSAGES = 64
_MAX_LENGTH = 2000  # names of fused layers are long


class Meaning(Enum):
    PLUGIN_MISSING = auto()
    PLUGIN_REFUSES = auto()  # ours, handed what it does not take
    NO_FP8 = auto()
    NO_BF16 = auto()
    PROFILE_INVALID = auto()
    SHAPE_OUTSIDE = auto()  # of the profile that is set
    OPERANDS_DIFFER = auto()
    WORKSPACE = auto()
    PLAN_VERSION = auto()
    OTHER_GPU = auto()
    GRAPH_FILE = auto()
    SIZE_AT_RUN_TIME = auto()
    MEMORY = auto()
    NO_KERNEL = auto()
    ONLY_FLOAT16 = auto()
    UNSUPPORTED = auto()
    DRIVER = auto()


# The first that matches any message is the cause: from the particular to the general. Memory comes late because tactics
# that do not fit are skipped with an error that is none, and the driver last because TensorRT-RTX complains of a
# missing one beside every other error on a machine without a GPU.
_RULES = tuple(
    (meaning, re.compile(pattern, re.IGNORECASE))
    for meaning, pattern in (
        (
            Meaning.PLUGIN_MISSING,
            r"plugin not found|no importer registered for op|getPluginCreator|could not find plugin|"
            r"creator not found|no creator of plugin|creator .*not.*registered",
        ),
        (
            Meaning.PLUGIN_REFUSES,
            r"could not create the plugin|could not find any supported formats|"
            r"supported plugin/custom tactic format|negative number of custom tactics",
        ),
        (Meaning.ONLY_FLOAT16, r"only float32 or float16 input is supported"),
        (
            Meaning.NO_FP8,
            r"HW-specific datatypes:[^.]*fp8|hardware with FP8|fp8.*(not supported|unsupported|requires)|"
            r"(not supported|unsupported).*(fp8|float8)|float8.*not supported",
        ),
        (
            Meaning.NO_BF16,
            r"HW-specific datatypes:[^.]*\bb(f)?16|hardware with BF16|bf16.*(not supported|unsupported)|"
            r"(not supported|unsupported).*bf16",
        ),
        (
            Meaning.SHAPE_OUTSIDE,
            r"satisfyProfile|does not satisfy any optimization profile|profileM(in|ax)Dims|min ~ max range",
        ),
        (
            Meaning.PROFILE_INVALID,
            r"dimension mismatch for tensor|dimensions but profile|not self-consistent|MIN<=OPT<=MAX|"
            r"no optimization profile has been defined|k(MIN|OPT|MAX) values|missing values for (shape )?input",
        ),
        (
            Meaning.OPERANDS_DIFFER,
            r"must have (the )?same (input )?(types?|dimensions)|but must match|incompatible dimensions",
        ),
        (Meaning.WORKSPACE, r"bytes of scratch space, but only|workspace memory greater than"),
        (
            Meaning.PLAN_VERSION,
            r"version tag|magic ?tag|serialization[_ ]version|not compatible with this version|version mismatch|"
            r"malformed engine|stdArchiveReader",
        ),
        (
            Meaning.OTHER_GPU,
            r"incompatible device|expecting compute|different (models of )?devices?|unsupported cc|"
            r"compute capability|hardware compat|\bSM ?\d+(\.\d+)? is not supported",
        ),
        (
            Meaning.GRAPH_FILE,
            r"failed to parse|ModelProto|protobuf|at least one output|import initializer|external.weights|"
            r"WeightsContext|input file cannot be found",
        ),
        (
            Meaning.SIZE_AT_RUN_TIME,
            r"build-time constant|shape tensor|data-dependent|axes input|must be.*constant",
        ),
        (
            Meaning.MEMORY,
            r"out ?of ?memory|bad_alloc|insuff?icient (gpu )?memory|cuMemAlloc|memory allocation|"
            r"requested amount of (gpu )?memory",
        ),
        (Meaning.NO_KERNEL, r"(could not find any|no) implementation|failed to find.*tactic"),
        (Meaning.UNSUPPORTED, r"unsupported|not supported|assertion failed|is not consumed by"),
        (
            Meaning.DRIVER,
            r"driver|cuda ?error|cuda runtime|cuda initialization|no CUDA-capable device",
        ),
    )
)


def recognise(messages: Iterable[str]) -> tuple[Meaning, str] | None:
    """What `messages` mean, and the first of them that says so; None when none is known."""
    texts = list(messages)
    for meaning, pattern in _RULES:
        for text in texts:
            if pattern.search(text):
                return meaning, text
    return None


def make_log(trt: Any) -> Any:
    """A logger that keeps the latest `errors` and `warnings`, each as one line.

    TensorRT needs it as long as anything that was made with it lives.
    """

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: deque[str] = deque(maxlen=_MAX_MESSAGES)
            self.warnings: deque[str] = deque(maxlen=_MAX_MESSAGES)

        def log(self, severity: Any, message: str) -> None:
            line = one_line(message, _MAX_LENGTH)
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(line)
            elif severity == trt.ILogger.Severity.WARNING:
                self.warnings.append(line)

    return Log()


def one_line(text: str, limit: int) -> str:
    """`text` without line breaks, cut to `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
