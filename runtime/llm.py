"""The Python API: `LLM(bundle).generate(prompts, params)`, `.chat(messages, params)`, `.stream(prompt, params)`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import RequestError
from .engine import Engine, EngineConfig
from .executor import ExecutorLimits
from .load import load_engine
from .outputs import CompletionOutput, Delta, RequestOutput
from .request import Request, SamplingParams
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class DeltaStream(Iterator[Delta]):
    """The deltas of one running request. `close`, leaving its `with` block or dropping it ends the request."""

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
    """A loaded bundle in this process. Not thread-safe; a context manager.

    Streams and calls may be interleaved: whichever steps the engine keeps the others' deltas for them.

    `options` are those of `EngineConfig`: `enable_prefix_caching`, `max_batch_size`, `max_step_tokens`,
    `max_chunk_tokens`, `kv_cache_bytes`, `num_threads`. Raises `BundleError` if the bundle cannot run here.
    """

    def __init__(self, bundle: str | Path, **options: Any) -> None:
        self._start(load_engine(bundle, EngineConfig(**options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Run `engine`, which nothing else may step from now on."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._num_requests = 0
        self._mailboxes: dict[str, deque[Delta]] = {}
        self._ended: deque[str] = deque()
        # Held while the engine works. The garbage collector may drop a stream then: see `_end`.
        self._engine_lock = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._engine_lock:
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
        """Complete every prompt (text, or token ids), all in flight at once; results in the order of `prompts`.

        One `params` for all, or one for each. Raises `RequestError` before anything runs if a prompt cannot be
        served; a choice that fails while running ends with reason `error`, and the others go on.
        """
        return self._run([(text, self._token_ids(text)) for text in _prompt_list(prompts)], params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. `template_options` as in `Tokenizer.encode_chat`."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [self.tokenizer.encode_chat(list(c), **template_options) for c in conversations]  # type: ignore[arg-type]
        return self._run([(ids, ids) for ids in encoded], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """Complete one prompt, yielding each delta as it comes. Closing or dropping the iterator ends the request.

        Raises `RequestError` at the call, not at the first delta.
        """
        request = self._request(self._token_ids(prompt), params or SamplingParams())
        return DeltaStream(self, request, self._admit(request))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_options: Any
    ) -> DeltaStream:
        """Answer one conversation, yielding each delta as it comes; as `stream`."""
        return self.stream(self.tokenizer.encode_chat(list(messages), **template_options), params)

    def _admit(self, request: Request) -> deque[Delta]:
        """Queue `request` and return its mailbox, which `_pump` fills until `_end`. Raises `RequestError`."""
        with self._engine_lock:
            self._engine.admit(request)
        mailbox = self._mailboxes[request.request_id] = deque()
        return mailbox

    def _pump(self) -> None:
        """Run one step and hand out its deltas; those that nobody waits for any more are dropped."""
        with self._engine_lock:
            self._abort_ended()
            deltas = self._engine.step()
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                mailbox.append(delta)

    def _end(self, request_id: str) -> None:
        """Nobody waits for this request any more: forget it, and abort it if it runs. Idempotent.

        The garbage collector may call this at any moment. In the middle of an engine call the abort is left to the
        next `_pump`.
        """
        if self._mailboxes.pop(request_id, None) is None:
            return
        self._ended.append(request_id)
        if self._engine_lock.acquire(blocking=False):
            try:
                self._abort_ended()
            finally:
                self._engine_lock.release()

    def _abort_ended(self) -> None:
        while self._ended:
            self._engine.abort(self._ended.popleft())

    def _run(
        self,
        prompts: list[tuple[Prompt, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        each = _params_list(params, len(prompts))
        requests = [self._request(ids, p) for (_, ids), p in zip(prompts, each, strict=True)]
        outputs = {
            request.request_id: _empty_output(request, prompt)
            for request, (prompt, _) in zip(requests, prompts, strict=True)
        }
        try:
            mailboxes = {request.request_id: self._admit(request) for request in requests}
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
        self._num_requests += 1
        return Request(f"llm-{self._num_requests}", tuple(token_ids), params)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, or a list that starts with an id, is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"params: {len(params)} given for {count} prompts", field="params")
    return list(params)


def _empty_output(request: Request, prompt: Prompt) -> RequestOutput:
    wants_logprobs = request.params.logprobs is not None
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
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
