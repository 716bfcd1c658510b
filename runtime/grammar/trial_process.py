"""The process of `trial.py`: says that it is ready, then reads grammars, a JSON string per line, and answers each with
why it cannot be compiled. It ends with its input, and so with the process that started it.

Run as a script, it imports nothing of the package. Its stack and memory are smaller than those of the threads that
compile for good, so that what passes here passes there.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading

import llguidance

MAX_MEMORY_BYTES = 2 << 30
STACK_BYTES = 2 << 20
MAX_LEXER_STATES = 50_000
"""Of one compiled form, all its sequences together; each takes one to two kB."""

MAX_STEP_ITEMS = 10_000
"""Of the parser, to compute one mask: a fifth of what llguidance takes by itself."""


class _Bytes(llguidance.TokenizerWrapper):
    """A vocabulary of single bytes and an end."""

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
        self.special_token_ids = [256]
        self.eos_token_id = 256
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def parser_limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        verbose_errors=False,
        max_lexer_states=MAX_LEXER_STATES,
        step_max_items=MAX_STEP_ITEMS,
    )


def _serve(lines: queue.SimpleQueue[str]) -> None:
    table = llguidance.LLTokenizer(_Bytes())
    print(flush=True)
    while True:
        line = lines.get()
        matcher = llguidance.LLMatcher(table, json.loads(line), log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    pending: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(pending,), daemon=True).start()
    for text in sys.stdin:
        pending.put(text)
    os._exit(0)  # also while something is being compiled
