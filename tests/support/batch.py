"""Small engines and files for batch job tests. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from pelton.runtime.batch.job import JobOptions
from pelton.runtime.engine import Engine, EngineConfig
from pelton.runtime.executor import ExecutorLimits
from pelton.runtime.inputs import StepInputs
from pelton.runtime.tokenizer import Tokenizer

from .scripted import NextToken, ScriptedExecutor, digest

VOCAB_SIZE = 256
LIMITS = ExecutorLimits(
    max_model_len=48, max_batch_size=4, max_step_tokens=32, block_size=4, num_blocks=64, vocab_size=VOCAB_SIZE
)
OPTIONS = JobOptions(engine_key="scripted", model_names=("scripted",))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"
)


@cache
def word_tokenizer() -> Tokenizer:
    """One token a word: `w3` ... `w255`, anything else is unknown. Token 0 is the end, which is never sampled
    unless a test scripts it."""
    words = {"<end>": 0, "<unk>": 1, "user": 2, **{f"w{i}": i for i in range(3, VOCAB_SIZE)}}
    fast = FastTokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["<end>"])
    with TemporaryDirectory() as folder:
        path = Path(folder)
        fast.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return Tokenizer.from_directory(path)


def never_end(context: Any) -> int:
    """Every token of the context decides the next one; never the end."""
    return 3 + digest(VOCAB_SIZE - 3)(context)


def make_engine(
    *,
    next_token: NextToken = never_end,
    before_step: Callable[[int, StepInputs], None] | None = None,
    after_step: Callable[[int, np.ndarray], None] | None = None,
    limits: ExecutorLimits = LIMITS,
) -> Engine:
    executor = ScriptedExecutor(next_token, limits, before_step=before_step, after_step=after_step)
    return Engine(executor, word_tokenizer(), EngineConfig(check_invariants=True), name="scripted")


def completion(custom_id: object, prompt: object = "w3 w4", **body: object) -> dict[str, object]:
    """A line for `/v1/completions`: four tokens, greedy."""
    options = {"model": "scripted", "prompt": prompt, "max_tokens": 4, "temperature": 0.0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": options}


def chat(custom_id: object, content: str = "w3 w4", **body: object) -> dict[str, object]:
    options = {
        "model": "scripted",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": content}],
        **body,
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": options}


def mixed_lines(count: int) -> list[dict[str, object]]:
    """Chats and completions, greedy and sampled, seeded and not, of one and several choices and prompts."""
    lines = []
    for i in range(count):
        prompt = f"w{i % 3 + 3} w4 w5 w6 w7 w8 w{i + 9}"
        tokens = 1 + i % 6
        kind = i % 5
        if kind == 0:
            lines.append(completion(f"id {i}", prompt, max_tokens=tokens))
        elif kind == 1:
            lines.append(chat(f"id {i}", prompt, max_tokens=tokens, temperature=1.5))
        elif kind == 2:
            lines.append(completion(f"id {i}", [prompt, prompt], max_tokens=tokens, temperature=9.0))
        elif kind == 3:
            lines.append(chat(f"id {i}", prompt, max_tokens=tokens, temperature=9.0, n=2, logprobs=True))
        else:
            lines.append(completion(f"id {i}", prompt, max_tokens=tokens, temperature=9.0, seed=i))
    return lines


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    """Strings and bytes stand as they are, other values as JSON."""
    with path.open("wb") as file:
        for line in lines:
            data = (
                line
                if isinstance(line, bytes)
                else (line if isinstance(line, str) else json.dumps(line)).encode()
            )
            file.write(data + b"\n")
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
