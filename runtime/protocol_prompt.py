"""Prompts as clients write them: `prompt` of completions, `messages` of chats, to lists of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

MAX_NUM_PROMPTS = 2048

Prompt = str | list[int]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content"}
)
_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def read_prompts(prompt: object) -> list[Prompt]:
    """The prompts of a completion: a string, a list of strings, one list of ids, or a list of such lists.

    Ids are not checked here: a prompt of them may be far longer than the context.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _bad_prompt("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not prompt:
        raise _bad_prompt("the list is empty; send at least one prompt")
    if _is_int(prompt[0]):
        return [prompt]
    if len(prompt) > MAX_NUM_PROMPTS:
        raise _bad_prompt(f"at most {MAX_NUM_PROMPTS} prompts in one call, got {len(prompt)}")
    for index, item in enumerate(prompt):
        if not isinstance(item, (str, list)):
            raise RequestError(
                f"prompt[{index}] must be a string or a list of token ids", field=f"prompt[{index}]"
            )
    return prompt


def check_token_ids(token_ids: Sequence[object], vocab_size: int, field: str) -> None:
    """Raise `RequestError` naming `field` unless each is the id of a token."""
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field}: {str(token_id)[:32]} is not a token id (an integer from 0 to {vocab_size - 1})",
                field=field,
            )


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The ids of a chat. `add_generation_prompt` None opens a new turn, unless the last message goes on."""
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            field="continue_final_message",
        )
    for name in template_kwargs:
        if name in _TEMPLATE_ARGUMENTS:
            field = f"chat_template_kwargs.{name}"
            raise RequestError(f"{field}: send {name} as a field of the body", field=field)
    return tokenizer.encode_chat(
        list(messages),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        template_kwargs=dict(template_kwargs),
    )


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with keys and roles checked; the chat template checks their contents."""
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_role(message: Mapping[str, Any], field: str) -> None:
    """Raise `RequestError` unless `message`, named `field`, has a role that chats know."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{field}.role must be one of {', '.join(sorted(_ROLES))}", field=f"{field}.role")


def num_message_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of all texts in `messages`, whether valid or not."""
    return sum(_num_chars(value) for message in messages for value in message.values())


def _num_chars(value: object) -> int:
    if isinstance(value, list):
        return sum(
            _num_chars(part.get("text")) + _num_chars(part.get("function"))
            for part in value
            if isinstance(part, dict)
        )
    if isinstance(value, dict):  # the function of a call
        return _num_chars(value.get("arguments"))
    return len(value) if isinstance(value, str) else 0


def _read_message(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    present = {name: value for name, value in message.items() if value is not None}
    # What a client echoes of an earlier answer: notes that are no text of the chat, and what was said in refusing.
    present.pop("annotations", None)
    if present.get("role") == "assistant" and isinstance(present.get("refusal"), str):
        refusal = present.pop("refusal")
        present.setdefault("content", refusal)
    for name, value in present.items():
        shown = f"{field}.{name[:64]}"
        if name not in _MESSAGE_KEYS:
            raise RequestError(f"{shown} is not supported", field=shown, code="unsupported_parameter")
        if name not in ("content", "tool_calls") and not isinstance(value, str):
            raise RequestError(f"{shown} must be a string", field=shown)
    check_role(present, field)
    if "tool_calls" in present:
        shown = f"{field}.tool_calls"
        if present["role"] != "assistant":
            raise RequestError(f"{shown}: only messages of the assistant call tools", field=shown)
        if not present["tool_calls"]:
            del present["tool_calls"]
    return present


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_prompt(reason: str) -> RequestError:
    return RequestError(f"prompt: {reason}", field="prompt")
