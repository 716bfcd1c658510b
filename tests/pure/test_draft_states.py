"""Drafters that read hidden states get those of the step before, and are asked rarely while their guesses are wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from pelton.runtime.engine import EngineConfig
from pelton.runtime.executor import ExecutorLimits, StepOutput
from pelton.runtime.inputs import StepInputs
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence as RunningSequence
from pelton.runtime.speculate.draft import NO_DRAFT, Draft, DraftAsk
from support.drafting import GuessingDrafter, drafting_engine
from support.draining import drain
from support.scripted import ScriptedExecutor, digest
from support.tiny_model import NUM_PADDED_LOGITS, byte_tokenizer

LIMITS = ExecutorLimits(
    max_model_len=700,
    max_batch_size=8,
    max_step_tokens=80,
    block_size=4,
    num_blocks=1300,
    vocab_size=NUM_PADDED_LOGITS,
)
next_token = digest(200)
state_of = digest(1_000_003)


class StatefulExecutor(ScriptedExecutor):
    """The hidden state of a row is a number made of all the tokens up to it."""

    def __init__(self, limits: ExecutorLimits) -> None:
        super().__init__(next_token, limits, logits_of=self._logits_of)
        self._states: list[int] = []

    def execute(self, inputs: StepInputs) -> StepOutput:
        self._states = []
        output = super().execute(inputs)
        return replace(output, hidden=np.array(self._states)[:, None])

    def _logits_of(self, context: Sequence[int]) -> np.ndarray:
        self._states.append(state_of(context))
        logits = np.zeros(self.limits.vocab_size, np.float32)
        logits[next_token(context)] = 10.0
        return logits


class StateReader(GuessingDrafter):
    """A model's drafter whose guesses are wrong until `is_right`. It keeps the states of the last step that it saw."""

    def __init__(self) -> None:
        super().__init__(next_token, LIMITS.vocab_size)
        self.is_right = False
        self.num_observed = self.num_proposed = self.num_read = 0
        self._states: dict[RunningSequence, tuple[int, int]] = {}

    def observe(self, hidden: np.ndarray, sequences: Seq[RunningSequence], rows: Seq[int]) -> None:
        self.num_observed += 1
        self._states = {
            s: (int(hidden[row, 0]), s.num_tokens) for s, row in zip(sequences, rows, strict=True)
        }

    def propose(self, asks: Seq[DraftAsk]) -> list[Draft]:
        self.num_proposed += 1
        return super().propose(asks)

    def _draft(self, ask: DraftAsk) -> Draft:
        state, num_tokens = self._states.get(ask.sequence, (0, 0))
        if num_tokens != ask.sequence.num_tokens:
            return NO_DRAFT
        self.num_read += 1
        context = list(ask.sequence.token_ids)
        assert state == state_of(context[:-1])
        for _ in range(ask.num_tokens):
            token = next_token(context)
            context.append(token if self.is_right else (token + 1) % 200)
        return Draft(tuple(context[ask.sequence.num_tokens :]))


def test_states_are_those_of_the_step_before_and_drafting_rests_and_comes_back() -> None:
    drafter = StateReader()
    engine = drafting_engine(
        StatefulExecutor(LIMITS),
        byte_tokenizer(),
        drafter,
        config=EngineConfig(enable_prefix_caching=False),
        is_adaptive=True,
    )
    record_step = engine._speculator._lengths.record_step
    engine._speculator.record_step = lambda num_tokens, _: record_step(num_tokens, 1.0 + 0.01 * num_tokens)  # type: ignore[method-assign]
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(200) for _ in range(5 + i)) for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.admit(Request(str(i), prompt, params))
    deltas = [delta for _ in range(100) for delta in engine.step()]
    drafter.num_observed = drafter.num_proposed = 0
    deltas += [delta for _ in range(200) for delta in engine.step()]
    assert 10 <= drafter.num_observed <= 50
    assert 1 <= drafter.num_proposed <= 20  # probes
    drafter.is_right = True
    num_steps = engine.stats().num_steps
    deltas += [delta for ended in drain(engine).values() for delta in ended]
    assert engine.stats().num_steps - num_steps < 200
    assert drafter.num_read > 100
    for i, prompt in enumerate(prompts):
        tokens = [t for delta in deltas if delta.request_id == str(i) for t in delta.token_ids]
        context = list(prompt)
        for token in tokens:
            assert token == next_token(context)
            context.append(token)
        assert len(tokens) == 600
