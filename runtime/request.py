"""What a user asked for: validated once, immutable from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from ..errors import RequestError
from ..plugins_trt.sampling_memory import MAX_NUM_LOGPROBS
from .structured import Grammar, StructuredOutput

MAX_NUM_CHOICES = 128
MAX_NUM_STOPS = 64
MAX_STOP_CHARS = 1024

LogitsProcessor = Callable[[tuple[int, ...], tuple[int, ...], np.ndarray], np.ndarray]
"""From the prompt's tokens, the output's so far and the next token's logits `[vocab_size]` float32, which it may
overwrite, to the logits in their place. A pure function: it may be asked for any position, and again.
"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; names and defaults as vLLM users know them.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off; a value above the vocabulary means the whole
    vocabulary. `max_tokens` None means as many as fit; a number that does not fit beside the prompt is refused
    when the request is admitted. `logprobs` / `prompt_logprobs` k return the chosen token's log-probability and
    the k most likely ones. `seed` makes a request's tokens a function of the request alone. `num_draft_tokens` caps
    what a drafter proposes for it in a step, 0 is no speculation (None: the engine's own number). `structured_output`
    is the form that the output must have. `logits_processors` change the logits before bias and penalties.
    `shown_special_tokens` are ids whose text stays in the output in spite of `skip_special_tokens`. Raises
    `RequestError` naming the field.
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
    num_draft_tokens: int | None = None
    structured_output: StructuredOutput | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    shown_special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, "a string or a list of strings"))
        ids = _tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        processors = _tuple("logits_processors", self.logits_processors, "a list of functions")
        object.__setattr__(self, "logits_processors", processors)
        if not all(map(callable, processors)):
            raise RequestError("logits_processors: each must be a function", field="logits_processors")
        shown = _tuple("shown_special_tokens", self.shown_special_tokens, "a list of token ids")
        object.__setattr__(self, "shown_special_tokens", shown)
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {_shown(bias)}", field="logit_bias"
            )
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(bias)))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be True or False, got {_shown(getattr(self, name))}", field=name
                )
        if not isinstance(self.structured_output, StructuredOutput | None):
            raise RequestError(
                f"structured_output must be a StructuredOutput, got {_shown(self.structured_output)}",
                field="structured_output",
            )
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
                f"min_tokens ({_shown(p.min_tokens)}) is above max_tokens ({_shown(p.max_tokens)})",
                field="min_tokens",
            )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None:
            _require_int(name, value, 0, MAX_NUM_LOGPROBS)
    if p.num_draft_tokens is not None:
        _require_int("num_draft_tokens", p.num_draft_tokens, 0, None)
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
            raise RequestError(f"logit_bias: {_shown(token_id)} is not a token id", field="logit_bias")
        _require_real("logit_bias", bias, -100.0, 100.0, label=f"logit_bias[{_shown(token_id)}]")


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_NUM_STOPS:
        raise RequestError(f"stop: at most {MAX_NUM_STOPS} strings, got {len(p.stop)}", field="stop")
    for s in p.stop:
        if not isinstance(s, str) or not s or len(s) > MAX_STOP_CHARS:
            raise RequestError(
                f"stop: each must be a string of 1 to {MAX_STOP_CHARS} characters", field="stop"
            )
    for name in ("stop_token_ids", "shown_special_tokens"):
        for t in getattr(p, name):
            if isinstance(t, bool) or not isinstance(t, int) or t < 0:
                raise RequestError(f"{name}: {_shown(t)} is not a token id", field=name)


def _require_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {_shown(value)}", field=name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bounds}, got {_shown(value)}", field=name)


def _require_real(
    name: str, value: object, low: float, high: float, *, open_low: bool = False, label: str | None = None
) -> None:
    label = label or name
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{label} must be a number, got {_shown(value)}", field=name)
    # Also refuses NaN, and integers that are too large for a float.
    if not low <= value <= high or (open_low and value == low):
        raise RequestError(
            f"{label} must be {'above' if open_low else 'from'} {low:g} up to {high:g}, got {_shown(value)}",
            field=name,
        )


def _tuple(name: str, value: Iterable[object] | None, expected: str) -> tuple[object, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} must be {expected}, got {_shown(value)}", field=name)
    return tuple(value)


def _shown(value: object) -> str:
    try:
        return repr(value)[:64]
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "one of very many digits"


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted prompt. `params.n` choices come from it, each a `Sequence` of its own.

    `cache_salt` separates prefix caches: requests share cached blocks only when their salts are equal.
    `deadline` is a `time.monotonic()` value after which the request ends with reason `deadline`. `grammar` is
    `params.structured_output` compiled.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    deadline: float | None = None
    arrival_time: float = 0.0
    grammar: Grammar | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def check_context(
    num_prompt_tokens: int,
    params: SamplingParams,
    max_model_len: int,
    *,
    prompt_field: str = "prompt",
    limit_field: str | None = "max_tokens",
) -> None:
    """Raise `RequestError` (`context_length_exceeded`) unless prompt and output fit `max_model_len` tokens.

    An output needs one token, and as many as `max_tokens` and `min_tokens` ask for; nothing is cut to fit.
    The error names the field at fault as the user wrote it; without `limit_field` nobody asked for `max_tokens`,
    and it is not looked at.
    """
    room = max_model_len - num_prompt_tokens
    holds = f"more than the context of {max_model_len} tokens holds"
    prompt = f"{prompt_field} ({num_prompt_tokens} tokens)"
    if room < 0:
        raise _too_long(f"{prompt}: {holds}", prompt_field)
    if room == 0 and params.max_tokens != 0:
        raise _too_long(f"{prompt}, and a token of output: {holds}", prompt_field)
    for name, wanted in ((limit_field, params.max_tokens), ("min_tokens", params.min_tokens)):
        if name is not None and wanted is not None and wanted > room:
            raise _too_long(
                f"{prompt} and {name} ({_shown(wanted)}): {holds}; {name} can be {room} at most", name
            )


def _too_long(message: str, field: str) -> RequestError:
    return RequestError(message, field=field, code="context_length_exceeded")
