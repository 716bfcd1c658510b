"""Log-probabilities in the shapes that clients know: OpenAI completions, OpenAI chat, vLLM's prompt ones.

A completion names tokens by their text. One that is no whole UTF-8 text is written `bytes:\\xe2\\x80`, as the
OpenAI API does, so that parts of different characters keep different names.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .outputs import TokenLogprob

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class CompletionLogprobs:
    """The `logprobs` objects of one completion choice; offsets go on from one object to the next.

    `text_offset` counts characters of the tokens' own texts; where the tokenizer drops a leading space or a
    stop string is cut, the choice's text is shorter than they are together.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def format(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """`entries[i]` belongs to `token_ids[i]`; None where nothing precedes the token."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the chosen one. Of tokens with one text, the likeliest stays."""
        named: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._num_top], (entry.token_id, entry.logprob)):
            named.setdefault(self._name(token_id), logprob)
        return named

    def _name(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice or chunk."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, *candidate) for candidate in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per position a map from token id to its log-probability, rank and text."""
    return [None if entry is None else _ranked(tokenizer, entry, num_top) for entry in entries]


def _ranked(tokenizer: Tokenizer, entry: TokenLogprob, num_top: int) -> dict[str, Any]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top[:num_top], start=1):
        ranked.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode(errors="replace"),
        }
        for token_id, (logprob, rank) in ranked.items()
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
