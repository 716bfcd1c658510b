"""One API call, parsed: the engine requests it stands for and what its answer must show.

Where the OpenAI API leaves it open:

- The output limit is 16 tokens for completions, fewer where the context ends sooner, and the rest of the
  context for chats. A limit that a call sets and that does not fit beside its prompt is an error.
- `max_tokens` 0 scores a prompt: it needs `echo` or `prompt_logprobs`.
- A prompt longer than the context is an error unless `truncate_prompt_tokens` asks for its last tokens only.
- A prompt without any token is an error; an empty text where the tokenizer adds BOS is a prompt of one token.
- `best_of` samples so many choices of each prompt; the answer has the `n` whose tokens were likeliest on average.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RequestError
from ..features import unsupported_reason
from ..plugins_trt.sampling_memory import MAX_NUM_LOGPROBS
from .protocol_context import ApiContext
from .protocol_fields import Body, ChatBody, CompletionBody, read_body
from .protocol_params import sampling_params
from .protocol_prompt import (
    Prompt,
    check_token_ids,
    encode_messages,
    num_message_chars,
    read_messages,
    read_prompts,
)
from .protocol_tools import (
    AnswerFormat,
    ToolUse,
    answer_format,
    check_tool_format,
    held_form,
    num_tool_chars,
    read_tool_use,
)
from .request import MAX_NUM_CHOICES, Request, SamplingParams, check_context
from .structured import StructuredOutput

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"

MAX_NUM_CALL_CHOICES = 2048
MAX_NUM_PROMPT_LOGPROBS = 2**20
MAX_NUM_OUTPUT_LOGPROBS = 2**22
"""Bounds on the log-probabilities in one answer: some 100 bytes each, held until it is sent."""

MAX_NUM_ECHO_CHARS = 2**25

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Call:
    """`requests` has one entry per prompt, each with n choices; choice c of request r has index `r * n + c`.

    `prompt_texts` is filled when `echo` is asked for. `num_truncated_tokens` tells for each prompt how many
    tokens `truncate_prompt_tokens` cut off its front. With `num_best` the answer shows so many of a prompt's choices,
    those whose tokens were likeliest on average. `answer_format` is how the text of a chat's choices is read.
    """

    endpoint: str
    call_id: str
    model: str
    requests: tuple[Request, ...]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    prompt_texts: tuple[str, ...] = ()
    num_truncated_tokens: tuple[int, ...] = ()
    num_best: int | None = None
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)

    @property
    def is_chat(self) -> bool:
        return self.endpoint == CHAT_COMPLETIONS

    @property
    def form(self) -> StructuredOutput | None:
        """What the whole output of each choice is held to."""
        return self.requests[0].params.structured_output

    @property
    def has_logprobs(self) -> bool:
        return self.num_logprobs is not None or self.num_prompt_logprobs is not None

    @property
    def num_choices_per_prompt(self) -> int:
        return self.requests[0].params.n

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.num_choices_per_prompt


def parse_call(endpoint: str, body: Mapping[str, object], context: ApiContext, call_id: str) -> Call:
    """`read_call` and `compile_call` in one: may take some seconds."""
    return compile_call(read_call(endpoint, body, context, call_id), context)


def read_call(endpoint: str, body: Mapping[str, object], context: ApiContext, call_id: str) -> Call:
    """Validate `body` and tokenise its prompts. CPU-bound for long prompts; a `form` is not compiled yet.

    Engine request ids are `call_id` with the prompt's number. Raises `RequestError` naming the field.
    """
    if endpoint == COMPLETIONS:
        return _read_completion(read_body(CompletionBody, body), context, call_id)
    if endpoint == CHAT_COMPLETIONS:
        return _read_chat(read_body(ChatBody, body), context, call_id)
    raise RequestError(f"no endpoint {endpoint!r}; use {COMPLETIONS} or {CHAT_COMPLETIONS}", field="url")


def compile_call(call: Call, context: ApiContext) -> Call:
    """`call` with the grammar of its `form`. Waits for the compiler. Raises `RequestError` naming the field."""
    if call.form is None:
        return call
    grammar = context.compile(call.form)
    return replace(call, requests=tuple(replace(request, grammar=grammar) for request in call.requests))


def _read_completion(body: CompletionBody, context: ApiContext, call_id: str) -> Call:
    num_best = _read_best_of(body)
    _check_call(body, context)
    prompts = read_prompts(body.prompt)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    params = sampling_params(
        body,
        context.vocab_size,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if num_best is not None and body.logprobs is None else body.logprobs,
        prompt_logprobs=prompt_logprobs,
        n=body.best_of,
    )
    if params.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError(
            "max_tokens 0 scores a prompt: ask for echo or prompt_logprobs", field="max_tokens"
        )
    n_field = "n" if num_best is None else "best_of"
    if params.n * len(prompts) > MAX_NUM_CALL_CHOICES:
        raise RequestError(
            f"{n_field} ({params.n}) times the number of prompts ({len(prompts)}) is above {MAX_NUM_CALL_CHOICES}; "
            "send several calls",
            field=n_field,
        )
    limit_field = None if body.max_tokens is None else "max_tokens"
    requests, texts, cuts = [], [], []
    for index, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        token_ids, cut = _encode_prompt(prompt, body, params, context, field)
        request = _request(f"{call_id}-{index}", token_ids, params, body, context, field, limit_field)
        requests.append(request)
        cuts.append(cut)
        if body.echo:
            texts.append(prompt if isinstance(prompt, str) and not cut else _decode(request, context))
    prompt_field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    output_field = "best_of" if body.logprobs is None else "logprobs"
    _check_answer_size(requests, context, prompt_field, output_field, sum(map(len, texts)))
    return Call(
        endpoint=COMPLETIONS,
        call_id=call_id,
        model=body.model or context.model_names[0],
        requests=tuple(requests),
        stream=body.stream,
        include_usage=_includes_usage(body),
        continuous_usage=_has_continuous_usage(body),
        echo=body.echo,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        prompt_texts=tuple(texts),
        num_truncated_tokens=tuple(cuts),
        num_best=num_best,
    )


def _read_best_of(body: CompletionBody) -> int | None:
    """How many choices are shown of those that are sampled, or None for all."""
    if body.best_of is None:
        return None
    if body.n < 1:
        raise RequestError(f"n must be at least 1, got {body.n}", field="n")
    if not body.n <= body.best_of <= MAX_NUM_CHOICES:
        raise RequestError(
            f"best_of must be between n ({body.n}) and {MAX_NUM_CHOICES}, got {body.best_of}", field="best_of"
        )
    if body.best_of == body.n:
        return None
    if body.stream:
        reason = unsupported_reason("best_of", "streaming")
        raise RequestError(
            f"best_of above n cannot be streamed: {reason}; set stream: false", field="best_of"
        )
    if body.max_tokens == 0:
        raise RequestError("best_of above n ranks outputs, and max_tokens 0 asks for none", field="best_of")
    return body.n


def _read_chat(body: ChatBody, context: ApiContext, call_id: str) -> Call:
    _check_chat_options(body)
    _check_call(body, context)
    limit_field, max_tokens = _chat_limit(body)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(
        body,
        context.vocab_size,
        max_tokens=max_tokens,
        logprobs=num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    messages = read_messages(body.messages)
    use = read_tool_use(
        body.tools, body.tool_choice, body.parallel_tool_calls, context.tokenizer.chat_template
    )
    check_tool_format(context.tool_format, use)
    token_ids = _encode_chat(body, messages, use, context)
    continued = messages[-1] if body.continue_final_message else None
    is_open = context.ends_in_reasoning(token_ids, continued)
    form = held_form(use, context.tool_format, params)
    if is_open and form is not None:
        token_ids += context.end_of_reasoning
    reading = answer_format(
        use,
        context.tool_format,
        context.reasoning_format,
        is_held=form is not None,
        is_in_reasoning=is_open,
    )
    shown_ids = context.tokenizer.special_ids_of(reading.literals)
    params = replace(params, shown_special_tokens=shown_ids, structured_output=form)
    token_ids, cut = _truncate(token_ids, body, params, context)
    request = _request(f"{call_id}-0", token_ids, params, body, context, "messages", limit_field)
    output_field = "top_logprobs" if num_logprobs else "logprobs"
    _check_answer_size([request], context, "prompt_logprobs", output_field, 0)
    return Call(
        endpoint=CHAT_COMPLETIONS,
        call_id=call_id,
        model=body.model or context.model_names[0],
        requests=(request,),
        stream=body.stream,
        include_usage=_includes_usage(body),
        continuous_usage=_has_continuous_usage(body),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        num_truncated_tokens=(cut,),
        answer_format=reading,
    )


def _encode_chat(
    body: ChatBody, messages: list[dict[str, Any]], use: ToolUse, context: ApiContext
) -> list[int]:
    if body.truncate_prompt_tokens is None:
        _check_num_chars(num_message_chars(messages), context, "messages")
        _check_num_chars(num_tool_chars(use), context, "tools")
    return encode_messages(
        context.tokenizer,
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=_template_kwargs(body, context),
        tools=use.shown,
    )


def _template_kwargs(body: ChatBody, context: ApiContext) -> dict[str, Any]:
    """`chat_template_kwargs` with the variables of the template that have fields of their own."""
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    if "reasoning_effort" in body.chat_template_kwargs:
        raise RequestError(
            "reasoning_effort is in chat_template_kwargs too; send it once", field="reasoning_effort"
        )
    template = context.tokenizer.chat_template
    if template is not None and not template.has_variable("reasoning_effort"):
        raise RequestError(
            "reasoning_effort: the model's chat template has no such variable, so it is not supported",
            field="reasoning_effort",
            code="unsupported_parameter",
        )
    return {**body.chat_template_kwargs, "reasoning_effort": body.reasoning_effort}


def _chat_limit(body: ChatBody) -> tuple[str, int | None]:
    """The field that bounds the output, as the client named it, and its value (None: up to the context)."""
    limits = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(limits) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; send one of them", field="max_completion_tokens"
        )
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = max(limits, default=None)
    if limit is not None and (limit < 0 or (limit == 0 and body.prompt_logprobs is None)):
        raise RequestError(
            f"{field} must be at least 1, got {limit} (0 only with prompt_logprobs)", field=field
        )
    return field, limit


def _check_chat_options(body: ChatBody) -> None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_NUM_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_NUM_LOGPROBS}, got {body.top_logprobs}",
                field="top_logprobs",
            )


def _check_call(body: Body, context: ApiContext) -> None:
    if body.model is not None and body.model not in context.model_names:
        raise RequestError(
            f"the model {body.model[:128]!r} is not served here; there is {', '.join(context.model_names)}",
            field="model",
            code="model_not_found",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        reason = unsupported_reason("prompt_logprobs", "streaming")
        raise RequestError(
            f"prompt_logprobs cannot be streamed: {reason}; set stream: false", field="prompt_logprobs"
        )


def _has_continuous_usage(body: Body) -> bool:
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


def _includes_usage(body: Body) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _encode_prompt(
    prompt: Prompt, body: CompletionBody, params: SamplingParams, context: ApiContext, field: str
) -> tuple[list[int], int]:
    if isinstance(prompt, str):
        if body.truncate_prompt_tokens is None:
            _check_num_chars(len(prompt), context, field)
        token_ids = context.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    else:
        token_ids = prompt
    token_ids, cut = _truncate(token_ids, body, params, context)
    if len(token_ids) <= context.limits.max_model_len:
        check_token_ids(token_ids, context.vocab_size, field)
    return token_ids, cut


def _truncate(
    token_ids: list[int], body: Body, params: SamplingParams, context: ApiContext
) -> tuple[list[int], int]:
    """The last `truncate_prompt_tokens` (-1: as many as leave room for the output), and how many went."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return token_ids, 0
    max_model_len = context.limits.max_model_len
    if limit == -1:
        limit = max_model_len - (params.max_tokens if params.max_tokens is not None else 1)
    if not 1 <= limit <= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be between 1 and the context of {max_model_len} tokens, or -1",
            field="truncate_prompt_tokens",
        )
    cut = max(0, len(token_ids) - limit)
    return token_ids[cut:], cut


def _request(
    request_id: str,
    token_ids: list[int],
    params: SamplingParams,
    body: Body,
    context: ApiContext,
    field: str,
    limit_field: str | None,
) -> Request:
    """Check the prompt's length against the context. A limit that no field asked for (None) gives way."""
    if not token_ids:
        raise RequestError(f"{field} is empty: no token to start from", field=field, code="empty_prompt")
    max_model_len = context.limits.max_model_len
    check_context(len(token_ids), params, max_model_len, prompt_field=field, limit_field=limit_field)
    if limit_field is None and params.max_tokens is not None:
        params = replace(params, max_tokens=min(params.max_tokens, max_model_len - len(token_ids)))
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        params=params,
        cache_salt=body.cache_salt,
        arrival_time=time.monotonic(),
    )


def _check_answer_size(
    requests: Sequence[Request],
    context: ApiContext,
    prompt_field: str,
    output_field: str,
    num_echo_chars: int,
) -> None:
    """Bound what an answer can hold in memory, naming the field that asks for it."""
    params = requests[0].params
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    if params.prompt_logprobs is not None:  # every choice repeats them
        count = num_prompt_tokens * params.n * (params.prompt_logprobs + 1)
        _check_size("log-probabilities of prompt tokens", count, MAX_NUM_PROMPT_LOGPROBS, prompt_field)
    if params.logprobs is not None:
        room = len(requests) * context.limits.max_model_len - num_prompt_tokens
        num_tokens = room if params.max_tokens is None else min(room, len(requests) * params.max_tokens)
        count = num_tokens * params.n * (params.logprobs + 1)
        _check_size("log-probabilities of output tokens", count, MAX_NUM_OUTPUT_LOGPROBS, output_field)
    _check_size("characters of echoed prompts", num_echo_chars * params.n, MAX_NUM_ECHO_CHARS, "echo")


def _check_size(what: str, count: int, limit: int, field: str) -> None:
    if count > limit:
        raise RequestError(
            f"{field}: the answer could hold {count} {what}, more than {limit}; ask for fewer", field=field
        )


def _check_num_chars(num_chars: int, context: ApiContext, field: str) -> None:
    if num_chars > context.max_prompt_chars:
        raise RequestError(
            f"{field} ({num_chars} characters): more than the context of {context.limits.max_model_len} "
            f"tokens holds",
            field=field,
            code="context_length_exceeded",
        )


def _decode(request: Request, context: ApiContext) -> str:
    return context.tokenizer.decode(
        list(request.prompt_token_ids), skip_special_tokens=request.params.skip_special_tokens
    )
