"""What leaves the engine: token events, deltas, and the results that `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PeltonError

FINISH_REASONS = ("stop", "length", "abort", "deadline", "error")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of `token_id`, and of the k most likely tokens, likeliest first.

    Computed on the logits as the model gave them (before penalties, bias and temperature). Values are
    finite: anything below `sampler.LOGPROB_FLOOR` is clamped to it, and masked top entries are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a sequence."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one choice of a request, ready for a client.

    `finish_reason` is None until the last delta of this index, then one of `FINISH_REASONS`. `stop_reason` is the
    stop string or stop token id that ended it (None for EOS). Counts are totals up to and including this delta.
    `prompt_logprobs` (entry 0 is None: nothing precedes it) comes once, with the first delta of index 0.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: PeltonError | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a finished request, as vLLM users know it. `error` says why a choice with reason `error` ended."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: PeltonError | None = None


@dataclass(slots=True)
class RequestOutput:
    """All choices of one prompt; `finished` is True when each has a finish reason."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
