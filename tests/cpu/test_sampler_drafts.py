"""`DeviceSampler` verifies drafts under masks as `HostSampler` does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pelton.errors import EngineError
from pelton.plugins_trt.sampling_memory import sampler_sizes
from pelton.runtime.grammar.mask_filler import MaskRows
from pelton.runtime.outputs import TokenEvent
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sampler import HostSampler, Verification
from pelton.runtime.sampler_device import DeviceSampler
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import Draft

VOCAB_SIZE = 300
EOS = 3


def some_params(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": -0.5,
        "logit_bias": {rng.randrange(VOCAB_SIZE): 4.0, 9: -3.0},
        "min_tokens": 6,
        "stop_token_ids": (11, 12),
        "logprobs": 2,
    }
    picked = rng.sample(sorted(choices), rng.randrange(5))
    return {"temperature": rng.choice([0.0, 0.0, 0.9]), "seed": 5, **{name: choices[name] for name in picked}}


def mask_of(rng: random.Random, num_rows: int) -> np.ndarray:
    """Bits of half of the tokens in each row."""
    rows = np.random.default_rng(rng.getrandbits(30)).random((num_rows, VOCAB_SIZE)) < 0.5
    padded = np.zeros((num_rows, -(-VOCAB_SIZE // 32) * 32), np.uint8)
    padded[:, :VOCAB_SIZE] = rows
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def some_verifications(rng: random.Random, logits: np.ndarray) -> list[Verification]:
    """Drafts that follow the model for a while, so that some are accepted."""
    verifications, row = [], 0
    while row + 5 <= len(logits):
        output = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(8))]
        params = SamplingParams(max_tokens=None, **some_params(rng))
        sequence = Sequence(Request("r", (1, 2, 3), params), 0, [1, 2, 3, *output])
        length = rng.randrange(5)
        drafted = [int(logits[row + i].argmax()) for i in range(length)]
        if length and rng.random() < 0.5:
            drafted[-1] = rng.randrange(VOCAB_SIZE)
        masks = MaskRows(mask_of(rng, length + 1)) if rng.random() < 0.3 else None
        verifications.append(Verification(sequence, row, Draft(tuple(drafted)), masks))
        row += length + 1
    return verifications


def tokens_of(events: list[TokenEvent | EngineError]) -> list[int | str]:
    return [event.token_id if isinstance(event, TokenEvent) else str(event) for event in events]


@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
def test_accepted_tokens_are_the_host_s(is_tight: bool) -> None:
    rng = random.Random(is_tight)
    sizes = sampler_sizes(VOCAB_SIZE, 7 if is_tight else 64, max_rows=7 if is_tight else 64)
    if is_tight:  # rows of one sequence are worked on in different passes
        sizes = replace(sizes, num_count_slots=3, scratch_bytes=200 * VOCAB_SIZE)
    num_accepted = num_sequences = num_different = 0
    for round_number in range(25):
        noise = np.random.default_rng(round_number)
        # Rows resemble those before them, so that the penalty of a drafted token shows in the rows behind it.
        logits = np.repeat(noise.standard_normal((8, VOCAB_SIZE)) * 3, 5, axis=0)
        logits = (logits + 0.1 * noise.standard_normal((40, VOCAB_SIZE))).astype(np.float32)
        logits[noise.integers(40), noise.integers(VOCAB_SIZE)] = np.nan
        verifications = some_verifications(rng, logits)
        host, device = HostSampler(VOCAB_SIZE, [EOS]), DeviceSampler(VOCAB_SIZE, [EOS], sizes=sizes)
        expected = host.verify(logits, verifications)
        got = device.verify(torch.from_numpy(logits), verifications)
        for one, wanted, events in zip(verifications, expected, got, strict=True):
            num_sequences += 1
            num_accepted += len(wanted) - 1
            if tokens_of(events) != tokens_of(wanted):
                assert one.sequence.request.params.temperature > 0, "greedy tokens cannot differ by rounding"
                num_different += 1
    assert num_accepted > 50
    assert num_different <= num_sequences // 100


def test_what_the_host_is_needed_for_is_done_there() -> None:
    """Logit processors, and drafts that were drawn."""

    def only_even(prompt: tuple[int, ...], output: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        logits[1::2] = -np.inf
        return logits

    logits = (np.random.default_rng(0).standard_normal((6, VOCAB_SIZE)) * 3).astype(np.float32)
    processed = SamplingParams(temperature=0, logits_processors=[only_even])  # type: ignore[arg-type]
    drawn = SamplingParams(temperature=1.0, seed=1)
    probs = np.full((2, VOCAB_SIZE), 1 / VOCAB_SIZE, np.float32)
    verifications = [
        Verification(Sequence(Request("a", (1,), processed)), 0),
        Verification(Sequence(Request("b", (1,), drawn)), 1, Draft((5, 6), probs)),
        Verification(Sequence(Request("c", (1,), SamplingParams(temperature=0))), 4),
    ]
    expected = HostSampler(VOCAB_SIZE, [EOS]).verify(logits, verifications)
    got = DeviceSampler(VOCAB_SIZE, [EOS]).verify(torch.from_numpy(logits), verifications)
    assert [tokens_of(events) for events in got] == [tokens_of(events) for events in expected]
    assert tokens_of(got[0])[0] % 2 == 0  # type: ignore[operator]
