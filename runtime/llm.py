"""The Python API: `LLM(bundle).generate(prompts, params)`, `.chat(messages, params)`, `.stream(prompt, params)`."""

from __future__ import annotations

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


class LLM:
    """A loaded bundle in this process. Not thread-safe; a context manager.

    `options` are those of `EngineConfig`: `enable_prefix_caching`, `max_batch_size`, `max_step_tokens`,
    `max_chunk_tokens`, `kv_cache_bytes`, `num_threads`. Raises `BundleError` if the bundle cannot run here.
    """

    def __init__(self, bundle: str | Path, **options: Any) -> None:
        self._engine = load_engine(bundle, EngineConfig(**options))
        self._num_requests = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
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

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt, yielding each delta as it comes. Leaving the iterator ends the request."""
        request = self._request(self._token_ids(prompt), params or SamplingParams())
        self._engine.admit(request)
        return self._deltas(request)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[Delta]:
        """Answer one conversation, yielding each delta as it comes."""
        return self.stream(self.tokenizer.encode_chat(list(messages), **template_options), params)

    def _deltas(self, request: Request) -> Iterator[Delta]:
        unfinished = set(range(request.params.n))
        try:
            while unfinished:
                for delta in self._engine.step():
                    if delta.request_id != request.request_id:
                        continue
                    if delta.finish_reason is not None:
                        unfinished.discard(delta.index)
                    yield delta
        finally:
            if unfinished:
                self._engine.abort(request.request_id)

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
            for request in requests:
                self._engine.admit(request)
            while any(not output.finished for output in outputs.values()):
                for delta in self._engine.step():
                    if delta.request_id in outputs:
                        _add(outputs[delta.request_id], delta)
        except BaseException:
            for request in requests:
                self._engine.abort(request.request_id)
            self._engine.step()
            raise
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
