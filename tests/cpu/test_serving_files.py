"""What a bundle carries of the tokenizer: the same ids as transformers, and every token that ends a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from pelton.compile.checkpoint import open_checkpoint, write_serving_files
from pelton.runtime.tokenizer import Tokenizer
from support.checkpoints import CHATML, END_OF_TEXT, IM_END, IM_START, tiny_checkpoint

TEXTS = ["The engine reads 2024 pages.", "  two  spaces", "one<|im_end|>two", "Žluťoučký kůň 🐎", ""]


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    facts = json.loads(path.read_text())
    edit(facts)
    path.write_text(json.dumps(facts))


def served(source: Path, directory: Path) -> Path:
    directory.mkdir()
    write_serving_files(open_checkpoint(str(source)), directory)
    return directory


@pytest.mark.parametrize("in_config", [None, 7, [7, 8]])
@pytest.mark.parametrize("in_generation", ["no file", None, 9, [9, 10]])
def test_ql_07_every_eos_reaches_the_bundle(in_config: Any, in_generation: Any, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    edit_json(source / "config.json", lambda facts: facts.update(eos_token_id=in_config))
    if in_generation == "no file":
        (source / "generation_config.json").unlink()
    else:
        edit_json(source / "generation_config.json", lambda facts: facts.update(eos_token_id=in_generation))
    expected = {IM_END}
    for value in (in_config, None if in_generation == "no file" else in_generation):
        expected.update([value] if isinstance(value, int) else value or [])
    directory = served(source, tmp_path / "bundle")
    assert Tokenizer.from_directory(directory).eos_token_ids == expected
    assert (directory / "generation_config.json").exists() == (in_generation != "no file")


def test_ql_07_generation_settings_are_kept_whole(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    edit_json(source / "generation_config.json", lambda facts: facts.update(temperature=0.6, do_sample=True))
    facts = json.loads((served(source, tmp_path / "bundle") / "generation_config.json").read_text())
    assert (facts["temperature"], facts["eos_token_id"]) == (0.6, [IM_END, END_OF_TEXT])


@pytest.mark.parametrize("in_tokenizer", [False, True])
@pytest.mark.parametrize("in_config", [False, True])
def test_ids_equal_transformers_whichever_file_asks_for_bos(
    in_tokenizer: bool, in_config: bool, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    edit_json(source / "tokenizer_config.json", lambda facts: facts.update(add_bos_token=in_config))
    if in_tokenizer:
        tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
        )
        tokenizer.save(str(source / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(source)
    written = Tokenizer.from_directory(served(source, tmp_path / "bundle"))
    for text in TEXTS:
        assert written.encode(text) == reference(text)["input_ids"]
    assert (written.encode("a")[0] == IM_START) == in_tokenizer
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert written.encode_chat(messages) == chat


def test_stored_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(source / "tokenizer.json"))
    written = tokenizers.Tokenizer.from_file(str(served(source, tmp_path / "bundle") / "tokenizer.json"))
    assert (written.truncation, written.padding) == (None, None)


def test_the_chat_template_comes_along_wherever_it_was(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source")
    assert (served(source, tmp_path / "one") / "chat_template.jinja").read_text() == CHATML
    (source / "chat_template.jinja").unlink()
    assert not (served(source, tmp_path / "two") / "chat_template.jinja").exists()
    edit_json(source / "tokenizer_config.json", lambda facts: facts.update(chat_template=CHATML))
    assert (served(source, tmp_path / "three") / "chat_template.jinja").read_text() == CHATML


def test_nothing_but_the_served_files_is_written(tmp_path: Path) -> None:
    directory = served(tiny_checkpoint("llama", tmp_path / "source"), tmp_path / "bundle")
    assert {path.name for path in directory.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_vocabulary_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen2", tmp_path / "source")
    facts = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(facts["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in facts["model"]["merges"])
    (source / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    edit_json(source / "tokenizer_config.json", lambda config: config.update(tokenizer_class="GPT2Tokenizer"))
    written = Tokenizer.from_directory(served(source, tmp_path / "bundle"))
    reference = AutoTokenizer.from_pretrained(source)
    for text in TEXTS:
        assert written.encode(text) == reference(text)["input_ids"]
