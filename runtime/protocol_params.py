"""The sampling fields of a body, as `SamplingParams`."""

from __future__ import annotations

from ..errors import RequestError
from .protocol_fields import Body
from .protocol_prompt import check_token_ids
from .protocol_structured import structured_output
from .request import SamplingParams


def sampling_params(
    body: Body,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    n: int | None = None,
) -> SamplingParams:
    """Raises `RequestError` naming the field. Token ids must be below `vocab_size`. `n` None is the body's."""
    check_token_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        n=body.n if n is None else n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_read_logit_bias(body.logit_bias, vocab_size),
        stop=_read_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_str_in_output=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        max_tokens=max_tokens,
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        num_draft_tokens=body.num_draft_tokens,
        structured_output=structured_output(body),
    )


def _read_stop(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, list):
        raise RequestError("stop must be a string or a list of strings", field="stop")
    return tuple(stop)


def _read_logit_bias(bias: object, vocab_size: int) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, dict) or len(bias) > vocab_size:
        raise RequestError(
            f"logit_bias must map at most {vocab_size} token ids to numbers", field="logit_bias"
        )
    by_id = {
        int(key): value for key, value in bias.items() if key.isascii() and key.isdigit() and len(key) < 16
    }
    if len(by_id) != len(bias):
        raise RequestError(
            "logit_bias: each key must be a token id written in decimal, once", field="logit_bias"
        )
    check_token_ids(list(by_id), vocab_size, "logit_bias")
    return by_id
