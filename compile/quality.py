"""What rounding the weights of a model costs, measured on text: the original's logits against the quantised model's.

    KL divergence      mean over tokens of KL(original || quantised), in nats
    top-1 agreement    share of tokens after which both expect the same token
    perplexity         exp of the mean negative log-likelihood of the text's own next tokens

Both models run in the dtype of the build, with transformers' own attention and the operators' PyTorch references.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BuildError
from .passages import CALIBRATION, EVALUATION, token_ids
from .proof import eager_logits, kl_divergence

# Rounding to the nearest costs healthy models 0.01 to 0.3 nats; beyond this, most answers change.
DEFAULT_MAX_KL = 0.5
_MAX_TOKENS = 1024
_MAX_EXPONENT = 700.0  # e to that is still a number


@dataclass(frozen=True, slots=True)
class QualityReport:
    """`original_perplexity` is that of the model before its weights were rounded."""

    num_tokens: int
    kl_divergence: float
    top1_agreement: float
    perplexity: float
    original_perplexity: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"KL divergence {self.kl_divergence:.3f} nats, top-1 agreement {self.top1_agreement:.1%}, perplexity "
            f"{self.perplexity:.2f} (original {self.original_perplexity:.2f}), on {self.num_tokens} tokens of text"
        )


class QualityGate:
    """Made from the original model, before its weights are rounded in place."""

    def __init__(self, model: nn.Module, tokenizer: Any, config: Any) -> None:
        texts = [token_ids(tokenizer, text, config.vocab_size) for text in (EVALUATION, *CALIBRATION)]
        longest = min(_MAX_TOKENS, config.max_position_embeddings)
        # A text of one token predicts nothing.
        self._texts = [ids[:longest] for ids in texts if len(ids) > 1]
        if not self._texts:
            raise BuildError(
                "quantize: the tokenizer makes no text of two tokens, so nothing can be measured"
            )
        self._reference = self._logits(model)

    def measure(self, model: nn.Module, max_kl: float) -> QualityReport:
        """Compare the quantised `model`. Raises `BuildError` when it lost more than `max_kl` nats, or is not finite."""
        expected, actual = torch.cat(self._reference), torch.cat(self._logits(model))
        report = QualityReport(
            num_tokens=len(expected),
            kl_divergence=kl_divergence(expected, actual),
            top1_agreement=float((actual.argmax(-1) == expected.argmax(-1)).float().mean()),
            perplexity=self._perplexity(actual),
            original_perplexity=self._perplexity(expected),
        )
        if not report.kl_divergence <= max_kl:  # also when it is NaN
            raise BuildError(
                f"quantize: {report}, and at most {max_kl:g} nats are allowed; nothing was written: build without "
                "--quantize, or with the other scheme, or allow more with --max-kl"
            )
        return report

    def _logits(self, model: nn.Module) -> list[Tensor]:
        """Of each text, `[tokens - 1, vocab]` float32: what predicts a token that is there."""
        return [logits[:-1] for logits in eager_logits(model, self._texts)]

    def _perplexity(self, logits: Tensor) -> float:
        following = torch.from_numpy(np.concatenate([ids[1:] for ids in self._texts]))
        mean = float(torch.nn.functional.cross_entropy(logits, following))
        return math.exp(min(mean, _MAX_EXPONENT))
