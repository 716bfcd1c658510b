"""`pelton generate` around a scripted engine: its limits, its conversation."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pelton.errors import PeltonError
from pelton.runtime import llm as llm_module
from pelton.runtime.llm import LLM
from pelton.runtime.request import SamplingParams
from pelton.scripts import generate as generate_script
from support.tiny_model import scripted_engine

MAX_MODEL_LEN = 64


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """What `pelton generate scripted` loads."""
    loaded = LLM.from_engine(scripted_engine(max_model_len=MAX_MODEL_LEN))
    manifest = SimpleNamespace(limits=SimpleNamespace(max_model_len=MAX_MODEL_LEN))
    monkeypatch.setattr(generate_script, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(llm_module, "LLM", lambda *_, **__: loaded)
    yield loaded
    loaded.close()


def generate(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(generate_script.command, ["scripted", *arguments], **options)


@pytest.mark.parametrize("max_tokens", [MAX_MODEL_LEN, 10**30])
def test_more_tokens_than_the_context_has_are_refused(max_tokens: int, llm: LLM) -> None:
    result = generate("hello", "--max-tokens", str(max_tokens))
    assert isinstance(result.exception, PeltonError)
    assert f"--max-tokens: the context of scripted holds {MAX_MODEL_LEN} tokens" in str(result.exception)
    assert result.stdout == ""


def test_the_default_gives_way_to_the_context(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    stream = llm.stream

    def spy(prompt: list[int], params: SamplingParams) -> Any:
        seen.append(params)
        return stream(prompt, params)

    monkeypatch.setattr(llm, "stream", spy)
    result = generate("hello")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    assert seen[0].max_tokens == MAX_MODEL_LEN - len(llm.tokenizer.encode("hello"))
    generate("hello", "--max-tokens", "3")
    assert seen[1].max_tokens == 3


@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_refused(option: str, value: str, llm: LLM) -> None:
    result = generate("hello", option, value)
    assert result.exit_code == 2
    assert option in result.stderr


def converse(llm: LLM, monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[list[dict[str, str]]]:
    """Type `lines` into a conversation; the messages of each turn that reached the model."""
    typed = iter(lines)
    turns: list[list[dict[str, str]]] = []

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    def encode_chat(messages: list[dict[str, str]]) -> list[int]:
        turns.append(list(messages))
        return [1, 2, 3]

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(llm.tokenizer, "encode_chat", encode_chat, raising=True)
    generate_script._converse(llm, [], SamplingParams(temperature=0, max_tokens=2))
    return turns


def test_an_unknown_command_is_not_sent_to_the_model(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(llm, monkeypatch, "/quit now", "/", "/exit", "unread") == []
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" is no command: ")[0] for line in said] == ["/quit", "/"]
    assert all("/reset" in line and "/exit" in line for line in said)


def test_two_slashes_send_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = converse(llm, monkeypatch, "//etc/fstab", "/reset", "a/b")
    assert [turn[-1]["content"] for turn in turns] == ["/etc/fstab", "a/b"]
    assert [len(turn) for turn in turns] == [1, 1]
