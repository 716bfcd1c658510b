"""What goes with what: the one list of combinations that Pelton refuses, and why.

Whoever refuses a combination takes the reason from here, and the table in the README is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator

TARGETS = ("cpu", "cuda", "tensorrt", "tensorrt-rtx")

FEATURES = (
    *TARGETS,
    "quantised weights",
    "one-byte KV pages",
    "prefix caching",
    "chunked prefill",
    "preemption",
    "ngram drafts",
    "suffix drafts",
    "draft model",
    "drafter heads",
    "sampling",
    "seed",
    "penalties, bias, min_tokens, stop",
    "logprobs",
    "prompt_logprobs",
    "n",
    "best_of",
    "logits_processors",
    "structured output",
    "tool calls (auto)",
    "tool calls (enforced)",
    "streaming",
    "pelton batch",
)

_GPU_TARGETS = ("cuda", "tensorrt", "tensorrt-rtx")
_DRAFTERS = ("ngram drafts", "suffix drafts", "draft model", "drafter heads")
_CALLS = ("tool calls (auto)", "tool calls (enforced)")

# (one, others, why none of the others goes with it)
_REFUSED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    *((target, TARGETS, "a bundle is built for one target") for target in TARGETS),
    *((drafter, _DRAFTERS, "an engine has one drafter") for drafter in _DRAFTERS),
    ("tool calls (auto)", ("tool calls (enforced)",), "tool_choice is one of them"),
    ("quantised weights", ("cpu",), "the cpu target has no quantised kernels yet"),
    ("one-byte KV pages", ("cpu",), "the cpu target keeps pages in the model's own dtype"),
    (
        "draft model",
        (*_GPU_TARGETS, "quantised weights", "one-byte KV pages"),
        "draft models run on target cpu alone so far",
    ),
    (
        "drafter heads",
        (*_GPU_TARGETS, "quantised weights", "one-byte KV pages"),
        "only engines of target cpu give the hidden states that heads read",
    ),
    ("best_of", ("streaming",), "the best outputs are known when all have ended"),
    ("best_of", _CALLS, "it is a field of completions, tools are of chats"),
    ("prompt_logprobs", ("streaming",), "they come as a whole, beside the text"),
    ("structured output", _CALLS, "an answer of this form has no place for calls"),
    (
        "logits_processors",
        ("pelton batch", "best_of", *_CALLS),
        "they are Python functions, which neither a request over HTTP nor a line of a batch can carry",
    ),
    ("pelton batch", ("streaming",), "its results are lines of a file"),
)


def unsupported_reason(first: str, second: str) -> str | None:
    """Why two of `FEATURES` cannot be used together; None where they can."""
    for name in (first, second):
        if name not in FEATURES:
            raise ValueError(f"{name!r} is no feature; there are {', '.join(FEATURES)}")
    for one, others, reason in _REFUSED:
        if first != second and ((first == one and second in others) or (second == one and first in others)):
            return reason
    return None


def refused_pairs() -> Iterator[tuple[str, str, str]]:
    """Every pair that is refused, in the order of `FEATURES`, with its reason."""
    for index, first in enumerate(FEATURES):
        for second in FEATURES[index + 1 :]:
            reason = unsupported_reason(first, second)
            if reason is not None:
                yield first, second, reason
