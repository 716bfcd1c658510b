"""What calls are parsed and answered with: the model's side of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import RequestError
from .protocol_tools import ends_in_reasoning
from .structured import Grammar, StructuredOutput
from .tool_calls import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    detect_reasoning_format,
    detect_tool_format,
)

if TYPE_CHECKING:
    from .executor import ExecutorLimits
    from .grammar.compiler import GrammarCompiler
    from .tokenizer import Tokenizer


@dataclass(frozen=True)
class ApiContext:
    """What a call is parsed and answered with. The first of `model_names` serves calls that name no model.

    `tool_call_parser` and `reasoning_parser` are names of `TOOL_FORMATS` and `REASONING_FORMATS`, `auto` (told from
    the chat template) or `none`. Without `grammars` no output can be held to a form.
    """

    tokenizer: Tokenizer
    limits: ExecutorLimits
    model_names: tuple[str, ...]
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    grammars: GrammarCompiler | None = None

    def is_compiled(self, output: StructuredOutput) -> bool:
        """Whether `compile` would return at once."""
        return self.grammars is not None and self.grammars.is_compiled(output)

    def compile(self, output: StructuredOutput) -> Grammar:
        """`output` compiled. May take some seconds. Raises `RequestError` naming the field."""
        if self.grammars is None:
            raise RequestError(
                f"{output.field}: output that is held to a form is not supported here",
                field=output.field,
                code="unsupported_parameter",
            )
        try:
            return self.grammars.compile(output)
        except RequestError as error:
            raise output.renamed(error) from None

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        if self.tool_call_parser == "auto":
            return detect_tool_format(self._template_literals)
        return None if self.tool_call_parser == "none" else TOOL_FORMATS[self.tool_call_parser]

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        if self.reasoning_parser == "auto":
            return detect_reasoning_format(self._template_literals)
        return None if self.reasoning_parser == "none" else REASONING_FORMATS[self.reasoning_parser]

    @cached_property
    def end_of_reasoning(self) -> list[int]:
        """What a prompt that ends inside reasoning needs for an answer without any."""
        if self.reasoning_format is None:
            return []
        return self.tokenizer.encode(f"\n{self.reasoning_format.end}\n\n", add_special_tokens=False)

    def ends_in_reasoning(self, token_ids: list[int], continued: Mapping[str, object] | None) -> bool:
        if self.reasoning_format is None:
            return False
        return ends_in_reasoning(self.reasoning_format, token_ids, self.tokenizer, continued)

    @property
    def _template_literals(self) -> str:
        template = self.tokenizer.chat_template
        return "" if template is None else template.literal_text

    @cached_property
    def vocab_size(self) -> int:
        """Ids below this are tokens: a model's padded vocabulary has rows that no text maps to."""
        return min(self.tokenizer.vocab_size, self.limits.vocab_size)

    @cached_property
    def max_prompt_chars(self) -> int:
        """No text above this fits the context, whatever its tokens: known without tokenising it."""
        longest = max(len(self.tokenizer.token_bytes(token_id)) for token_id in range(self.vocab_size))
        return self.limits.max_model_len * longest
