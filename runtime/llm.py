"""The Python API: `LLM(bundle).generate(prompts, params)`, `.chat(messages, params)`, `.stream(prompt, params)`."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Never, TypeGuard

from ..errors import EngineError, RequestError
from .engine import Engine, EngineConfig
from .executor import ExecutorLimits
from .load import load_engine
from .outputs import CompletionOutput, Delta, RequestOutput
from .protocol_prompt import check_role
from .request import Request, SamplingParams
from .speculate.config import SpeculationConfig
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]

_PROMPT_FORMS = 'a string, a list of token ids, {"prompt": string} or {"prompt_token_ids": list}'


class DeltaStream(Iterator[Delta]):
    """The deltas of one running request. `close`, leaving its `with` block or dropping it ends the request.

    A choice that fails while running ends with a delta of reason `error`, whose `error` says why. One thread at a
    time may read a stream.
    """

    def __init__(self, llm: LLM, request: Request, mailbox: deque[Delta]) -> None:
        self._llm = llm
        self._request_id = request.request_id
        self._mailbox = mailbox
        self._num_unfinished = request.params.n

    def __next__(self) -> Delta:
        if not self._num_unfinished:
            raise StopIteration
        while not self._mailbox:
            self._llm._pump()
        delta = self._mailbox.popleft()
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self.close()
        return delta

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the request if it still runs; there are no more deltas. Idempotent."""
        self._num_unfinished = 0
        self._llm._end(self._request_id)


class LLM:
    """A loaded bundle in this process; a context manager.

    Streams and calls may be interleaved, also from several threads: they share the engine's batch, and whichever
    steps the engine keeps the others' deltas for them.

    The options are None for the bundle's own. `max_batch_size` (sequences) and `max_step_tokens` (tokens) can be
    lowered below what the bundle was built for; `max_chunk_tokens` caps the prompt tokens of one sequence in a step;
    `kv_cache_bytes` sizes the KV pages, in bytes (the command line's `--kv-cache-memory`); `num_threads` is the
    threads of a CPU engine (`--threads`); `check_invariants` verifies the bookkeeping after every step (tests);
    `speculation` says who drafts (None: nobody); `chat_template` is the source of a Jinja template in place of the
    model's own. Raises `BundleError` if the bundle or the template cannot be used here, `ConfigError` for an option
    that cannot work with it.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        enable_prefix_caching: bool = True,
        max_batch_size: int | None = None,
        max_step_tokens: int | None = None,
        max_chunk_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        num_threads: int | None = None,
        check_invariants: bool = False,
        speculation: SpeculationConfig | None = None,
        chat_template: str | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            options = ", ".join([*(option.name for option in fields(EngineConfig)), "chat_template"])
            raise TypeError(f"LLM has no option {', '.join(unknown)}; it has {options}")
        config = EngineConfig(
            enable_prefix_caching=enable_prefix_caching,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            max_chunk_tokens=max_chunk_tokens,
            kv_cache_bytes=kv_cache_bytes,
            num_threads=num_threads,
            check_invariants=check_invariants,
            speculation=speculation,
        )
        self._start(load_engine(bundle, config, chat_template=chat_template))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Run `engine`, which nothing else may step from now on."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._request_numbers = itertools.count(1)
        self._is_closed = False
        self._mailboxes: dict[str, deque[Delta]] = {}
        self._ended: deque[str] = deque()
        # Held while the engine works and its deltas are handed out. The garbage collector may drop a stream then:
        # see `_end`.
        self._engine_lock = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, with reason `abort`, and let go of the bundle. Idempotent.

        From then on every call raises `EngineError`.
        """
        with self._engine_lock:
            if not self._is_closed:
                self._is_closed = True
                self._engine.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def limits(self) -> ExecutorLimits:
        return self._engine.limits

    @property
    def engine(self) -> Engine:
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, all in flight at once; results in the order of `prompts`.

        One `params` for all, or one for each. Raises `RequestError`, naming the field, before anything runs if a
        prompt cannot be served. A choice that fails while running ends with `finish_reason` `error` and its `error`
        says why; the others go on. Raises `EngineError` once the LLM is closed.
        """
        self._check_open()
        return self._run(
            [self._read_prompt(prompt, field) for field, prompt in _prompt_list(prompts)], params
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. `template_options` as in `Tokenizer.encode_chat`.

        Raises and ends as `generate`.
        """
        self._check_open()
        encoded = [self._encode_chat(chat, template_options) for chat in _conversation_list(messages)]
        return self._run([(None, ids) for ids in encoded], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """Complete one prompt, yielding each delta as it comes. Closing or dropping the iterator ends the request.

        Raises `RequestError` at the call, not at the first delta, and `EngineError` once the LLM is closed.
        """
        self._check_open()
        _, token_ids = self._read_prompt(prompt, "prompt")
        return self._stream(token_ids, params)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_options: Any
    ) -> DeltaStream:
        """Answer one conversation, yielding each delta as it comes; as `stream`."""
        self._check_open()
        if not _is_list(messages):
            raise RequestError(
                f"messages must be a list of messages, got {_kind(messages)}", field="messages"
            )
        return self._stream(self._encode_chat(messages, template_options), params)

    def _encode_chat(self, messages: Sequence[Message], template_options: Mapping[str, Any]) -> list[int]:
        for index, message in enumerate(messages):
            if isinstance(message, Mapping):
                check_role(message, f"messages[{index}]")
        return self.tokenizer.encode_chat(messages, **template_options)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the LLM is closed")

    def _stream(self, token_ids: list[int], params: SamplingParams | None) -> DeltaStream:
        request = self._request(token_ids, _checked_params(params, "params"))
        return DeltaStream(self, request, self._admit([request])[request.request_id])

    def _admit(self, requests: Sequence[Request]) -> dict[str, deque[Delta]]:
        """Queue `requests` and return their mailboxes by id, which `_pump` fills until `_end`.

        Raises `RequestError`; those admitted before the one at fault are then for the caller to `_end`.
        """
        mailboxes: dict[str, deque[Delta]] = {}
        with self._engine_lock:
            self._check_open()
            for request in requests:
                self._engine.admit(request)
                mailboxes[request.request_id] = self._mailboxes[request.request_id] = deque()
        self._abort_ended()
        return mailboxes

    def _pump(self) -> None:
        """Run one step and hand out its deltas; those that nobody waits for any more are dropped."""
        self._abort_ended()
        with self._engine_lock:
            for delta in self._engine.step():
                mailbox = self._mailboxes.get(delta.request_id)
                if mailbox is not None:
                    mailbox.append(delta)
        self._abort_ended()

    def _end(self, request_id: str) -> None:
        """Nobody waits for this request any more: forget it, and abort it if it runs. Idempotent.

        The garbage collector may call this at any moment. If the engine is at work, who has it work does the abort.
        """
        if self._mailboxes.pop(request_id, None) is None:
            return
        self._ended.append(request_id)
        self._abort_ended()

    def _abort_ended(self) -> None:
        """Abort what has ended, unless the engine is at work: who holds its lock calls this after letting it go."""
        while self._ended and self._engine_lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._engine.abort(self._ended.popleft())
            finally:
                self._engine_lock.release()

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        each = _params_list(params, len(prompts))
        requests = [self._request(ids, p) for (_, ids), p in zip(prompts, each, strict=True)]
        outputs = {
            request.request_id: _empty_output(request, text)
            for request, (text, _) in zip(requests, prompts, strict=True)
        }
        try:
            mailboxes = self._admit(requests)
            while mailboxes:
                self._pump()
                for request_id, mailbox in list(mailboxes.items()):
                    while mailbox:
                        _add(outputs[request_id], mailbox.popleft())
                    if outputs[request_id].finished:
                        del mailboxes[request_id]
        finally:
            for request in requests:
                self._end(request.request_id)
        return list(outputs.values())

    def _request(self, token_ids: Sequence[int], params: SamplingParams) -> Request:
        form = params.structured_output
        grammar = None if form is None else self._engine.grammars.compile(form)
        return Request(f"llm-{next(self._request_numbers)}", tuple(token_ids), params, grammar=grammar)

    def _read_prompt(self, prompt: object, field: str) -> tuple[str | None, list[int]]:
        """The prompt's text, unless it is given as ids, and its ids. Raises `RequestError` naming `field`."""
        if isinstance(prompt, Mapping):
            if prompt.keys() == {"prompt"} and isinstance(prompt["prompt"], str):
                prompt = prompt["prompt"]
            elif prompt.keys() == {"prompt_token_ids"} and _is_list(prompt["prompt_token_ids"]):
                prompt = prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not _is_list(prompt):
            raise RequestError(f"{field} must be {_PROMPT_FORMS}, got {_kind(prompt)}", field=field)
        for item in prompt:
            if not isinstance(item, Integral) or isinstance(item, bool):
                raise RequestError(f"{field}: a token id must be an integer, got {_kind(item)}", field=field)
        return None, [int(item) for item in prompt]


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """A sequence of separate things: text and bytes are none."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(repr, value)) or '(none)'}"[:200]
    return type(value).__name__


def _prompt_list(prompts: object) -> list[tuple[str, object]]:
    """One prompt or many, each with its name: a string, a dict, or a list that starts with an id, is one."""
    if isinstance(prompts, (str, Mapping)):
        return [("prompts", prompts)]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts must be {_PROMPT_FORMS}, or a list of such prompts, got {_kind(prompts)}",
            field="prompts",
        )
    if prompts and isinstance(prompts[0], Integral):
        return [("prompts", prompts)]
    return [(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _conversation_list(messages: object) -> list[Sequence[Message]]:
    """One conversation or many: a list that starts with a message is one."""
    if not _is_list(messages):
        raise RequestError(
            f"messages must be a list of messages, or a list of such lists, got {_kind(messages)}",
            field="messages",
        )
    if messages and isinstance(messages[0], Mapping):
        return [messages]
    for index, conversation in enumerate(messages):
        if not _is_list(conversation):
            field = f"messages[{index}]"
            raise RequestError(f"{field} must be a message or a list of messages", field=field)
    return list(messages)


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if not _is_list(params):
        return [_checked_params(params, "params")] * count
    if len(params) != count:
        raise RequestError(f"params: {len(params)} given for {count} prompts", field="params")
    return [_checked_params(one, f"params[{index}]") for index, one in enumerate(params)]


def _checked_params(params: object, field: str) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{field} must be SamplingParams, got {_kind(params)}", field=field)
    return params


def _empty_output(request: Request, text: str | None) -> RequestOutput:
    wants_logprobs = request.params.logprobs is not None
    return RequestOutput(
        request_id=request.request_id,
        prompt=text,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[
            CompletionOutput(i, logprobs=() if wants_logprobs else None) for i in range(request.params.n)
        ],
    )


def _add(output: RequestOutput, delta: Delta) -> None:
    choice = output.outputs[delta.index]
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    if choice.logprobs is not None:
        choice.logprobs += delta.logprobs
    output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    if delta.finish_reason is not None:
        choice.finish_reason, choice.stop_reason, choice.error = (
            delta.finish_reason,
            delta.stop_reason,
            delta.error,
        )
        output.finished = all(c.finish_reason is not None for c in output.outputs)
