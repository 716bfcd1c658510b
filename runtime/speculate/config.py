"""How an engine speculates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ...errors import ConfigError

SpeculationMethod = Literal["ngram", "suffix", "draft-model", "heads"]

# Drafts of a step unless told otherwise. Look-ups cost nothing and are right in long runs; the suffix method shortens
# its own; a draft model pays for each token; heads are trained for about so many.
_NUM_DRAFT_TOKENS: dict[SpeculationMethod, int] = {"ngram": 10, "suffix": 16, "draft-model": 5, "heads": 4}
# Long comparisons find the place that is being copied among similar ones: on edited source files 94% of the drafts
# are right with 16, 74% with 4.
_MIN_NGRAM = 2
_MAX_NGRAM = 16


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Who drafts and how much.

    `num_draft_tokens` is the most that the method drafts for a sequence in a step (None: the method's own number, see
    `draft_limit`); what a form forces is not counted. `draft_bundle` is the built draft model, for method draft-model.
    `is_adaptive` gives each sequence only the drafts that are expected to pay.
    `min_ngram` and `max_ngram` (`ngram`) are how many tokens must agree with an earlier place, and how many are
    compared (None: `ngram_sizes`). Raises `ConfigError` naming the field.
    """

    method: SpeculationMethod
    num_draft_tokens: int | None = None
    draft_bundle: Path | None = None
    is_adaptive: bool = True
    min_ngram: int | None = None
    max_ngram: int | None = None

    def __post_init__(self) -> None:
        methods = get_args(SpeculationMethod)
        if self.method not in methods:
            raise ConfigError(f"method must be one of {', '.join(methods)}, got {self.method!r}")
        if not isinstance(self.is_adaptive, bool):
            raise ConfigError(f"is_adaptive must be True or False, got {self.is_adaptive!r}")
        for name in ("num_draft_tokens", "min_ngram", "max_ngram"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name} must be an integer of at least 1, got {value!r}; leave it out for the default"
                )
        self._check_bundle()
        self._check_ngrams()

    @property
    def draft_limit(self) -> int:
        """Most draft tokens of a sequence in a step."""
        return self.num_draft_tokens or _NUM_DRAFT_TOKENS[self.method]

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """`min_ngram` and `max_ngram`; where only one is given, the other's default gives way."""
        low = self.min_ngram or min(_MIN_NGRAM, self.max_ngram or _MIN_NGRAM)
        return low, self.max_ngram or max(_MAX_NGRAM, low)

    def _check_bundle(self) -> None:
        if isinstance(self.draft_bundle, str):
            object.__setattr__(self, "draft_bundle", Path(self.draft_bundle))
        if self.draft_bundle is not None and not isinstance(self.draft_bundle, Path):
            raise ConfigError(f"draft_bundle must be a path, got {self.draft_bundle!r}")
        if self.method == "draft-model" and self.draft_bundle is None:
            raise ConfigError(
                "draft_bundle: method draft-model needs the bundle of the draft model (--draft-model)"
            )
        if self.method != "draft-model" and self.draft_bundle is not None:
            raise ConfigError(
                f"draft_bundle: method {self.method} uses no draft model; leave it (--draft-model) out, or use "
                "method draft-model"
            )

    def _check_ngrams(self) -> None:
        if self.method != "ngram":
            for name in ("min_ngram", "max_ngram"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} is for method ngram alone, not for {self.method}; leave it out"
                    )
        low, high = self.ngram_sizes
        if low > high:
            raise ConfigError(f"min_ngram ({low}) is above max_ngram ({high}); lower it or raise max_ngram")
