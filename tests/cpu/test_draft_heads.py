"""Drafts of heads: the arithmetic against one written out plainly, lengths, cuts, draws and what is remembered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pelton.errors import BundleError
from pelton.plugins_trt.draft_heads import HeadConfig, read_config, read_weights
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence
from pelton.runtime.speculate.draft import NO_DRAFT, DraftAsk
from pelton.runtime.speculate.heads import HeadDrafter, has_fast_bfloat16, make_network
from support.drafters import head_config, random_drafter, random_weights


def sequence(token: int, *, index: int = 0, temperature: float = 0.0, seed: int = 0) -> Sequence:
    return Sequence(Request("r", (7, token), SamplingParams(temperature=temperature, seed=seed)), index)


def drafter(config: HeadConfig, weights: dict[str, Tensor], **options: object) -> HeadDrafter:
    options = {"min_probability": 0.0} | options
    network = make_network(config, weights)
    return HeadDrafter(network, weights["draft_tokens"], vocab_size=config.vocab_size, **options)  # type: ignore[arg-type]


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean() + 1e-6)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def plain_draft(
    config: HeadConfig, weights: dict[str, Tensor], hidden: Tensor, token: int
) -> list[np.ndarray]:
    """Distributions over the draft vocabulary of each place, in float64, one sequence at a time, after the likeliest
    tokens before it."""
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    state, distributions = hidden.double().numpy(), []
    for place in range(config.num_draft_tokens):
        if config.kind == "medusa":
            read = state + silu(w["block"][place] @ state + w["bias"][place])
        else:
            mixed = w["mix"] @ norm(state, w["norm_in"]) + w["token_table"][token]
            inner = w["gate_up"] @ norm(mixed, w["norm_mlp"])
            gate, up = np.split(inner, 2)
            read = state = norm(mixed + w["down"] @ (silu(gate) * up), w["norm_out"])
        scores = w["head"] @ read
        distributions.append(np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum())
        token = int(weights["draft_tokens"][scores.argmax()])
    return distributions


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_batch_gets_the_tokens_of_the_plain_arithmetic(kind: str) -> None:
    config = head_config(kind)
    weights = random_weights(config)
    hidden = torch.randn(6, config.hidden_size, generator=torch.Generator().manual_seed(3))
    sequences, rows = [sequence(token) for token in (4, 31, 49)], [5, 0, 2]
    heads = drafter(config, weights)
    heads.observe(hidden, sequences, rows)
    drafts = heads.propose([DraftAsk(s, n) for s, n in zip(sequences, (3, 1, 2), strict=True)])
    for s, row, length, draft in zip(sequences, rows, (3, 1, 2), drafts, strict=True):
        expected = plain_draft(config, weights, hidden[row], s.token_ids[-1])
        likeliest = [int(weights["draft_tokens"][p.argmax()]) for p in expected]
        assert list(draft.token_ids) == likeliest[:length]
        assert draft.probs is None
    assert heads.propose([DraftAsk(sequences[1], 1)])[0].token_ids == drafts[1].token_ids, (
        "it has not moved on"
    )


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_draft_ends_before_the_first_place_that_is_unsure(kind: str) -> None:
    config = head_config(kind)
    weights = random_weights(config, seed=1)
    hidden = torch.randn(16, config.hidden_size, generator=torch.Generator().manual_seed(5))
    sequences = [sequence(token) for token in range(16)]
    heads = drafter(config, weights, min_probability=0.6)
    heads.observe(hidden, sequences, range(16))
    drafts = heads.propose([DraftAsk(s, 3) for s in sequences])
    lengths = []
    for s, row, draft in zip(sequences, hidden, drafts, strict=True):
        sure = [p.max() >= 0.6 for p in plain_draft(config, weights, row, s.token_ids[-1])]
        assert len(draft) == ([*sure, False]).index(False)
        lengths.append(len(draft))
    assert {0, 3} < set(lengths), "the case does not tell cut drafts from whole ones"


def test_the_recurrent_heads_guess_further_than_they_were_trained_and_the_others_do_not() -> None:
    for kind, length in (("eagle", 7), ("medusa", 3)):
        config = head_config(kind)
        heads = drafter(config, random_weights(config))
        s = sequence(4)
        heads.observe(torch.ones(1, config.hidden_size), [s], [0])
        assert len(heads.propose([DraftAsk(s, 7)])[0]) == length


def test_without_the_newest_state_there_is_no_draft() -> None:
    config = head_config()
    heads = drafter(config, random_weights(config))
    hidden = np.ones((2, config.hidden_size), np.float32)
    first, second = sequence(4), sequence(5)
    assert heads.propose([DraftAsk(first, 2)]) == [NO_DRAFT]
    heads.observe(hidden, [first, second], [0, 1])
    drafts = heads.propose([DraftAsk(second, 2), DraftAsk(first, 2)])
    assert [len(draft) for draft in drafts] == [2, 2]
    first.token_ids.append(9)
    assert [len(d) for d in heads.propose([DraftAsk(first, 2), DraftAsk(second, 2)])] == [0, 2]
    heads.observe(hidden, [first], [0])
    assert len(heads.propose([DraftAsk(first, 2)])[0]) == 2
    heads.end(first)
    heads.end(first)
    assert heads.propose([DraftAsk(first, 2)]) == [NO_DRAFT]
    assert heads.propose([DraftAsk(second, 2)]) == [NO_DRAFT]  # was not in the last step
    heads.observe(hidden, [sequence(6), second], [0, 1])
    assert heads.propose([DraftAsk(second, 2)])[0].token_ids == drafts[0].token_ids


def test_drawn_tokens_follow_the_distribution_that_comes_with_them() -> None:
    config = head_config(draft_vocab_size=4)
    weights = random_weights(config, seed=2)
    weights["head"] *= 0.2
    hidden = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(1))
    heads = drafter(config, weights)
    counts: Counter[int] = Counter()
    expected = plain_draft(config, weights, hidden[0], 4)[0] ** (1 / 0.7)
    expected /= expected.sum()
    size = 3000
    for number in range(size):
        s, greedy = sequence(4, seed=number, temperature=0.7), sequence(4)
        heads.observe(hidden, [s, greedy], [0, 0])
        draft, chosen = heads.propose([DraftAsk(s, 2, may_draw=True), DraftAsk(greedy, 2, may_draw=True)])
        assert chosen.probs is None
        assert draft.probs is not None
        assert draft.probs.shape == (2, config.vocab_size)
        np.testing.assert_allclose(draft.probs[0][weights["draft_tokens"]], expected, rtol=1e-4)
        np.testing.assert_allclose(draft.probs.sum(1), 1, rtol=1e-5)
        assert all(draft.probs[place][token] > 0 for place, token in enumerate(draft.token_ids))
        counts[draft.token_ids[0]] += 1
        heads.end(s)
        heads.end(greedy)
    observed = np.array([counts[int(token)] for token in weights["draft_tokens"]])
    chi_square = ((observed - size * expected) ** 2 / (size * expected)).sum()
    assert chi_square < 16.3, (observed / size, expected)  # 3 degrees of freedom, p = 0.001


def test_what_is_drawn_is_a_function_of_the_request() -> None:
    config = head_config()
    weights = random_weights(config)
    weights["head"] *= 0.1
    hidden = torch.ones(2, config.hidden_size)

    def drawn(*others: Sequence) -> tuple[int, ...]:
        heads = drafter(config, weights)
        s = sequence(4, temperature=1.0)
        heads.observe(hidden, [s, *others], range(1 + len(others)))
        asks = [DraftAsk(o, 3, may_draw=True) for o in (*others, s)]
        return heads.propose(asks)[-1].token_ids

    assert drawn() == drawn() == drawn(sequence(9, seed=1, temperature=0.5))


@pytest.mark.skipif(not has_fast_bfloat16(), reason="this CPU has no products of bfloat16")
def test_packed_bfloat16_weights_compute_the_same() -> None:
    config = head_config(dtype="bfloat16", hidden_size=64, draft_vocab_size=48)
    weights = random_weights(config)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    network = make_network(config, weights)
    state, logits = network.advance(network.start(hidden, 1), torch.tensor([3, 4, 5]), 0)
    plain = make_network(head_config(hidden_size=64, draft_vocab_size=48), weights)
    state32, logits32 = plain.advance(plain.start(hidden.float(), 1), torch.tensor([3, 4, 5]), 0)
    assert logits.dtype == torch.bfloat16
    for ours, exact in ((state, state32), (logits, logits32)):
        assert float((ours.float() - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"down": None},
            r"drafter\.safetensors: down is missing, drafter\.json asks for \[64, 24\] of float32",
        ),
        ({"other": torch.zeros(1)}, r"other is \[1\] of float32, drafter\.json asks for missing"),
        ({"mix": torch.zeros(3, 3)}, r"mix is \[3, 3\]"),
        ({"head": torch.zeros(100, 64).half()}, r"head is \[100, 64\] of float16"),
        ({"draft_tokens": torch.zeros(100, dtype=torch.int64)}, "draft_tokens are not different ids"),
        ({"draft_tokens": torch.arange(300, 400)}, "draft_tokens are not different ids below vocab_size 320"),
    ],
)
def test_weights_that_are_not_as_the_config_says_are_refused(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    from safetensors.torch import load_file, save_file

    directory = random_drafter(tiny_llama, tmp_path / "drafter")
    tensors = load_file(directory / "drafter.safetensors") | change
    save_file({n: t.clone() for n, t in tensors.items() if t is not None}, directory / "drafter.safetensors")
    config = read_config(directory)
    with pytest.raises(BundleError, match=message):
        read_weights(directory, config)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.checkpoints import tiny_checkpoint

    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))
