"""A tokenizer of 258 tokens and a scripted model that recites the alphabet: answers can be read in a test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers

from pelton.runtime.chat_template import ChatTemplate
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.inputs import StepInputs
from pelton.runtime.tokenizer import Tokenizer
from support.scripted import ScriptedExecutor

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall as <tool_call></tool_call>:"
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinks %}<think>\n{% endif %}{% if false %}</think>{% endif %}{% endif %}"
)
"""Hermes calls; `thinks` opens reasoning in the prompt."""

IM_START, IM_END, BOS = "<|im_start|>", "<|im_end|>", "<s>"
NUM_PADDED_LOGITS = 272
"""Wider than the tokenizer's 258 or 259 tokens, as real models' logits often are."""


def byte_tokenizer(*, has_bos: bool = False, template: str = CHAT_TEMPLATE) -> Tokenizer:
    """One token per byte, then the ChatML control tokens. EOS is `<|im_end|>`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [IM_START, IM_END, *([BOS] if has_bos else [])]
    backend.add_special_tokens(special)
    if has_bos:
        bos_id = backend.token_to_id(BOS)
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
        )
    return Tokenizer(
        backend,
        bos_token=BOS if has_bos else None,
        special_tokens=special,
        eos_token_ids=[backend.token_to_id(IM_END)],
        chat_template=ChatTemplate({"default": template}, {"eos_token": IM_END}),
    )


def reciting(tokenizer: Tokenizer) -> Callable[[Sequence[int]], int]:
    """After a letter the next one, after `z` and anything else an `a`; after a `!` the turn ends."""
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)
    following = dict(itertools.pairwise(letters))
    (mark,) = tokenizer.encode("!", add_special_tokens=False)
    (following[mark],) = tokenizer.eos_token_ids
    return lambda context: following.get(context[-1], letters[0])


def answering(tokenizer: Tokenizer, text: str) -> Callable[[Sequence[int]], int]:
    """Answers every chat of `TOOL_TEMPLATE` with `text`."""
    header = tokenizer.encode(f"{IM_START}assistant\n", add_special_tokens=False)
    (eos,) = tokenizer.eos_token_ids
    answer = [*tokenizer.encode(text, add_special_tokens=False), eos]

    def next_token(context: Sequence[int]) -> int:
        starts = (at for at in range(len(context), -1, -1) if [*context[at : at + len(header)]] == header)
        num_written = len(context) - next(starts, len(context) - len(header)) - len(header)
        return answer[num_written % len(answer)]

    return next_token


def scripted_engine(
    tokenizer: Tokenizer | None = None,
    *,
    next_token: Callable[[Sequence[int]], int] | None = None,
    max_model_len: int = 512,
    max_batch_size: int = 8,
    max_step_tokens: int = 64,
    num_blocks: int = 256,
    before_step: Callable[[int, StepInputs], None] | None = None,
    after_step: Callable[[int, np.ndarray], None] | None = None,
) -> Engine:
    """An engine whose every step checks the bookkeeping."""
    tokenizer = tokenizer or byte_tokenizer()
    limits = ExecutorLimits(
        max_model_len=max_model_len,
        max_batch_size=max_batch_size,
        max_step_tokens=max_step_tokens,
        block_size=16,
        num_blocks=num_blocks,
        vocab_size=NUM_PADDED_LOGITS,
    )
    next_token = next_token or reciting(tokenizer)
    executor = ScriptedExecutor(next_token, limits, before_step=before_step, after_step=after_step)
    return Engine(executor, tokenizer, EngineConfig(check_invariants=True), name="tiny")
