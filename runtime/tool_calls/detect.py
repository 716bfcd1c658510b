"""Which formats a model writes, told from the literals of its chat template."""

from __future__ import annotations

from .formats import TOOL_FORMATS, ToolFormat
from .reasoning import REASONING_FORMATS, ReasoningFormat

_OTHER_BODIES = ("<function=", "<arg_key>")
"""Written inside the tags of Hermes by families whose calls are no JSON (Qwen3-Coder, GLM 4.5)."""


def detect_tool_format(literals: str) -> ToolFormat | None:
    """`literals` is `ChatTemplate.literal_text`. None where no known format shows."""
    name = _tool_format_name(literals)
    return None if name is None else TOOL_FORMATS[name]


def detect_reasoning_format(literals: str) -> ReasoningFormat | None:
    for name in ("think", "mistral"):
        if REASONING_FORMATS[name].end in literals:
            return REASONING_FORMATS[name]
    return None


def _tool_format_name(literals: str) -> str | None:
    if "[TOOL_CALLS]" in literals:
        return "mistral_v11" if "[ARGS]" in literals else "mistral"
    if "<｜tool▁calls▁begin｜>" in literals:
        return "deepseek_v3" if "```json" in literals else "deepseek_v31"
    if "<|tool_call|>" in literals:
        return "granite"
    if "<tool_call>" in literals:
        return None if any(body in literals for body in _OTHER_BODIES) else "hermes"
    if "<|python_tag|>" in literals or '"parameters": dictionary of argument name' in literals:
        return "llama3_json"
    return None
