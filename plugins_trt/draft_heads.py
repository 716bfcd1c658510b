"""Drafter heads, which guess tokens from the target's hidden state: what their files hold, and their arithmetic.

    drafter.json           `HeadConfig`: the kind, its sizes, the vocabulary that it is for, how it was trained
    drafter.safetensors    its tensors, of one dtype but for `draft_tokens`

`hidden` `[B, H]` is the input of the target's head (after the final norm) at a sequence's last computed position, from
which its newest token was chosen. Logits are over a *draft vocabulary*: the V' most frequent tokens of the training
text (`draft_tokens`, ids in the target's vocabulary), whose rows of the target's head are `head`. A vocabulary cut in
this way is that of FR-Spec (Zhao et al. 2025) and EAGLE-3 (Li et al. 2025).

`medusa` (Cai et al. 2024): residual block i guesses the token i + 1 places after the newest one from the hidden state
alone. The blocks share the rows of the target's head.

    logits_i = head @ (hidden + silu(block_i @ hidden + bias_i))

`eagle` (the recurrence of EAGLE, Li et al. 2024, without its attention, as in ReDrafter, Cheng et al. 2024): predicts
the target's next hidden state from the last one and the token chosen at it, over and over.

    mixed  = mix @ (norm_in * rms(state)) + token_table[token]
    state' = norm_out * rms(mixed + down @ (silu(gate @ x) * (up @ x))),  x = norm_mlp * rms(mixed)
    logits = head @ state'

The first `state` is the target's hidden state. `token_table` holds the tokens' embeddings, already multiplied by their
half of the matrix that would take both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from ..errors import BundleError

CONFIG_FILE = "drafter.json"
WEIGHTS_FILE = "drafter.safetensors"
FORMAT_VERSION = 1
KINDS = ("eagle", "medusa")
_NORM_EPSILON = 1e-6

_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What `drafter.json` says.

    `hidden_size`, `vocab_size` and `vocabulary` (sha256 of the tokens and their ids) are those of the target;
    `intermediate_size` is that of the MLP of `eagle`, 0 for `medusa`. `num_draft_tokens` is how many tokens the heads
    were trained to guess: `medusa` has as many blocks and no more. `checkpoint_hash` is the content of the checkpoint
    that it was trained on, `training` what is known of that.
    """

    format_version: int
    kind: Literal["eagle", "medusa"]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    num_draft_tokens: int
    dtype: Literal["bfloat16", "float32"]
    vocabulary: str
    checkpoint_hash: str
    training: Mapping[str, Any]

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @property
    def shapes(self) -> _Shapes:
        """Of every tensor in the file, by name."""
        hidden, inner, drafts = self.hidden_size, self.intermediate_size, self.draft_vocab_size
        shared: _Shapes = {"draft_tokens": (drafts,), "head": (drafts, hidden)}
        if self.kind == "medusa":
            blocks = self.num_draft_tokens
            return shared | {"block": (blocks, hidden, hidden), "bias": (blocks, hidden)}
        return shared | {
            "token_table": (self.vocab_size, hidden),
            "mix": (hidden, hidden),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "norm_in": (hidden,),
            "norm_mlp": (hidden,),
            "norm_out": (hidden,),
        }


_ADAPTER: TypeAdapter[HeadConfig] = TypeAdapter(HeadConfig)


def read_config(directory: Path) -> HeadConfig:
    """Raises `BundleError` naming the file, and the field that is not as it should be."""
    path = directory / CONFIG_FILE
    try:
        config = _ADAPTER.validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(
            f"{path}: cannot be read ({error}); `pelton train-drafter` makes drafters"
        ) from error
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        raise BundleError(f"{path}: {field or 'content'}: {fault['msg']}; train the drafter again") from error
    if config.format_version != FORMAT_VERSION:
        raise BundleError(
            f"{path}: format_version: {config.format_version}, this version reads {FORMAT_VERSION}; train the drafter "
            "again"
        )
    return config


def read_weights(directory: Path, config: HeadConfig) -> dict[str, Tensor]:
    """The tensors by name, mapped from the file. Raises `BundleError` naming one that is not as `config` says."""
    path = directory / WEIGHTS_FILE
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); train the drafter again") from error
    expected = {
        name: (shape, torch.int64 if name == "draft_tokens" else getattr(torch, config.dtype))
        for name, shape in config.shapes.items()
    }
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise BundleError(
                f"{path}: {name} is {_form(found.get(name))}, {CONFIG_FILE} asks for {_form(expected.get(name))}; "
                "train the drafter again"
            )
    tokens = weights["draft_tokens"]
    num_different = len(set(tokens.tolist()))
    if len(tokens) != num_different or not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        raise BundleError(
            f"{path}: draft_tokens are not different ids below vocab_size {config.vocab_size}; train the drafter again"
        )
    return weights


def _form(form: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "missing" if form is None else f"{list(form[0])} of {str(form[1]).removeprefix('torch.')}"


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """`weight * x / rms(x)` over the last dimension, in the dtype of `x`."""
    return functional.rms_norm(x, (x.shape[-1],), weight, _NORM_EPSILON)


def medusa_states(hidden: Tensor, block: Tensor, bias: Tensor) -> Tensor:
    """What the head reads for each position: `hidden` `[B, H]` to `[positions, B, H]`."""
    inner = torch.matmul(hidden, block.transpose(1, 2)) + bias[:, None]
    return hidden + functional.silu(inner)


Product = Callable[[str, Tensor], Tensor]
"""`x @ weight.T` with the weight of a name: `[B, in]` to `[B, out]`."""


def eagle_step(product: Product, norms: Mapping[str, Tensor], state: Tensor, token_rows: Tensor) -> Tensor:
    """The next state `[B, H]` from the last one and the rows of `token_table` of the tokens chosen at it."""
    mixed = product("mix", rms_norm(state, norms["norm_in"])) + token_rows
    gate, up = product("gate_up", rms_norm(mixed, norms["norm_mlp"])).chunk(2, dim=-1)
    return rms_norm(mixed + product("down", functional.silu(gate) * up), norms["norm_out"])
