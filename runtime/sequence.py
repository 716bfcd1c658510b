"""The progress of one choice of a request: its tokens, how many are computed, its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens (`index` tells the choices of a request with n > 1 apart).

    `token_ids` is prompt then output. Positions `[0, num_computed_tokens)` have their K/V in `block_ids`
    (block i holds positions `[i * block_size, (i + 1) * block_size)`). There are no phases: a sequence is
    ready to sample when all of its tokens but none beyond are computed.
    """

    request: Request
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    is_finished: bool = False

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :]
