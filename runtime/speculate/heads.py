"""Drafts by heads of the bundle that read the target's hidden states (`plugins_trt/draft_heads.py`).

A draft begins at the hidden state from which a sequence's newest token was chosen, which `observe` keeps. All sequences
are advanced together, a token at a time; each stops at the length it was asked for, or where the heads' likeliest token
falls below a probability: then the target would most likely refuse it, and all behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...compile.bundle import Manifest
from ...errors import BundleError, ConfigError
from ...plugins_trt.draft_heads import HeadConfig, eagle_step, medusa_states, read_config, read_weights
from ...plugins_trt.processor import IS_X86, has_bfloat16_products
from ..executor import ExecutorLimits
from ..sampler import DRAFT, GREEDY_BELOW, uniform_at
from ..sequence import Sequence
from .draft import NO_DRAFT, Draft, DraftAsk

DEFAULT_MIN_PROBABILITY = 0.3


class HeadNetwork(Protocol):
    """The arithmetic of a kind of heads; `state` has sequences along its first dimension."""

    max_places: int | None
    hidden_size: int
    dtype: torch.dtype

    def start(self, hidden: Tensor, num_places: int) -> Tensor:
        """The state before the first of `num_places` guesses; `hidden` `[B, H]`."""
        ...

    def advance(self, state: Tensor, tokens: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """The next state, and logits `[B, V']` of the guess at `place`; `tokens` `[B]` are those before it."""
        ...


class EagleNetwork:
    """Recurrent: may guess further than it was trained for."""

    max_places: int | None = None

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._products = {name: pack(weights[name].to(dtype)) for name in ("mix", "gate_up", "down", "head")}
        self._norms = {name: weights[name].to(dtype) for name in ("norm_in", "norm_mlp", "norm_out")}
        self._token_table = weights["token_table"].to(dtype)
        self.hidden_size = len(weights["mix"])

    def start(self, hidden: Tensor, num_places: int) -> Tensor:
        return hidden

    def advance(self, state: Tensor, tokens: Tensor, place: int) -> tuple[Tensor, Tensor]:
        rows = self._token_table[tokens]
        state = eagle_step(lambda name, x: self._products[name](x), self._norms, state, rows)
        return state, self._products["head"](state)


class MedusaNetwork:
    """All guesses at once, from the hidden state alone; its state are their logits `[B, places, V']`."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._block, self._bias = weights["block"].to(dtype), weights["bias"].to(dtype)
        self._head = pack(weights["head"].to(dtype))
        self.max_places: int | None = len(self._block)
        self.hidden_size = self._block.shape[1]

    def start(self, hidden: Tensor, num_places: int) -> Tensor:
        states = medusa_states(hidden, self._block[:num_places], self._bias[:num_places])
        logits = self._head(states.flatten(0, 1))
        return logits.view(*states.shape[:2], -1).transpose(0, 1)

    def advance(self, state: Tensor, tokens: Tensor, place: int) -> tuple[Tensor, Tensor]:
        return state, state[:, place]


def pack(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """`x -> x @ weight.T`, with `weight` `[out, in]` laid out once for oneDNN where that computes bfloat16 products."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not has_fast_bfloat16():
        return lambda x: functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda x: linear(x, packed, None, "none", [], "")


def has_fast_bfloat16() -> bool:
    """Whether heads are computed in bfloat16 on this CPU: on x86 alone, where packing for oneDNN was tried."""
    return IS_X86 and has_bfloat16_products()


class HeadDrafter:
    """`Drafter` on `network`, whose guesses are indices into `draft_tokens` `[V']`.

    A draft ends before the first token whose place has no token as likely as `min_probability` (from 0, never, to 1).
    That is known from the tokens before it, so a draft that was drawn may be cut there too.

    Drafts are chosen: the likeliest token of each place, no `probs`. Where an ask allows it, those of requests with a
    temperature are drawn at that temperature, by numbers that are a function of the request's seed, the choice's index
    and the position.
    """

    def __init__(
        self,
        network: HeadNetwork,
        draft_tokens: Tensor,
        *,
        vocab_size: int,
        min_probability: float = DEFAULT_MIN_PROBABILITY,
    ) -> None:
        self._network = network
        self._draft_tokens = draft_tokens
        self._vocab_size = vocab_size
        self._min_probability = min_probability
        self._states = _States(network.dtype, draft_tokens.device)

    @property
    def is_lookup(self) -> bool:
        return False

    def observe(self, hidden: np.ndarray | Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
        """As `Drafter.observe`; `sequences` have their newest tokens already. Others have no draft in the next step."""
        if sequences:
            self._states.keep(hidden, sequences, rows)

    def end(self, sequence: Sequence) -> None:
        self._states.drop(sequence)

    def close(self) -> None:
        """Holds nothing that needs it."""

    def propose(self, asks: Seq[DraftAsk]) -> list[Draft]:
        """Empty for a sequence whose newest token was not observed in the last step."""
        guesses = [_Guess(ask) for ask in asks if self._states.is_fresh(ask.sequence)]
        if guesses:
            with torch.inference_mode():
                self._advance(guesses)
        drafts = {guess.sequence: guess.draft() for guess in guesses}
        return [drafts.get(ask.sequence, NO_DRAFT) for ask in asks]

    def _advance(self, active: list[_Guess]) -> None:
        """Fill the guesses in; `active` and the rows of `state` and `tokens` are always the same sequences."""
        device = self._draft_tokens.device
        num_places = max(guess.num_tokens for guess in active)
        if self._network.max_places is not None:
            num_places = min(num_places, self._network.max_places)
        state = self._network.start(self._states.rows([guess.sequence for guess in active]), num_places)
        tokens = torch.tensor([guess.sequence.token_ids[-1] for guess in active], device=device)
        for place in range(num_places):
            state, scores = self._network.advance(state, tokens, place)
            logits = scores.float()  # [B, V']
            highest, index = logits.max(-1)
            confidence = (highest - logits.logsumexp(-1)).exp()
            drawn = self._draw(active, logits, index)
            tokens = self._draft_tokens[index]
            facts = zip(confidence.tolist(), tokens.tolist(), strict=True)
            kept = []
            for row, (probability, token) in enumerate(facts):
                if not probability >= self._min_probability:  # NaN is no probability
                    continue
                active[row].add(token, drawn.get(row))
                if len(active[row].tokens) < active[row].num_tokens:
                    kept.append(row)
            if not kept:
                return
            if len(kept) < len(active):
                rows = torch.tensor(kept, device=device)
                state, tokens = state[rows], tokens[rows]
                active = [active[row] for row in kept]

    def _draw(self, active: Seq[_Guess], logits: Tensor, index: Tensor) -> dict[int, np.ndarray]:
        """Replace the likeliest by a drawn one in `index` where a request samples; their distributions by row."""
        rows = [row for row, guess in enumerate(active) if guess.is_drawn]
        if not rows:
            return {}
        temperatures = torch.tensor([[active[row].temperature] for row in rows], device=logits.device)
        probs = (logits[rows] / temperatures).softmax(-1)  # [sampling, V']
        numbers = torch.tensor([[active[row].next_number()] for row in rows], device=logits.device)
        sums = probs.cumsum(-1)
        # Scaled by the sum itself, so that rounding leaves no number beyond the last token with a probability.
        picks = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0]
        index[rows] = picks.clamp_max_(probs.shape[1] - 1)
        full = torch.zeros(len(rows), self._vocab_size, device=logits.device)
        full[:, self._draft_tokens] = probs
        return dict(zip(rows, full.cpu().numpy(), strict=True))


class _Guess:
    """The draft of one ask as it grows."""

    def __init__(self, ask: DraftAsk) -> None:
        self.sequence = ask.sequence
        self.num_tokens = ask.num_tokens
        self.temperature = ask.sequence.request.params.temperature
        self.tokens: list[int] = []
        self.is_drawn = ask.may_draw and self.temperature >= GREEDY_BELOW
        self._probs: list[np.ndarray] = []

    def next_number(self) -> float:
        """From [0, 1), for the next token."""
        sequence, seed = self.sequence, self.sequence.request.params.seed
        if seed is None:
            raise ValueError(f"request {sequence.request.request_id} draws without a seed")
        start = sequence.num_output_tokens
        return uniform_at(seed, sequence.index, start + len(self.tokens), DRAFT, start)

    def add(self, token: int, probs: np.ndarray | None) -> None:
        self.tokens.append(token)
        if probs is not None:
            self._probs.append(probs)

    def draft(self) -> Draft:
        if not self.tokens:
            return NO_DRAFT
        return Draft(tuple(self.tokens), np.stack(self._probs) if self._probs else None)


class _States:
    """The hidden states of the step that was observed last, and how many tokens each sequence had with the one chosen
    from its state. Rows are taken from the step's tensor when they are asked for: where drafts do not pay, none are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._hidden: np.ndarray | Tensor = torch.empty(0)  # [N, hidden_size]
        self._rows: dict[Sequence, tuple[int, int]] = {}  # row of the state, tokens of the sequence

    def keep(self, hidden: np.ndarray | Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
        self._hidden = hidden
        self._rows = {s: (row, s.num_tokens) for s, row in zip(sequences, rows, strict=True)}

    def is_fresh(self, sequence: Sequence) -> bool:
        return sequence in self._rows and self._rows[sequence][1] == sequence.num_tokens

    def rows(self, sequences: Seq[Sequence]) -> Tensor:
        hidden = torch.as_tensor(self._hidden)
        rows = torch.tensor([self._rows[sequence][0] for sequence in sequences], device=hidden.device)
        return hidden.index_select(0, rows).to(self._device, self._dtype)

    def drop(self, sequence: Sequence) -> None:
        self._rows.pop(sequence, None)


def load_heads(
    directory: Path,
    manifest: Manifest,
    limits: ExecutorLimits,
    *,
    min_probability: float = DEFAULT_MIN_PROBABILITY,
) -> HeadDrafter:
    """The drafter of the bundle in `directory`. Raises `BundleError` naming the file that is missing or damaged."""
    if not 0 <= min_probability <= 1:
        raise ConfigError(f"min_probability: {min_probability} is not between 0 and 1")
    config = read_config(directory)
    for name, wanted in (("hidden_size", manifest.model.hidden_size), ("vocab_size", limits.vocab_size)):
        if getattr(config, name) != wanted:
            raise BundleError(
                f"{directory}: the drafter has {name} {getattr(config, name)}, the engine {wanted}; build it again"
            )
    weights = read_weights(directory, config)
    return HeadDrafter(
        make_network(config, weights),
        weights["draft_tokens"],
        vocab_size=limits.vocab_size,
        min_probability=min_probability,
    )


def make_network(config: HeadConfig, weights: Mapping[str, Tensor]) -> HeadNetwork:
    """In the drafter's own dtype, or in float32 on a CPU that has no products of bfloat16."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    if dtype == torch.bfloat16 and weights["head"].device.type == "cpu" and not has_fast_bfloat16():
        dtype = torch.float32
    return MedusaNetwork(weights, dtype) if config.kind == "medusa" else EagleNetwork(weights, dtype)
