"""`pelton train-drafter`: a target and a text -> drafter heads (`plugins_trt/draft_heads.py`).

The target reads the text once (`drafter_text.py`). The heads then learn its distributions, not the text's tokens: the
loss is the cross-entropy between the target's likeliest tokens, as far as they are in the draft vocabulary, and the
heads', at each of the `num_draft_tokens` places after a random token. `eagle` is unrolled over its own states with the
tokens that the text has (as EAGLE-3 trains), and its states are drawn towards the target's.
"""

from __future__ import annotations

import math
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ..errors import BuildError
from ..plugins_trt.draft_heads import (
    CONFIG_FILE,
    FORMAT_VERSION,
    KINDS,
    WEIGHTS_FILE,
    HeadConfig,
    eagle_step,
    medusa_states,
    rms_norm,
)
from ..plugins_trt.processor import has_bfloat16_products
from .checkpoint import Checkpoint, load_model, load_tokenizer, open_checkpoint
from .drafter import vocabulary_digest
from .drafter_text import WINDOW, Corpus, check_texts, observe_target, read_windows
from .progress import Progress, format_bytes

_BATCH_SIZE = 128  # start positions of a training step
_LEARNING_RATE = 2e-3
_WARM_UP = 0.05  # of the training
_STATE_WEIGHT = 0.2  # of the distance from the target's hidden states in the loss of `eagle`
_POSITION_DECAY = 0.85  # a later token counts only if all before it were right
_EVALUATION_ROWS = 2048


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What a user asks `pelton train-drafter` for.

    Training ends after `steps`, or after `minutes` where that comes first; equal requests without `minutes` give equal
    drafters on one machine. Raises `BuildError` naming the option.
    """

    model: str
    texts: tuple[Path, ...]
    output: Path
    kind: str = "eagle"
    steps: int = 2000
    minutes: float | None = None
    num_draft_tokens: int = 4
    draft_vocab_size: int = 8192
    max_tokens: int = 500_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BuildError(f"kind: {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        if not self.texts:
            raise BuildError("text: give at least one file to train on")
        for name, least in (
            ("steps", 1),
            ("num_draft_tokens", 1),
            ("draft_vocab_size", 1),
            ("max_tokens", 2),
        ):
            if getattr(self, name) < least:
                raise BuildError(f"{name}: must be at least {least}, got {getattr(self, name)}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise BuildError(f"minutes: must be above 0, got {self.minutes:g}")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """On text that was held out: `agreement[i]` is the share of places at which the i-th guess is the target's greedy
    token, given the text's tokens before it; `mean_accepted` the mean number of guesses before the first that is not;
    `coverage` the share of greedy tokens that are in the draft vocabulary.
    """

    agreement: tuple[float, ...]
    mean_accepted: float
    coverage: float

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.agreement)
        return (
            f"on held-out text the guesses agree with the target's greedy tokens at {shares} of places: "
            f"{self.mean_accepted:.2f} accepted in a row; the draft vocabulary holds {self.coverage:.1%} of them"
        )


class _Heads(nn.Module):
    """Heads in training: float32 parameters, computed in `dtype`. Their names are those of the file's tensors."""

    def __init__(self, head: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("head", head.to(dtype))  # [V', H], the target's rows

    def logits(self, states: Tensor) -> Tensor:
        head = self.get_buffer("head")
        return functional.linear(states, head).float()

    def states(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """What the head reads at each place, `[B, H]`, from `hidden` `[B, H]` and the `tokens` `[B, places]` after it:
        that at place i is for the token after `tokens[:, i]`."""
        raise NotImplementedError

    def exported(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of the file but for `draft_tokens`, in `dtype`."""
        tensors = {**dict(self.named_parameters()), "head": self.get_buffer("head")}
        return {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}

    def round_to(self, dtype: torch.dtype) -> None:
        """From here on compute with what `exported` writes in `dtype`."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(tensor.to(dtype))

    def computed(self) -> dict[str, Tensor]:
        return {name: parameter.to(self.dtype) for name, parameter in self.named_parameters()}


class MedusaHeads(_Heads):
    def __init__(self, head: Tensor, places: int, dtype: torch.dtype) -> None:
        super().__init__(head, dtype)
        size = head.shape[1]
        self.block = nn.Parameter(torch.zeros(places, size, size))  # the target's own guess, one token late
        self.bias = nn.Parameter(torch.zeros(places, size))

    def states(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        w = self.computed()
        return list(medusa_states(hidden.to(self.dtype), w["block"], w["bias"]))


class EagleHeads(_Heads):
    """`embedding` `[V, E]` are the target's. `scale` `[H]` is the size of its hidden states, feature by feature."""

    def __init__(
        self, head: Tensor, embedding: Tensor, scale: Tensor, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        super().__init__(head, dtype)
        size, width = head.shape[1], embedding.shape[1]
        inner = 2 * size

        def drawn(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) * columns**-0.5)

        self.mix = drawn(size, size)
        self.token_mix = drawn(size, width)
        self.gate_up = drawn(2 * inner, size)
        self.down = nn.Parameter(torch.zeros(size, inner))
        self.norm_in = nn.Parameter(torch.ones(size))
        self.norm_mlp = nn.Parameter(torch.ones(size))
        self.norm_out = nn.Parameter(scale.clone())
        self._embedding = rms_norm(embedding.to(dtype), torch.ones(width, dtype=dtype))
        self._row_dtype = dtype  # of the token table

    def states(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        w = self.computed()
        hidden, states = hidden.to(self.dtype), []
        for place in range(tokens.shape[1]):
            rows = functional.linear(self._embedding[tokens[:, place]], w["token_mix"])
            rows = rows.to(self._row_dtype).to(self.dtype)
            hidden = eagle_step(lambda name, x: functional.linear(x, w[name]), w, hidden, rows)
            states.append(hidden)
        return states

    def round_to(self, dtype: torch.dtype) -> None:
        super().round_to(dtype)
        self._row_dtype = dtype

    def exported(self, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = super().exported(dtype)
        del tensors["token_mix"]
        table = functional.linear(self._embedding, self.token_mix.detach().to(self.dtype))
        return {**tensors, "token_table": table.to(dtype)}


def train(request: TrainRequest, progress: Progress) -> tuple[HeadConfig, Acceptance]:
    """Train heads and write them to `request.output`, which appears whole or not at all.

    Raises `BuildError` naming what is at fault.
    """
    _check_output(request.output)
    check_texts(request.texts)
    with progress.stage("read checkpoint"):
        checkpoint = open_checkpoint(request.model)
    span = request.num_draft_tokens + 1
    config: Any = checkpoint.config
    with progress.stage("read text"):
        tokenizer = load_tokenizer(checkpoint)
        windows, held_out_windows = read_windows(
            request.texts, tokenizer, window=min(WINDOW, config.max_position_embeddings), span=span,
            vocab_size=config.vocab_size, max_tokens=request.max_tokens, seed=request.seed,
        )  # fmt: skip
    dtype = torch.float32 if checkpoint.dtype_name == "float32" else torch.bfloat16
    compute_dtype = dtype if has_bfloat16_products() else torch.float32
    if compute_dtype != dtype:
        progress.note(
            "this processor has no instructions for products of bfloat16: computing in float32, the model takes twice "
            "the memory; the heads are written in bfloat16"
        )
    with progress.stage("load weights"):
        model = load_model(checkpoint, compute_dtype, progress.warning)
    with progress.stage("read the text with the target"):
        corpus = observe_target(model, windows, span=span, dtype=dtype, progress=progress)
        held_out = observe_target(model, held_out_windows, span=span, dtype=dtype, progress=progress)
    progress.note(
        f"{len(corpus.token_ids)} tokens to train on, {len(held_out.token_ids)} held out, "
        f"{format_bytes(corpus.num_bytes + held_out.num_bytes)} of the target's states"
    )
    draft_tokens = choose_draft_tokens(corpus.token_ids, request.draft_vocab_size, config.vocab_size)
    heads = _make_heads(request, model, corpus, draft_tokens, compute_dtype)
    del model
    start = time.monotonic()
    with progress.stage(f"train {request.kind} heads"):
        steps = _fit(heads, corpus, _draft_index(draft_tokens, config.vocab_size), request, progress)
    seconds = time.monotonic() - start
    heads.round_to(dtype)
    with progress.stage("measure"):
        acceptance = measure_acceptance(heads, held_out, draft_tokens, request.num_draft_tokens)
    head_config = _head_config(
        request, checkpoint, draft_tokens, dtype,
        vocabulary=vocabulary_digest(tokenizer),
        training={
            "steps": steps, "seconds": round(seconds, 1), "num_tokens": len(corpus.token_ids), "seed": request.seed,
            "agreement": [round(share, 4) for share in acceptance.agreement],
            "mean_accepted": round(acceptance.mean_accepted, 3), "coverage": round(acceptance.coverage, 4),
        },
    )  # fmt: skip
    with progress.stage("write drafter"):
        write_drafter(request.output, head_config, {**heads.exported(dtype), "draft_tokens": draft_tokens})
    return head_config, acceptance


def choose_draft_tokens(token_ids: Tensor, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent of `token_ids`, the most frequent first; all that occur if they are fewer."""
    counts = torch.bincount(token_ids, minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    return order[: min(size, int((counts > 0).sum()))].clone()


def measure_acceptance(heads: _Heads, corpus: Corpus, draft_tokens: Tensor, places: int) -> Acceptance:
    """Guesses against the target's greedy tokens, from every position of `corpus`."""
    greedy = corpus.likeliest[:, 0].long()
    right = []
    with torch.inference_mode():
        for at in torch.split(corpus.positions, _EVALUATION_ROWS):
            after = at[:, None] + torch.arange(1, places + 1)
            states = heads.states(corpus.hidden[at], corpus.token_ids[after])
            guesses = torch.stack([draft_tokens[heads.logits(state).argmax(-1)] for state in states], 1)
            right.append(guesses == greedy[after])
    is_right = torch.cat(right).float()  # [positions, places]
    return Acceptance(
        agreement=tuple(is_right.mean(0).tolist()),
        mean_accepted=float(is_right.cumprod(1).sum(1).mean()),
        coverage=float(torch.isin(greedy, draft_tokens).float().mean()),
    )


def write_drafter(directory: Path, config: HeadConfig, tensors: dict[str, Tensor]) -> None:
    """Write the files into a directory beside `directory`, then put it in that place."""
    directory = directory.resolve()
    _check_output(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    staging = directory.parent / f".{directory.name}.{token}.partial"
    aside = directory.parent / f".{directory.name}.{token}.replaced"
    try:
        staging.mkdir()
        save_file(tensors, staging / WEIGHTS_FILE)
        (staging / WEIGHTS_FILE).chmod(0o644)  # safetensors creates it for its owner alone
        (staging / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
        if directory.exists():
            directory.rename(aside)
        staging.rename(directory)
    except BaseException:
        if aside.exists() and not directory.exists():
            aside.rename(directory)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def _check_output(directory: Path) -> None:
    if not directory.exists() or (directory / CONFIG_FILE).is_file():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise BuildError(
            f"{directory}: exists and is no drafter; it is not overwritten, choose another --output"
        )


def _make_heads(
    request: TrainRequest, model: Any, corpus: Corpus, draft_tokens: Tensor, dtype: torch.dtype
) -> _Heads:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise BuildError(
            f"{request.model}: its head is a {type(head).__name__}, whose rows cannot be taken; train on the original "
            "checkpoint, which is not packed"
        )
    rows = head.weight[draft_tokens]
    if request.kind == "medusa":
        return MedusaHeads(rows, request.num_draft_tokens, dtype)
    scale = corpus.hidden.float().pow(2).mean(0).sqrt()
    generator = torch.Generator().manual_seed(request.seed)
    return EagleHeads(rows, model.get_input_embeddings().weight, scale, dtype, generator)


def _draft_index(draft_tokens: Tensor, vocab_size: int) -> Tensor:
    """`[vocab_size]`: the place of each token in the draft vocabulary, -1 if it has none."""
    index = torch.full((vocab_size,), -1)
    index[draft_tokens] = torch.arange(len(draft_tokens))
    return index


def _fit(
    heads: _Heads, corpus: Corpus, draft_index: Tensor, request: TrainRequest, progress: Progress
) -> int:
    """Train `heads` in place; returns the number of steps."""
    index = draft_index[corpus.likeliest.long()]  # [N, K]
    weights = corpus.probabilities * (index >= 0)
    index = index.clamp_min_(0)
    generator = torch.Generator().manual_seed(request.seed)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    decay = torch.tensor([_POSITION_DECAY**i for i in range(request.num_draft_tokens)])
    decay /= decay.sum()
    scale = corpus.hidden.float().pow(2).mean().sqrt()
    elapsed = _clock(request.minutes)
    average, step = math.nan, 0
    while step < request.steps and (done := max(step / request.steps, elapsed())) < 1:
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * _schedule(done)
        picks = torch.randint(len(corpus.positions), (_BATCH_SIZE,), generator=generator)
        after = corpus.positions[picks, None] + torch.arange(1, request.num_draft_tokens + 1)
        states = heads.states(corpus.hidden[corpus.positions[picks]], corpus.token_ids[after])
        loss = torch.zeros(())
        for place, state in enumerate(states):
            at = after[:, place]
            loss = loss + decay[place] * _cross_entropy(heads.logits(state), index[at], weights[at])
            if request.kind == "eagle":
                distance = functional.smooth_l1_loss(state.float() / scale, corpus.hidden[at].float() / scale)
                loss = loss + decay[place] * _STATE_WEIGHT * distance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        step += 1
        progress.step(f"step {step} of {request.steps}, loss {average:.3f}")
    progress.note(f"{step} steps, loss {average:.3f}")
    if not math.isfinite(average):
        raise BuildError("the loss is not finite: the target's hidden states are not finite on this text")
    return step


def _cross_entropy(logits: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Mean over rows of -sum(weights * log softmax(logits)[index]); `index`, `weights` `[rows, K]`."""
    normaliser = logits.logsumexp(-1)
    return (weights.sum(-1) * normaliser - (weights * logits.gather(1, index)).sum(-1)).mean()


def _schedule(done: float) -> float:
    """Warm-up, then half a cosine down to 0."""
    if done < _WARM_UP:
        return (done + 1e-3) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


def _clock(minutes: float | None) -> Callable[[], float]:
    """The share of `minutes` that is over, 0 without a limit."""
    start = time.monotonic()
    return lambda: 0.0 if minutes is None else (time.monotonic() - start) / (60 * minutes)


def _head_config(
    request: TrainRequest,
    checkpoint: Checkpoint,
    draft_tokens: Tensor,
    dtype: torch.dtype,
    *,
    vocabulary: str,
    training: dict[str, Any],
) -> HeadConfig:
    config: Any = checkpoint.config
    return HeadConfig(
        format_version=FORMAT_VERSION,
        kind="medusa" if request.kind == "medusa" else "eagle",
        hidden_size=config.hidden_size,
        intermediate_size=0 if request.kind == "medusa" else 2 * config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=len(draft_tokens),
        num_draft_tokens=request.num_draft_tokens,
        dtype="float32" if dtype == torch.float32 else "bfloat16",
        vocabulary=vocabulary,
        checkpoint_hash=checkpoint.content_hash,
        training=training,
    )
