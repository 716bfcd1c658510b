"""Drafter heads for tests: random ones for a checkpoint, and texts to train some on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pelton.compile.checkpoint import load_tokenizer, open_checkpoint
from pelton.compile.drafter import vocabulary_digest
from pelton.compile.train_drafter import write_drafter
from pelton.plugins_trt.draft_heads import FORMAT_VERSION, HeadConfig


def head_config(kind: str = "eagle", **overrides: Any) -> HeadConfig:
    """Small heads for a vocabulary of 50 tokens."""
    sizes: dict[str, Any] = {
        "format_version": FORMAT_VERSION, "kind": kind, "hidden_size": 16,
        "intermediate_size": 24 if kind == "eagle" else 0, "vocab_size": 50, "draft_vocab_size": 20,
        "num_draft_tokens": 3, "dtype": "float32", "vocabulary": "", "checkpoint_hash": "", "training": {},
    }  # fmt: skip
    return HeadConfig(**(sizes | overrides))


def random_weights(config: HeadConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Norms about 1, matrices that keep the size of what they multiply, a head that is sure of some of its guesses."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name == "draft_tokens":
            weights[name] = torch.randperm(config.vocab_size, generator=generator)[: shape[0]]
        elif name.startswith("norm"):
            weights[name] = 1 + 0.3 * noise
        else:
            weights[name] = noise * (1.0 if name in ("head", "token_table") else shape[-1] ** -0.5)
    return {
        name: tensor if name == "draft_tokens" else tensor.to(getattr(torch, config.dtype))
        for name, tensor in weights.items()
    }


def random_drafter(checkpoint: Path, directory: Path, *, kind: str = "eagle", seed: int = 0) -> Path:
    """Write random heads that fit `checkpoint`; return `directory`."""
    opened = open_checkpoint(str(checkpoint))
    model: Any = opened.config
    config = head_config(
        kind, hidden_size=model.hidden_size, vocab_size=model.vocab_size, draft_vocab_size=100,
        vocabulary=vocabulary_digest(load_tokenizer(opened)), checkpoint_hash=opened.content_hash,
    )  # fmt: skip
    write_drafter(directory, config, random_weights(config, seed=seed))
    return directory


def training_text(path: Path, *, num_documents: int = 40) -> Path:
    """JSON lines of documents of some hundred tokens of a tiny checkpoint's tokenizer."""
    words = (
        "the",
        "engine",
        "reads",
        "every",
        "token",
        "once",
        "and",
        "keeps",
        "a",
        "page",
        "of",
        "answers",
        "in",
        "France",
    )
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(num_documents):
        picks = torch.randint(len(words), (40,), generator=generator).tolist()
        lines.append(json.dumps({"text": " ".join(words[i] for i in picks)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
