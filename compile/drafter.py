"""`--drafter`: heads that were trained for a model, checked against it and taken into its bundle."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError, BundleError
from ..plugins_trt.draft_heads import CONFIG_FILE, WEIGHTS_FILE, HeadConfig, read_config, read_weights
from .bundle import DrafterFacts, ModelFacts
from .checkpoint import Checkpoint, load_tokenizer

# Engines of these targets give the hidden states that a drafter reads.
TARGETS = ("cpu",)


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """A drafter on disk, whole. `digest` is the sha256 of its files' content."""

    directory: Path
    config: HeadConfig
    digest: str

    @property
    def num_bytes(self) -> int:
        return (self.directory / WEIGHTS_FILE).stat().st_size

    def facts(self) -> DrafterFacts:
        config = self.config
        return DrafterFacts(
            kind=config.kind,
            hidden_size=config.hidden_size,
            draft_vocab_size=config.draft_vocab_size,
            num_draft_tokens=config.num_draft_tokens,
        )

    def copy_into(self, directory: Path) -> None:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(self.directory / name, directory / name)

    def __str__(self) -> str:
        c = self.config
        return f"{c.kind}, up to {c.num_draft_tokens} tokens out of {c.draft_vocab_size}"


def open_drafter(directory: Path, target: str) -> DrafterFiles:
    """Read and check the files. Raises `BuildError` naming the file or the field at fault, or the target."""
    if target not in TARGETS:
        raise BuildError(
            f"drafter: engines of target {target} give no hidden states, which a drafter reads; build with --target "
            f"{' or '.join(TARGETS)}, or leave --drafter out"
        )
    if not directory.is_dir():
        raise BuildError(f"drafter: {directory} is no directory; `pelton train-drafter` makes one")
    try:
        config = read_config(directory)
        read_weights(directory, config)
    except BundleError as error:
        raise BuildError(f"drafter: {error}") from error
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return DrafterFiles(directory, config, digest.hexdigest())


def check_drafter(drafter: DrafterFiles, checkpoint: Checkpoint, facts: ModelFacts) -> list[str]:
    """Warnings. Raises `BuildError` naming the field, where `drafter` is for another model."""
    config, where = drafter.config, f"drafter: {drafter.directory / CONFIG_FILE}"
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(config, name), getattr(facts, name)
        if own != wanted:
            raise BuildError(
                f"{where}: {name}: it is for a model with {own}, {facts.source} has {wanted}; train one for this model"
            )
    if config.vocabulary != vocabulary_digest(load_tokenizer(checkpoint)):
        raise BuildError(
            f"{where}: vocabulary: it was trained with a tokenizer whose ids stand for other tokens than those of "
            f"{facts.source}; train one for this model"
        )
    if config.checkpoint_hash != checkpoint.content_hash:
        return [
            f"the drafter of {drafter.directory} was trained on another checkpoint of this vocabulary: the tokens will "
            "be the same, but fewer of its guesses may be right"
        ]
    return []


def vocabulary_digest(tokenizer: Any) -> str:
    """sha256 of the tokens and their ids, those added beside the vocabulary included, of a transformers tokenizer."""
    tokens = sorted(
        (i, token) for token, i in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).items()
    )
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
