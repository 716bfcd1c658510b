"""What the scheduler may plan, and which requests can ever be served within it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, RequestError
from .request import Request, check_context


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the pool; token counts unless they say otherwise.

    `max_model_len` is prompt plus output of one sequence, `max_batch_size` the sequences and
    `max_step_tokens` the tokens of one step. `max_chunk_tokens` caps what one prompt gets of a step, so that
    a long one shares the step with those behind it (None: no cap but the step's). `max_logits_rows` is how many rows
    of a step may have logits before drafts cost another run of it (None: all). Raises `ConfigError`.
    """

    max_model_len: int
    max_batch_size: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    max_chunk_tokens: int | None = None
    max_logits_rows: int | None = None

    def __post_init__(self) -> None:
        names = ("max_model_len", "max_batch_size", "max_step_tokens", "block_size", "num_blocks")
        optional = ("max_chunk_tokens", "max_logits_rows")
        for name in (*names, *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.max_step_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) is below max_batch_size ({self.max_batch_size}), "
                f"but each running sequence needs a token of every step: raise the first or lower the second"
            )

    @property
    def prefill_reserve(self) -> int:
        """Tokens of a step that decoding sequences cannot take from prompts in progress.

        A prompt in progress holds one of the `max_batch_size` places, so at most the others decode.
        """
        return self.max_step_tokens - self.max_batch_size + 1

    @property
    def pool_tokens(self) -> int:
        """Tokens whose K/V the whole pool holds."""
        return self.num_blocks * self.block_size

    def token_limit(self, request: Request) -> int:
        """Prompt plus output tokens at which a sequence of `request` must end (finish reason `length`).

        The K/V of the last token is never needed, so a sequence may be one token longer than the pool.
        """
        limit = min(self.max_model_len, self.pool_tokens + 1)
        if request.params.max_tokens is None:
            return limit
        return min(limit, request.num_prompt_tokens + request.params.max_tokens)

    def check_admissible(self, request: Request) -> None:
        """Raise `RequestError` if `request` could never run to its end, even alone."""
        num_prompt_tokens, params = request.num_prompt_tokens, request.params
        if not num_prompt_tokens:
            raise RequestError("the prompt is empty: at least one token is needed", field="prompt")
        check_context(num_prompt_tokens, params, self.max_model_len)
        if num_prompt_tokens > self.pool_tokens:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, but the whole KV cache {self.pool_tokens}: "
                f"shorten the prompt, or give the engine a larger KV cache (--kv-cache-memory)",
                field="prompt",
                code="kv_cache_exceeded",
            )
        room = self.pool_tokens + 1 - num_prompt_tokens
        for field, wanted in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
            if wanted is not None and wanted > room:
                raise RequestError(
                    f"prompt ({num_prompt_tokens} tokens) and {field} ({wanted}) outgrow the whole KV cache "
                    f"({self.pool_tokens} tokens): with this prompt {field} can be {room} at most, or give the "
                    f"engine a larger KV cache (--kv-cache-memory)",
                    field=field,
                    code="kv_cache_exceeded",
                )
