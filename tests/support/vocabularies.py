"""Small tokenizers of the two kinds that language models use, made without torch and without a download."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from pelton.runtime.chat_template import ChatTemplate
from pelton.runtime.tokenizer import Tokenizer

# Characters of two, three and four bytes, combining marks, joined emoji, right-to-left text.
SCRIPTS = {
    "cjk": "日本語のテキストと汉字，混在する。",
    "thai": "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "arabic": "هذا نص عربي، مكتوب من اليمين إلى اليسار.",
    "emoji": "The family 👨‍👩‍👧‍👦 waves 👋🏽 at the 🏳️‍🌈 flag.",
    "english": "  The quick brown fox\n\tjumps over the lazy dog's 12345 bones.",
}

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not sleep at all.",
    "hi there, what is the capital of France? The capital of France is Paris. <end> of the [list] | table",
    "system user assistant tool obey hello world, hello there, world",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_backend(special: tuple[str, ...] = CHATML_SPECIAL) -> Backend:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it. Most characters beyond ASCII are several tokens."""
    return Backend.from_str(_byte_level_json(special))


def sentencepiece_backend(*, bos: bool = True) -> Backend:
    """BPE with byte fallback as Llama 2 and Mistral have it; `<s>` is put before a text if `bos`."""
    backend = Backend.from_str(_sentencepiece_json())
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return backend


def byte_level(template: str = CHATML) -> Tokenizer:
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return Tokenizer(
        byte_level_backend(),
        bos_token=names["bos_token"],
        eos_token_ids=[2],
        chat_template=ChatTemplate({"default": template}, names),
    )


def sentencepiece(template: str | None = None, *, bos: bool = True) -> Tokenizer:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        sentencepiece_backend(bos=bos),
        bos_token="<s>",
        eos_token_ids=[2],
        chat_template=None if template is None else ChatTemplate({"default": template}, names),
    )


def write_files(path: Path, backend: Backend, config: dict[str, Any], /, **files: object) -> Path:
    """Write tokenizer.json and tokenizer_config.json; `files` are further JSON files by their stem."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    for name, value in {"tokenizer_config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return path


@cache
def _byte_level_json(special: tuple[str, ...]) -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*_CORPUS, *SCRIPTS.values()], trainer)
    return backend.to_str()


@cache
def _sentencepiece_json() -> str:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Backend(models.BPE())
    trained.normalizer = normalizer
    trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = Backend(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    return backend.to_str()
