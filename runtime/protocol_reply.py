"""From deltas to the answer of a call: stream chunks or one response body, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import EngineError, PeltonError
from .outputs import Delta, TokenLogprob
from .protocol_call import Call
from .protocol_context import ApiContext
from .protocol_logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from .protocol_message import MessageBuilder, rank_by_mean


@dataclass(slots=True)
class _Choice:
    message: MessageBuilder
    logprob_format: CompletionLogprobs | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_started: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0


@dataclass(slots=True)
class _Prompt:
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    held: list[Delta] = field(default_factory=list)


class Reply:
    """Gathers the deltas of `call`. `created` is Unix time in seconds.

    Finish reasons are OpenAI's `stop`, `length` and `tool_calls`, and `deadline` where a request had one. An
    engine error or an abort sets `error` and ends the call: it has no body then, and aborting its other requests
    is up to the caller. Log-probabilities have an entry for every sampled token, so also for an ending one that the
    text does not show, as in vLLM. Extensions to OpenAI's objects: `stop_reason` (vLLM's), and
    `truncated_prompt_tokens` on each choice whose prompt was cut as `truncate_prompt_tokens` asked (when
    streaming: on its first chunk).
    """

    def __init__(self, call: Call, context: ApiContext, created: int) -> None:
        self.call = call
        self.error: PeltonError | None = None
        self._tokenizer = context.tokenizer
        self._created = created
        self._prompts = [_Prompt() for _ in call.requests]
        self._choices = [
            _Choice(MessageBuilder(call.answer_format, call.call_id, index), self._logprob_format())
            for index in range(call.num_choices)
        ]
        self._num_unfinished = call.num_choices
        self._number_of_request = {request.request_id: i for i, request in enumerate(call.requests)}

    @property
    def is_done(self) -> bool:
        return self._num_unfinished == 0 or self.error is not None

    def feed(self, delta: Delta) -> list[dict[str, Any]]:
        """Take the next delta; return the chunks to send now (none unless the call streams)."""
        if self.is_done:
            return []
        if delta.error is not None or delta.finish_reason in ("error", "abort"):
            self.error = delta.error or EngineError("the request was aborted")
            return []
        number = self._number_of_request[delta.request_id]
        prompt = self._prompts[number]
        prompt.num_cached_tokens = max(prompt.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            prompt.logprobs = delta.prompt_logprobs
        if not self.call.stream:
            self._gather(self._index(number, delta), delta)
            return []
        prompt.held.append(delta)
        if self._echoes_logprobs and prompt.logprobs is None:
            return []  # they come with choice 0, and every choice starts with them
        deltas, prompt.held = prompt.held, []
        return [chunk for held in deltas for chunk in self._stream(number, held)]

    def body(self) -> dict[str, Any]:
        """The whole response. Only when `is_done` and without `error`."""
        choices: list[dict[str, Any]] = []
        for number in range(len(self._prompts)):
            for choice in self._shown_choices(number):
                shown = self._chat_choice(choice) if self.call.is_chat else self._text_choice(choice, number)
                ending = {**self._ending(choice), **self._truncation(number)}
                if not self.call.is_chat and self.call.num_prompt_logprobs is not None:
                    ending["prompt_logprobs"] = self._prompt_logprobs(number, self.call.num_prompt_logprobs)
                choices.append({"index": len(choices), **shown, **ending})
        body = self._envelope("chat.completion" if self.call.is_chat else "text_completion", choices)
        body["usage"] = self._usage()
        if self.call.is_chat and self.call.num_prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(0, self.call.num_prompt_logprobs)
        return body

    def _shown_choices(self, number: int) -> list[_Choice]:
        """The choices of a prompt that the answer has, in its order."""
        size = self.call.num_choices_per_prompt
        choices = self._choices[number * size : (number + 1) * size]
        if self.call.num_best is None:
            return choices
        ranked = rank_by_mean([entry.logprob for entry in choice.logprobs] for choice in choices)
        return [choices[rank] for rank in ranked[: self.call.num_best]]

    @property
    def _echoes_logprobs(self) -> bool:
        return self.call.echo and self.call.num_logprobs is not None

    def _logprob_format(self) -> CompletionLogprobs | None:
        call = self.call
        if call.is_chat or call.num_logprobs is None:
            return None
        skip_special_tokens = call.requests[0].params.skip_special_tokens
        return CompletionLogprobs(self._tokenizer, call.num_logprobs, skip_special_tokens=skip_special_tokens)

    def _index(self, number: int, delta: Delta) -> int:
        return number * self.call.num_choices_per_prompt + delta.index

    def _gather(self, index: int, delta: Delta) -> _Choice:
        choice = self._choices[index]
        choice.num_output_tokens = delta.num_output_tokens
        if not self.call.stream:
            choice.logprobs.extend(delta.logprobs)
            if self.call.is_chat:
                choice.message.feed(delta.text, is_last=delta.finish_reason is not None)
            else:
                choice.texts.append(delta.text)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            self._num_unfinished -= 1
        return choice

    def _stream(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        index = self._index(number, delta)
        choice = self._gather(index, delta)
        shown = (
            self._chat_deltas(choice, delta)
            if self.call.is_chat
            else self._text_deltas(choice, delta, number)
        )
        if shown and not choice.is_started:
            shown[0].update(self._truncation(number))
            choice.is_started = True
        kind = "chat.completion.chunk" if self.call.is_chat else "text_completion"
        chunks = [self._envelope(kind, [{"index": index, **each}]) for each in shown]
        if self.call.include_usage or self.call.continuous_usage:
            usage = self._usage() if self.call.continuous_usage else None
            for chunk in chunks:
                chunk["usage"] = usage
        if self.is_done and self.call.include_usage:
            chunks.append({**self._envelope(kind, []), "usage": self._usage()})
        return chunks

    def _chat_deltas(self, choice: _Choice, delta: Delta) -> list[dict[str, Any]]:
        """The role alone, then what the text holds, then the finish reason with an empty delta: the order OpenAI keeps.

        Log-probabilities of text that the parser holds back go with what comes next.
        """
        shown: list[dict[str, Any]] = []
        nothing = {"logprobs": None, "finish_reason": None}
        if not choice.is_started:
            shown.append({"delta": choice.message.first_delta, **nothing})
        is_last = choice.finish_reason is not None
        parts = choice.message.feed(delta.text, is_last=is_last)
        if self.call.num_logprobs is not None:
            choice.logprobs.extend(delta.logprobs)
            if choice.logprobs and not parts and (is_last or self.call.answer_format.is_plain):
                parts = [{"content": ""}]
        for part in parts:
            shown.append(
                {"delta": part, "logprobs": self._chat_logprobs(choice.logprobs), "finish_reason": None}
            )
            choice.logprobs = []
        if is_last:
            shown.append({"delta": {}, "logprobs": None, **self._ending(choice)})
        return shown

    def _text_deltas(self, choice: _Choice, delta: Delta, number: int) -> list[dict[str, Any]]:
        echo = self.call.echo and not choice.is_started
        text, token_ids, entries = self._text_part(number, delta.text, delta.logprobs, echo=echo)
        if not (text or entries or choice.finish_reason):
            return []
        shown = None
        if choice.logprob_format is not None and entries:
            shown = choice.logprob_format.format(token_ids, entries)
        return [{"text": text, "logprobs": shown, **self._ending(choice)}]

    def _text_choice(self, choice: _Choice, number: int) -> dict[str, Any]:
        text = "".join(choice.texts)
        text, token_ids, entries = self._text_part(number, text, choice.logprobs, echo=self.call.echo)
        logprob_format = self._logprob_format()
        logprobs = logprob_format.format(token_ids, entries) if logprob_format is not None else None
        return {"text": text, "logprobs": logprobs}

    def _text_part(
        self, number: int, text: str, logprobs: Sequence[TokenLogprob], *, echo: bool
    ) -> tuple[str, list[int], list[TokenLogprob | None]]:
        """Text, token ids and log-probabilities of a part of the output, after the prompt's if `echo`."""
        token_ids = [entry.token_id for entry in logprobs]
        if not echo:
            return text, token_ids, [*logprobs]
        text = self.call.prompt_texts[number] + text
        if not self._echoes_logprobs:
            return text, token_ids, [*logprobs]
        prompt_ids = self.call.requests[number].prompt_token_ids
        return text, [*prompt_ids, *token_ids], [*(self._prompts[number].logprobs or ()), *logprobs]

    def _chat_choice(self, choice: _Choice) -> dict[str, Any]:
        return {"message": choice.message.message(), "logprobs": self._chat_logprobs(choice.logprobs)}

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self.call.num_logprobs is None else chat_logprobs(self._tokenizer, entries)

    def _ending(self, choice: _Choice) -> dict[str, Any]:
        reason = choice.finish_reason
        if self.call.is_chat:
            reason = choice.message.finish_reason(reason)
        return {"finish_reason": reason, "stop_reason": choice.stop_reason}

    def _truncation(self, number: int) -> dict[str, int]:
        cut = self.call.num_truncated_tokens[number] if self.call.num_truncated_tokens else 0
        return {"truncated_prompt_tokens": cut} if cut else {}

    def _prompt_logprobs(self, number: int, num_top: int) -> list[dict[str, Any] | None]:
        """On each choice of a completion, on the response of a chat: where vLLM puts them."""
        return prompt_logprobs(self._tokenizer, self._prompts[number].logprobs or (), num_top)

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens = sum(request.num_prompt_tokens for request in self.call.requests)
        num_output_tokens = sum(choice.num_output_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(p.num_cached_tokens for p in self._prompts)},
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.call.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.call.call_id}",
            "object": kind,
            "created": self._created,
            "model": self.call.model,
            "choices": choices,
        }
