"""Forms whose compilation takes as long as a test wants."""

from __future__ import annotations

import threading
from collections import Counter

from pelton.errors import RequestError
from pelton.runtime.engine import Engine
from pelton.runtime.grammar.compiler import GrammarCompiler
from pelton.runtime.grammar.matcher import LlguidanceGrammar
from pelton.runtime.structured import StructuredOutput

_TIMEOUT = 20.0


class GatedCompiler(GrammarCompiler):
    """Holds forms that contain `slow` until it is opened; ends the first `num_late` tries of each form as too slow."""

    def __init__(self, engine: Engine, *, num_late: int = 0) -> None:
        super().__init__(engine.tokenizer, engine.limits.vocab_size)
        self.gate = threading.Event()
        self.tries: Counter[StructuredOutput] = Counter()
        self._num_late = num_late

    def compile(self, output: StructuredOutput) -> LlguidanceGrammar:
        self.tries[output] += 1
        if "slow" in output.source or any("slow" in choice for choice in output.choices):
            assert self.gate.wait(_TIMEOUT), "nobody opened the gate"
        if self.tries[output] <= self._num_late:
            raise RequestError(f"{output.field}: too slow", field=output.field, code="grammar_too_complex")
        return super().compile(output)


def gate(engine: Engine, *, num_late: int = 0) -> GatedCompiler:
    """Give `engine` such a compiler in place of its own."""
    engine.grammars.close()
    engine._grammars = compiler = GatedCompiler(engine, num_late=num_late)
    return compiler
