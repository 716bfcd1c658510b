"""Drafters for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Seq

import numpy as np

from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor import Executor
from pelton.runtime.sequence import Sequence as RunningSequence
from pelton.runtime.speculate.draft import Draft, DraftAsk, Drafter
from pelton.runtime.speculate.lengths import DraftLengths
from pelton.runtime.speculate.speculator import Speculator
from pelton.runtime.tokenizer import Tokenizer


class GuessingDrafter:
    """Chooses what `guess(context)` says, but for a random token now and then; as a look-up or as a model would."""

    def __init__(
        self,
        guess: Callable[[Sequence[int]], int],
        vocab_size: int,
        *,
        seed: int = 0,
        is_lookup: bool = False,
    ) -> None:
        self._guess = guess
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self.is_lookup = is_lookup
        self.ended: list[RunningSequence] = []
        self.is_closed = False

    def propose(self, asks: Seq[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: DraftAsk) -> Draft:
        context = list(ask.sequence.token_ids)
        for _ in range(self._rng.randint(0, ask.num_tokens)):
            is_random = self._rng.random() < 0.2
            context.append(self._rng.randrange(self._vocab_size) if is_random else self._guess(context))
        return Draft(tuple(context[ask.sequence.num_tokens :]))

    def observe(self, hidden: np.ndarray, sequences: Seq[RunningSequence], rows: Seq[int]) -> None:
        raise AssertionError("the engine has no hidden states")

    def end(self, sequence: RunningSequence) -> None:
        self.ended.append(sequence)

    def close(self) -> None:
        self.is_closed = True


class FixedDrafter(GuessingDrafter):
    """Always proposes the same tokens."""

    def __init__(self, token_ids: Seq[int]) -> None:
        super().__init__(lambda context: 0, 1)
        self._token_ids = tuple(token_ids)

    def _draft(self, ask: DraftAsk) -> Draft:
        return Draft(self._token_ids).cut(ask.num_tokens)


def drafting_engine(
    executor: Executor,
    tokenizer: Tokenizer,
    drafter: Drafter,
    *,
    config: EngineConfig | None = None,
    draft_limit: int = 8,
    is_adaptive: bool = False,
) -> Engine:
    speculator = Speculator(
        eos_token_ids=tokenizer.eos_token_ids,
        drafter=drafter,
        draft_limit=draft_limit,
        lengths=DraftLengths(is_adaptive=is_adaptive, has_shadows=drafter.is_lookup),
    )
    config = config or EngineConfig(check_invariants=True)
    return Engine(executor, tokenizer, config, speculator=speculator)
