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

import torch
from torch import Tensor, nn

from ..errors import BuildError
from .passages import EVALUATION, token_ids
from .proof import eager_logits, kl_divergence

# Rounding to the nearest costs a model of 135 M parameters 0.05 (fp8) and 0.5 nats (int4), larger ones less. A model
# that lost this much is another one.
DEFAULT_MAX_KL = 1.0
_MAX_EXPONENT = 700.0  # e to that is still a number


@dataclass(frozen=True, slots=True)
class QualityReport:
    """`original_perplexity` is that of the model before its weights were rounded, `max_kl` what was allowed."""

    num_tokens: int
    kl_divergence: float
    top1_agreement: float
    perplexity: float
    original_perplexity: float
    max_kl: float

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
        ids = token_ids(tokenizer, EVALUATION, config.vocab_size)[: config.max_position_embeddings]
        if len(ids) < 2:  # one token predicts nothing
            raise BuildError(
                "quantize: the tokenizer makes one token of a whole text, so nothing can be measured"
            )
        self._ids = ids
        self._reference = self._logits(model)

    def measure(self, model: nn.Module, max_kl: float) -> QualityReport:
        """Compare the quantised `model`. Raises `BuildError` when it lost more than `max_kl` nats, or is not finite."""
        expected, actual = self._reference, self._logits(model)
        report = QualityReport(
            num_tokens=len(expected),
            kl_divergence=kl_divergence(expected, actual),
            top1_agreement=float((actual.argmax(-1) == expected.argmax(-1)).float().mean()),
            perplexity=self._perplexity(actual),
            original_perplexity=self._perplexity(expected),
            max_kl=max_kl,
        )
        if not report.kl_divergence <= max_kl:  # also when it is NaN
            raise BuildError(
                f"quantize: {report}, and at most {max_kl:g} nats are allowed; nothing was written: build without "
                "--quantize, or with the other scheme, or allow more with --max-kl"
            )
        return report

    def _logits(self, model: nn.Module) -> Tensor:
        """`[tokens - 1, vocab]` float32: what predicts a token that is there."""
        (logits,) = eager_logits(model, [self._ids])
        return logits[:-1]

    def _perplexity(self, logits: Tensor) -> float:
        mean = float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(self._ids[1:])))
        return math.exp(min(mean, _MAX_EXPONENT))
