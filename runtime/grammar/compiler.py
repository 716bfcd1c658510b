"""From what users ask for to grammars, off the engine's loop."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from ...errors import RequestError
from ..structured import StructuredOutput
from .forms import write_grammar
from .limits import GrammarLimits
from .matcher import LlguidanceGrammar
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

_MAX_LEXER_STATES = 50_000
"""Of one sequence; each takes one to two kB."""


class GrammarCompiler:
    """Compiles forms of output for one model; safe for use from many threads.

    `vocab_size` is the width of the model's logits. Equal forms are compiled once, also when two threads ask at the
    same time, and the latest are kept. The work is done in threads of its own, which hold the interpreter for no
    longer than some milliseconds at a time: llguidance compiles without it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int] | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._limits = limits or GrammarLimits()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, Future[LlguidanceGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self._limits.num_threads, thread_name_prefix="pelton-grammar")

    def warm_up(self) -> None:
        """Make the table of the vocabulary, which takes some tenths of a second, before the first request needs it."""
        if self._eos_token_ids:
            self._get_vocabulary()

    def compile(self, output: StructuredOutput) -> LlguidanceGrammar:
        """Raises `RequestError` naming the field and, in a schema, the place: `field/properties/a/type`."""
        if not self._eos_token_ids:
            raise RequestError(
                f"{output.field}: the model has no token that ends its output", field=output.field
            )
        with self._lock:
            future = self._kept.get(output)
            if future is None:
                future = self._kept[output] = self._threads.submit(self._compile, output)
            self._kept.move_to_end(output)
            while len(self._kept) > self._limits.num_kept:
                self._kept.popitem(last=False)
        try:
            return future.result(self._limits.deadline_seconds)
        except TimeoutError:
            raise RequestError(
                f"{output.field}: not compiled within {self._limits.deadline_seconds:g} s; make it simpler",
                field=output.field,
                code="grammar_too_complex",
            ) from None
        except RequestError:
            with self._lock:
                if self._kept.get(output) is future:
                    del self._kept[output]
            raise

    def close(self) -> None:
        """Let go of the threads; nothing may be compiled any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary

    def _compile(self, output: StructuredOutput) -> LlguidanceGrammar:
        vocabulary = self._get_vocabulary()
        text = write_grammar(output, vocabulary, self._limits)
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=_MAX_LEXER_STATES)
        matcher = LLMatcher(vocabulary.table, text, log_level=0, limits=limits)
        mask = np.empty(vocabulary.num_words, np.int32)
        if not matcher.is_error():
            # The first mask finds what is too complex, and the copies of the matcher start with what it has made.
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        reason = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if not reason and not (mask & ~vocabulary.end_mask).any():
            reason = "it allows no text"
        if reason:
            raise RequestError(
                f"{output.field} cannot be compiled: {' '.join(reason.split())[:300]}",
                field=output.field,
                code="invalid_grammar",
            )
        return LlguidanceGrammar(vocabulary, matcher)
