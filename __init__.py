"""Pelton: ahead-of-time compiled language models, served from a pure-Python runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime.llm import LLM
    from .runtime.outputs import CompletionOutput, RequestOutput
    from .runtime.request import SamplingParams
    from .runtime.speculate.config import SpeculationConfig
    from .runtime.structured import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "SpeculationConfig",
    "StructuredOutput",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "SamplingParams": "request",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "SpeculationConfig": "speculate.config",
    "StructuredOutput": "structured",
}


def __getattr__(name: str) -> Any:
    """Import the Python API on first use, so that `pelton --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pelton' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".runtime.{_HOMES[name]}", __name__), name)
