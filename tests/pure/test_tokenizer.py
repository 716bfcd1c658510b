"""Encoding, decoding and loading of tokenizers."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from pelton.errors import BundleError, RequestError
from pelton.runtime.detokenizer import Detokenizer
from pelton.runtime.request import SamplingParams
from pelton.runtime.tokenizer import Tokenizer
from support.vocabularies import (
    CHATML,
    SCRIPTS,
    byte_level,
    byte_level_backend,
    sentencepiece,
    sentencepiece_backend,
    write_files,
)

BOS = 1
CONFIG = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_encode_and_decode_are_inverse(script: str) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        assert tokenizer.decode(tokenizer.encode(SCRIPTS[script])) == SCRIPTS[script]


def test_tc_01_bos_of_a_prompt_by_the_tokenizers_rule_and_never_twice() -> None:
    with_bos, without = sentencepiece(bos=True), sentencepiece(bos=False)
    plain = without.encode("hello world")
    assert BOS not in plain
    assert with_bos.encode("hello world") == [BOS, *plain]
    assert with_bos.encode("hello world", add_special_tokens=False) == plain
    written = without.encode("<s>hello world")
    assert written[0] == BOS
    assert BOS not in written[1:]
    assert with_bos.encode("<s>hello world") == written
    # Two that the client wrote are two.
    assert with_bos.encode("<s><s>hello") == without.encode("<s><s>hello")
    assert with_bos.encode("<s><s>hello").count(BOS) == 2
    # An empty prompt is a BOS-only run, or nothing.
    assert with_bos.encode("") == [BOS]
    assert without.encode("") == []
    assert with_bos.encode("<s>") == [BOS]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"]
)
def test_tc_01_a_chat_has_the_bos_of_its_template_alone(bos: bool, template: str) -> None:
    tokenizer = sentencepiece(template, bos=bos)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert ids.count(BOS) == ("bos_token" in template)
    assert tokenizer.decode(ids) == "hello"


def test_invalid_unicode_names_the_field() -> None:
    with pytest.raises(RequestError) as caught:
        byte_level().encode("a\ud800")
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError) as caught:
        byte_level().encode_chat([{"role": "user", "content": "a\ud800"}])
    assert caught.value.field == "messages"


def test_token_text_and_bytes_show_special_tokens_and_parts_of_characters() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
    ids = tokenizer.encode("👨")
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "👨".encode()
    assert "\ufffd" in tokenizer.token_text(ids[0])
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


def test_tc_07_one_tokenizer_serves_150_threads() -> None:
    """Chats with and without control-token text, prompts, decoding and stop strings at once."""
    tokenizer = byte_level(CHATML)
    texts = [*SCRIPTS.values(), "a <|im_end|> b", "a < b"]

    def client(number: int) -> tuple[Any, ...]:
        text = texts[number % len(texts)] * 3
        chat = tokenizer.encode_chat([{"role": "user", "content": text}])
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("bones", "話")))
        step = detokenizer.push(ids)
        return chat, ids, ids[:5], tokenizer.decode(ids), step, detokenizer.finish()

    with ThreadPoolExecutor(150) as pool:
        answers = list(pool.map(client, range(600)))
    fresh = [client(number) for number in range(len(texts))]
    assert answers == [fresh[number % len(texts)] for number in range(600)]


def test_saved_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    write_files(tmp_path, backend, CONFIG)
    text = SCRIPTS["english"]
    assert Tokenizer.from_directory(tmp_path).encode(text) == byte_level().encode(text)


EOS_CHOICES = list(
    itertools.product(
        [None, 5, [5, 6]], [None, 7, [7, 5]], [None, "<|im_end|>", {"content": "<|im_end|>", "special": True}]
    )
)


@pytest.mark.parametrize(("config", "generation", "token"), EOS_CHOICES)
def test_ql_07_eos_ids_are_the_union_of_all_files(
    tmp_path: Path, config: int | list[int] | None, generation: int | list[int] | None, token: object
) -> None:
    files = {
        name: {"eos_token_id": value, "temperature": 0.5}
        for name, value in (("config", config), ("generation_config", generation))
        if value is not None
    }
    write_files(tmp_path, byte_level_backend(), {} if token is None else {"eos_token": token}, **files)
    expected = {2} if token is not None else set()
    for value in (config, generation):
        expected |= set(value if isinstance(value, list) else [] if value is None else [value])
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == expected


def test_ql_07_eos_of_a_multimodal_config_and_of_no_config_at_all(tmp_path: Path) -> None:
    write_files(tmp_path, byte_level_backend(), {}, config={"text_config": {"eos_token_id": [3, 4]}})
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == {3, 4}
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("hello")


def test_tokens_that_a_config_names_are_special(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<pause>", "<think>", "<tool>"])
    config = {
        "eos_token": "<pause>",
        "extra_special_tokens": ["<think>"],
        "pad_token": "<nowhere>",
        "additional_special_tokens": [{"content": "<tool>"}],
    }
    tokenizer = Tokenizer.from_directory(write_files(tmp_path, backend, config))
    named = [backend.token_to_id(token) for token in ("<pause>", "<think>", "<tool>")]
    assert tokenizer.special_token_ids == {0, 1, 2, *named}
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_special_tokens_map_is_read_where_the_config_lists_no_tokens(tmp_path: Path) -> None:
    maps = {"special_tokens_map": {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|im_start|>"}}}
    tokenizer = Tokenizer.from_directory(write_files(tmp_path / "a", byte_level_backend(), {}, **maps))
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ({0}, 1)
    config = {"added_tokens_decoder": {}, "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer.from_directory(write_files(tmp_path / "b", byte_level_backend(), config, **maps))
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ({2}, None)


def test_vocab_size_counts_up_to_the_largest_id() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(backend).vocab_size == 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("generation_config.json", "[]", "JSON object"),
        ("chat_template.jinja", "{% if %}", "line 1"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    write_files(tmp_path, byte_level_backend(), CONFIG)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(BundleError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_chat_templates_of_files_win_over_the_config(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    config = {**CONFIG, "chat_template": "config {{ messages[0].content }}"}
    write_files(tmp_path, byte_level_backend(), config)

    def rendered(**kwargs: Any) -> str:
        tokenizer = Tokenizer.from_directory(tmp_path)
        return tokenizer.decode(tokenizer.encode_chat(chat, **kwargs))

    assert rendered() == "config x"
    named = [
        {"name": "default", "template": "default {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools {{ tools|length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}), "utf-8")
    assert rendered() == "default x"
    assert rendered(tools=[{}]) == "tools 1"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}", "utf-8")
    assert rendered() == "file x"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "extra {{ tools|length }}", "utf-8"
    )
    assert rendered(tools=[{}]) == "extra 1"


def test_a_model_without_a_template_refuses_chats() -> None:
    tokenizer = sentencepiece(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert (caught.value.field, caught.value.code) == ("messages", "chat_template_missing")


def test_sentencepiece_chat_decodes_to_what_was_rendered() -> None:
    tokenizer = sentencepiece("{{ bos_token }}[INST] {{ messages[0].content }} [/INST]")
    ids = tokenizer.encode_chat([{"role": "user", "content": SCRIPTS["cjk"]}])
    assert tokenizer.decode(ids) == f"[INST] {SCRIPTS['cjk']} [/INST]"
    assert sentencepiece_backend().token_to_id("<s>") == ids[0]
