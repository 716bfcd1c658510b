"""What a drafter learns from: a text, and what the target makes of it at every token.

A text is UTF-8 and one document, or JSON lines (`.jsonl`) with a document in the field `text` of each. Documents are
cut into windows, which the target reads one by one. Of each token are kept the hidden state that the target's head
reads there and the likeliest tokens after it. Every twentieth window is held out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BuildError
from .hidden_states import head_inputs, only_head_input
from .progress import Progress

WINDOW = 512  # tokens
_HELD_OUT_EVERY = 20
_NUM_LIKELIEST = (
    16  # tokens of the target's distribution that are kept: 97% of its mass on SmolLM2's own text
)


@dataclass(frozen=True)
class Corpus:
    """N tokens of windows, one after the other, and what the target says at each.

    `positions` are those from which `span` tokens follow in the same window: what a drafter starts from is the hidden
    state there and the token after it.
    """

    token_ids: Tensor  # [N] int64
    hidden: Tensor  # [N, H], the dtype that an engine gives them in
    likeliest: Tensor  # [N, K] int32, tokens after it, the likeliest first
    probabilities: Tensor  # [N, K] float32, of the whole distribution
    positions: Tensor  # [P] int64

    @property
    def num_bytes(self) -> int:
        tensors = (self.token_ids, self.hidden, self.likeliest, self.probabilities, self.positions)
        return sum(tensor.nbytes for tensor in tensors)


def read_windows(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    window: int,
    span: int,
    vocab_size: int,
    max_tokens: int,
    seed: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids of the windows to train on and of those held out; `max_tokens` in all, drawn by `seed` if there are
    more. Raises `BuildError` naming the file, or saying that there is too little text.
    """
    windows: list[np.ndarray] = []
    for path in paths:
        found = len(windows)
        for document in read_documents(path):
            ids = np.array(tokenizer(document, verbose=False)["input_ids"], np.int64)
            ids = ids[ids < vocab_size]
            parts = (ids[start : start + window] for start in range(0, len(ids), window))
            windows += [part for part in parts if len(part) > span]
        if len(windows) == found:
            raise BuildError(f"text: {path} holds no text of more than {span} tokens; give a longer one")
    order = np.random.default_rng(seed).permutation(len(windows))
    total = np.cumsum([len(windows[i]) for i in order])
    chosen = sorted(order[: max(2, int(np.searchsorted(total, max_tokens, "right")))])
    if len(chosen) < 2:
        raise BuildError(
            f"text: {len(windows[0])} tokens are one window of {window}, and none is left to measure on; give more text"
        )
    held_out = set(chosen[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY]) or {chosen[-1]}
    return [windows[i] for i in chosen if i not in held_out], [windows[i] for i in sorted(held_out)]


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a text that are not empty. Raises `BuildError` naming the file, and the line at fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"text: {path}: cannot be read as UTF-8 ({error})") from error
    if path.suffix != ".jsonl":
        if text.strip():
            yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError as error:
            raise BuildError(f"text: {path}: line {number} is not JSON ({error})") from error
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise BuildError(f'text: {path}: line {number} is no object with a string "text"')
        if document["text"].strip():
            yield document["text"]


def check_texts(paths: Sequence[Path]) -> None:
    """Raises `BuildError` naming a file that cannot be read. Nothing is read: it may be a pipe."""
    for path in paths:
        if not os.access(path, os.R_OK) or path.is_dir():
            raise BuildError(f"text: {path}: cannot be read; give a file that can")


def observe_target(
    model: nn.Module, windows: Sequence[np.ndarray], *, span: int, dtype: torch.dtype, progress: Progress
) -> Corpus:
    """Run `model` on each window; hidden states are kept in `dtype`."""
    num_tokens = sum(map(len, windows))
    config: Any = model.config
    num_kept = min(_NUM_LIKELIEST, config.vocab_size)
    hidden = torch.empty(num_tokens, config.hidden_size, dtype=dtype)
    likeliest = torch.empty(num_tokens, num_kept, dtype=torch.int32)
    probabilities = torch.empty(num_tokens, num_kept)
    positions, start = [], 0
    for ids in windows:
        end = start + len(ids)
        with torch.inference_mode(), head_inputs(model) as captured:
            logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[
                0
            ]  # [tokens, vocab]
            rows = only_head_input(model, captured)
            if rows.shape[-1] != config.hidden_size:
                raise BuildError(
                    f"{type(model).__name__}: its head reads {rows.shape[-1]} elements, not the hidden size of "
                    f"{config.hidden_size}: drafters for it are not supported"
                )
            hidden[start:end] = rows
            values, tokens = logits.topk(num_kept, dim=-1)
            # A few rows at a time stay in the cache.
            normaliser = torch.cat([part.float().logsumexp(-1) for part in logits.split(4)])
            likeliest[start:end] = tokens.int()
            probabilities[start:end] = (values.float() - normaliser[:, None]).exp()
        positions.append(torch.arange(start, end - span))
        start = end
        progress.step(f"{start} of {num_tokens} tokens")
    token_ids = torch.from_numpy(np.concatenate(windows))
    return Corpus(token_ids, hidden, likeliest, probabilities, torch.cat(positions))
