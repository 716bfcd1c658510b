"""From what users ask for to grammars, off the engine's loop."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher

from ...errors import OverloadedError, RequestError
from ..structured import StructuredOutput
from .forms import FIRST_TAG_LINE, write_grammar
from .limits import GrammarLimits
from .matcher import LlguidanceGrammar
from .trial import Trial, TrialError
from .trial_process import parser_limits
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

MAX_FORCED_BYTES = 8 << 10
"""Each step makes tokens of all the text that must follow."""

_FAULT = re.compile(r"at (?P<line>\d+)\(\d+\): (?P<reason>.*?)(?: \d+ \| (?:start|tag|tag_\d+): |$)")
"""How llguidance names the line at fault of a grammar of tags, before it quotes those around it."""


class GrammarCompiler:
    """Compiles forms of output for one model; safe for use from many threads.

    `vocab_size` is the width of the model's logits. Equal forms are compiled once, also when two threads ask at the
    same time, and the latest are kept. The work is done in threads of its own: reading a form is Python, which lets
    other threads in between, and llguidance compiles without the interpreter. A process of its own compiles first,
    on trial (`trial.py`).
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
        self._trial = Trial()
        self._threads = ThreadPoolExecutor(self._limits.num_threads, thread_name_prefix="pelton-grammar")

    def warm_up(self) -> None:
        """Make what takes some tenths of a second before the first request needs it: the table of the vocabulary,
        the process of trials.
        """
        if self._eos_token_ids:
            self._trial.start()
            self._get_vocabulary()

    def is_compiled(self, output: StructuredOutput) -> bool:
        """Whether `compile` would return at once."""
        with self._lock:
            future = self._kept.get(output)
            return future is not None and future.done() and not _is_outgrown(future)

    def compile(self, output: StructuredOutput) -> LlguidanceGrammar:
        """Raises `RequestError` naming the field and, in a schema, the place (`field/properties/a/type`);
        `OverloadedError` if its turn did not come in time.
        """
        if not self._eos_token_ids:
            raise RequestError(
                f"{output.field}: the model has no token that ends its output", field=output.field
            )
        deadline = time.monotonic() + self._limits.deadline_seconds
        with self._lock:
            future = self._kept.get(output)
            if future is not None and _is_outgrown(future):
                future = None
            is_new = future is None
            if future is None:
                future = self._kept[output] = self._threads.submit(self._compile, output, deadline)
            self._kept.move_to_end(output)
            self._drop_oldest()
        if is_new:
            future.add_done_callback(partial(self._drop_failed, output))
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if future.cancel():
                raise _busy() from None
            reason = f"it takes longer than {self._limits.deadline_seconds:g} s; make it simpler"
            raise _refusal(output, reason, is_late=True) from None
        except CancelledError:
            raise _busy() from None

    def _drop_oldest(self) -> None:
        limits = self._limits
        while len(self._kept) > 1 and (
            len(self._kept) > limits.num_kept or sum(map(_num_chars, self._kept)) > limits.max_kept_chars
        ):
            self._kept.popitem(last=False)

    def _drop_failed(self, output: StructuredOutput, future: Future[LlguidanceGrammar]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                if self._kept.get(output) is future:
                    del self._kept[output]

    def close(self) -> None:
        """Let go of threads and process; nothing may be compiled any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _get_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary

    def _compile(self, output: StructuredOutput, deadline: float) -> LlguidanceGrammar:
        vocabulary = self._get_vocabulary()
        text = write_grammar(output, vocabulary, self._limits)
        try:
            self._trial.check(text, deadline)
        except TrialError as error:
            raise _refusal(output, str(error), is_late=error.is_late) from None
        matcher = LLMatcher(vocabulary.table, text, log_level=0, limits=parser_limits())
        mask = np.empty(vocabulary.num_words, np.int32)
        if not matcher.is_error():
            # The first mask finds what is too complex, and the copies of the matcher start with what it has made.
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        reason = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if not reason and len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
            reason = f"it begins with more than {MAX_FORCED_BYTES} bytes that must follow"
        if not reason and not (mask & ~vocabulary.end_mask).any():
            reason = "it allows no text"
        if reason:
            raise _refusal(output, " ".join(reason.split())[:300])
        return LlguidanceGrammar(vocabulary, matcher)


def _is_outgrown(future: Future[LlguidanceGrammar]) -> bool:
    is_compiled = future.done() and not future.cancelled() and future.exception() is None
    return is_compiled and future.result().is_outgrown


def _num_chars(output: StructuredOutput) -> int:
    tags = sum(len(tag.begin) + len(tag.schema) + len(tag.end) for tag in output.tags)
    return len(output.source) + len(output.separator) + sum(map(len, output.choices)) + tags


def _busy() -> OverloadedError:
    return OverloadedError("too many forms of output are waiting to be compiled; try again later")


def _refusal(output: StructuredOutput, reason: str, *, is_late: bool = False) -> RequestError:
    if "NoExtensionBias" in reason:  # llguidance's name of it
        reason = "no output can match"
    code = "grammar_too_complex" if is_late else "invalid_grammar"
    field = output.field
    at = _FAULT.match(reason)
    if at is not None and output.tags:  # in a grammar that is ours each has its line
        reason = at["reason"]
        index = int(at["line"]) - FIRST_TAG_LINE
        if 0 <= index < len(output.tags) and len(output.tags[index].places) == 1:
            ((_, field),) = output.tags[index].places
    return RequestError(f"{field} cannot be compiled: {reason}", field=field, code=code)
