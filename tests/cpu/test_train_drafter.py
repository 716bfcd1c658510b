"""Training heads on tiny models: it learns, the files are what it learned, and texts that do not serve are refused."""

from __future__ import annotations

import io
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from pelton.compile.bundle import HostFacts
from pelton.compile.checkpoint import load_model, load_tokenizer, open_checkpoint
from pelton.compile.drafter import check_drafter, open_drafter
from pelton.compile.drafter_text import observe_target, read_documents, read_windows
from pelton.compile.progress import Progress
from pelton.compile.train_drafter import Acceptance, TrainRequest, choose_draft_tokens, train
from pelton.errors import BuildError
from pelton.plugins_trt.draft_heads import HeadConfig, read_weights
from pelton.plugins_trt.processor import has_bfloat16_products
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import DraftAsk
from pelton.runtime.speculate.heads import HeadDrafter, make_network
from support.checkpoints import VOCAB_SIZE, scripted_checkpoint, tiny_checkpoint, write_tokenizer
from support.drafters import training_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_text(tmp_path_factory.mktemp("text") / "text.jsonl")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return predictable_checkpoint(tmp_path_factory.mktemp("model"), text)


def predictable_checkpoint(path: Path, text: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A model that says after each token one of those that the text has."""
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    used = sorted({i for document in read_documents(text) for i in tokenizer.encode(document).ids})
    successor = [used[(7 * token + 11) % len(used)] for token in range(VOCAB_SIZE)]
    return scripted_checkpoint(path, successor, dtype=dtype)


def trained(
    checkpoint: Path, text: Path, output: Path, **options: object
) -> tuple[HeadConfig, Acceptance, str]:
    stream = io.StringIO()
    options = {"steps": 60, "num_draft_tokens": 2, "draft_vocab_size": VOCAB_SIZE} | options
    request = TrainRequest(str(checkpoint), (text,), output, **options)  # type: ignore[arg-type]
    config, acceptance = train(request, Progress(stream))
    return config, acceptance, stream.getvalue()


def test_heads_learn_what_the_model_says_next(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """The recurrent heads are given the token whose successor is wanted; those of medusa must guess it as well."""
    _, before, _ = trained(checkpoint, text, tmp_path / "before", steps=1)
    config, after, said = trained(checkpoint, text, tmp_path / "after", steps=150)
    assert before.agreement[0] < 0.2
    assert after.agreement[0] > 0.5
    assert after.mean_accepted > before.mean_accepted + 0.4
    assert "150 steps, loss" in said
    assert config.training["agreement"] == [round(share, 4) for share in after.agreement]
    _, medusa, _ = trained(checkpoint, text, tmp_path / "medusa", kind="medusa", steps=150)
    assert medusa.agreement[0] < after.agreement[0]


def guessed_by_the_files(directory: Path, checkpoint: Path, text: Path, dtype: torch.dtype) -> float:
    """The share of the held-out places at which the first guess of the written heads is the target's."""
    config = open_drafter(directory, "cpu").config
    opened = open_checkpoint(str(checkpoint))
    model, tokenizer = load_model(opened, torch.float32), load_tokenizer(opened)
    windows, held_out = read_windows(
        [text], tokenizer, window=512, span=3, vocab_size=VOCAB_SIZE, max_tokens=500_000, seed=0
    )
    assert len(held_out) == 2
    assert len(windows) == 38
    corpus = observe_target(model, held_out, span=3, dtype=dtype, progress=Progress(io.StringIO()))
    weights = read_weights(directory, config)
    heads = HeadDrafter(
        make_network(config, weights), weights["draft_tokens"], vocab_size=VOCAB_SIZE, min_probability=0.0
    )
    right = []
    for at in corpus.positions.tolist():
        prompt = tuple(corpus.token_ids[: at + 2].tolist())
        sequence = Sequence(Request("r", prompt, SamplingParams()))
        heads.observe(corpus.hidden, [sequence], [at])
        (guess,) = heads.propose([DraftAsk(sequence, 1)])[0].token_ids
        right.append(guess == int(corpus.likeliest[at + 1, 0]))
        heads.end(sequence)
    return float(np.mean(right))


def test_what_is_written_guesses_as_it_was_measured(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    config, acceptance, said = trained(checkpoint, text, tmp_path / "heads", steps=150)
    assert open_drafter(tmp_path / "heads", "cpu").config == config
    assert "computing in float32" not in said
    share = guessed_by_the_files(tmp_path / "heads", checkpoint, text, torch.float32)
    assert share == pytest.approx(acceptance.agreement[0], abs=1e-6)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_without_products_of_bfloat16_heads_are_computed_in_float32(
    kind: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And written in the target's dtype."""
    monkeypatch.setattr("pelton.compile.train_drafter.has_bfloat16_products", lambda: False)
    (tmp_path / "model").mkdir()
    checkpoint = predictable_checkpoint(tmp_path / "model", text, torch.bfloat16)
    config, acceptance, said = trained(checkpoint, text, tmp_path / "heads", kind=kind, steps=150)
    assert "computing in float32" in said
    weights = read_weights(tmp_path / "heads", config)
    assert {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()} == {torch.bfloat16}
    share = guessed_by_the_files(tmp_path / "heads", checkpoint, text, torch.bfloat16)
    assert share == pytest.approx(acceptance.agreement[0], abs=0.005)  # bfloat16 has ties


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
def test_products_of_bfloat16_are_known_by_the_processors_flags() -> None:
    assert has_bfloat16_products() == ("avx512_bf16" in HostFacts.detect().cpu_flags)


def test_equal_requests_give_equal_files(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        trained(checkpoint, text, tmp_path / name, steps=10, draft_vocab_size=30)
    other, _, _ = trained(checkpoint, text, tmp_path / "other", steps=10, draft_vocab_size=30, seed=1)
    first, second = (tmp_path / name / "drafter.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != (tmp_path / "other" / "drafter.safetensors").read_bytes()
    assert other.draft_vocab_size == 30


def test_the_target_is_observed_as_it_is(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("gemma2", tmp_path / "model")
    model = load_model(open_checkpoint(str(checkpoint)), torch.float32)
    random = np.random.default_rng(0)
    windows = [random.integers(0, VOCAB_SIZE, size) for size in (9, 5)]
    corpus = observe_target(model, windows, span=3, dtype=torch.float32, progress=Progress(io.StringIO()))
    assert corpus.positions.tolist() == [0, 1, 2, 3, 4, 5, 9, 10]
    with torch.no_grad():
        for ids, rows in zip(windows, (slice(0, 9), slice(9, 14)), strict=True):
            output = model(torch.from_numpy(ids)[None], output_hidden_states=True)
            torch.testing.assert_close(corpus.hidden[rows], output.hidden_states[-1][0])
            values, tokens = output.logits[0].softmax(-1).topk(16, -1)
            torch.testing.assert_close(corpus.probabilities[rows], values)
            assert torch.equal(corpus.likeliest[rows].long(), tokens)
            assert torch.equal(corpus.token_ids[rows], torch.from_numpy(ids))


def test_the_draft_vocabulary_are_the_most_frequent_tokens() -> None:
    ids = torch.tensor([5, 5, 5, 2, 2, 9])
    assert choose_draft_tokens(ids, 2, 10).tolist() == [5, 2]
    assert choose_draft_tokens(ids, 8, 10).tolist() == [5, 2, 9]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", r"text: .*empty\.txt holds no text of more than 3 tokens"),
        ("short.txt", "a", r"text: .*short\.txt holds no text of more than 3 tokens"),
        ("one.txt", "A text of one window.", "are one window of 512, and none is left to measure on"),
        (
            "bad.jsonl",
            '{"text": "fine"}\n{"text": 3}\n',
            r'bad\.jsonl: line 2 is no object with a string "text"',
        ),
        ("torn.jsonl", '{"text"', r"torn\.jsonl: line 1 is not JSON"),
        ("latin.txt", b"caf\xe9", r"latin\.txt: cannot be read as UTF-8"),
        ("missing.txt", None, r"missing\.txt: cannot be read"),
    ],
)
def test_a_text_that_does_not_serve_is_named(
    checkpoint: Path, tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BuildError, match=message):
        trained(checkpoint, path, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_text_may_come_from_a_pipe(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "text.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(text.read_bytes()))
    writer.start()
    config, _, _ = trained(checkpoint, pipe, tmp_path / "piped", steps=1)
    writer.join()
    assert config.training["num_tokens"] > 0


def test_texts_are_looked_at_before_the_model(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"missing\.txt: cannot be read"):
        trained(tmp_path / "no model", tmp_path / "missing.txt", tmp_path / "drafter")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "oracle"}, "kind: 'oracle' is unknown"),
        ({"steps": 0}, "steps: must be at least 1"),
        ({"minutes": 0.0}, "minutes: must be above 0"),
        ({"texts": ()}, "text: give at least one file"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        TrainRequest(**({"model": "m", "texts": (Path("t"),), "output": Path("o")} | options))  # type: ignore[arg-type]


def test_training_ends_with_its_minutes(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    config, _, _ = trained(checkpoint, text, tmp_path / "drafter", steps=100_000, minutes=0.02)
    assert 1 <= config.training["steps"] < 100_000


def test_an_interrupt_leaves_nothing(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "drafter"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "pelton.scripts.cli", "train-drafter", str(checkpoint), "--text", str(text),
            "-o", str(output), "--steps", "1000000",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "train eagle heads" in line:
            break
    process.send_signal(signal.SIGINT)
    said += process.stderr.read()
    assert process.wait() == 130, said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_the_written_drafter_is_for_its_model(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    from pelton.compile.build_plan import BuildRequest, resolve

    trained(checkpoint, text, tmp_path / "drafter", steps=1)
    plan = resolve(BuildRequest(str(checkpoint), drafter=tmp_path / "drafter"))
    assert plan.drafter is not None
    assert check_drafter(plan.drafter, plan.checkpoint, plan.facts) == []
    facts = json.loads((tmp_path / "drafter" / "drafter.json").read_text())
    assert facts["checkpoint_hash"] == plan.checkpoint.content_hash
