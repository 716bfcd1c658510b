"""Calls of a small context, parsed."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.errors import RequestError
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.protocol import CHAT_COMPLETIONS, COMPLETIONS, ApiContext, Call, parse_call
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size
LIMITS = ExecutorLimits(
    max_model_len=64,
    max_batch_size=4,
    max_step_tokens=32,
    block_size=16,
    num_blocks=32,
    vocab_size=NUM_PADDED_LOGITS,
)
CONTEXT = ApiContext(TOKENIZER, LIMITS, ("tiny", "alias"))
USER = [{"role": "user", "content": "hi"}]


def completion(**body: Any) -> Call:
    return parse_call(COMPLETIONS, {"prompt": "abc", **body}, CONTEXT, "id")


def chat(**body: Any) -> Call:
    return parse_call(CHAT_COMPLETIONS, {"messages": USER, **body}, CONTEXT, "id")


def refusal(parse: Any, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        parse(**body)
    return error.value
