"""What a user asked for: validated once, immutable from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..errors import RequestError

MAX_NUM_CHOICES = 128
MAX_NUM_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_NUM_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; names and defaults as vLLM users know them.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off; a value above the vocabulary means the whole
    vocabulary. `max_tokens` None means up to the context limit. `logprobs` / `prompt_logprobs` k return the
    chosen token's log-probability and the k most likely ones. `seed` makes a request's tokens a function of
    the request alone. Raises `RequestError` naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias or {})))
        _check_counts(self)
        _check_reals(self)
        _check_stops(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_counts(p: SamplingParams) -> None:
    _require_int("n", p.n, 1, MAX_NUM_CHOICES)
    _require_int("top_k", p.top_k, -1, None)
    _require_int("min_tokens", p.min_tokens, 0, None)
    if p.max_tokens is not None:
        _require_int("max_tokens", p.max_tokens, 0, None)
        if p.min_tokens > p.max_tokens:
            raise RequestError(
                f"min_tokens ({p.min_tokens}) is above max_tokens ({p.max_tokens})", field="min_tokens"
            )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None:
            _require_int(name, value, 0, MAX_NUM_LOGPROBS)
    if p.seed is not None:
        _require_int("seed", p.seed, -(2**63), 2**64 - 1)


def _check_reals(p: SamplingParams) -> None:
    _require_real("temperature", p.temperature, 0.0, 100.0)
    _require_real("top_p", p.top_p, 0.0, 1.0, open_low=True)
    _require_real("min_p", p.min_p, 0.0, 1.0)
    _require_real("repetition_penalty", p.repetition_penalty, 0.0, 100.0, open_low=True)
    _require_real("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _require_real("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    for token_id, bias in p.logit_bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise RequestError(f"logit_bias: {token_id!r} is not a token id", field="logit_bias")
        _require_real("logit_bias", bias, -100.0, 100.0)


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_NUM_STOPS:
        raise RequestError(f"stop: at most {MAX_NUM_STOPS} strings, got {len(p.stop)}", field="stop")
    for s in p.stop:
        if not isinstance(s, str) or not s or len(s) > MAX_STOP_CHARS:
            raise RequestError(
                f"stop: each must be a string of 1 to {MAX_STOP_CHARS} characters", field="stop"
            )
    for t in p.stop_token_ids:
        if isinstance(t, bool) or not isinstance(t, int) or t < 0:
            raise RequestError(f"stop_token_ids: {t!r} is not a token id", field="stop_token_ids")


def _require_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", field=name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bounds}, got {value}", field=name)


def _require_real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, got {value!r}", field=name)
    # Also refuses NaN, and integers that are too large for a float.
    if not low <= value <= high or (open_low and value == low):
        raise RequestError(
            f"{name} must be {'above' if open_low else 'from'} {low:g} up to {high:g}, got {value!r:.32}",
            field=name,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted prompt. `params.n` choices come from it, each a `Sequence` of its own.

    `cache_salt` separates prefix caches: requests share cached blocks only when their salts are equal.
    `deadline` is a `time.monotonic()` value after which the request ends with reason `deadline`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    deadline: float | None = None
    arrival_time: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
