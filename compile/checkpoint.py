"""A checkpoint on disk or on the hub: opened, validated from its headers, loaded, and its serving files
written.

`open_checkpoint` does everything that is quick (config, safetensors or GGUF headers, names and shapes against
the model class) so that a broken download or an unsupported model fails in seconds, then hashes the files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..errors import BuildError
from ..interrupts import held_interrupts
from .bundle import MANIFEST_NAME
from .gguf import GgufFile, write_config
from .model_loading import empty_model, load_tensors, match_tensors, tied_pairs
from .packed_checkpoint import (
    PackedLinears,
    find_layers,
    needless_biases,
    place_layers,
    placeholders,
    plain_infos,
)
from .packed_weights import PackedFormat, read_format
from .weights import SafetensorsWeights, Weights, find_safetensors, most_common_dtype

# Files beside the weights that decide what is built or how text is read; each is part of the content hash.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_CONFIG_FILES = ("config.json", "generation_config.json")
# What the runtime reads (`runtime/tokenizer.py`).
_SERVED_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_NOT_DOWNLOADED = ["consolidated*", "*/*"]  # second copies of the weights: Mistral's format, ONNX folders

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CAUSAL_LM = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be compiled.

    `source` is what the user wrote, `path` the directory or GGUF file it stands for. `dtype_name` is the
    dtype the checkpoint says (`float32`, `bfloat16`, `float16`). `content_hash` covers weights, config and
    tokenizer files, not their place. `warnings` are for the user to read. `packed` are the linear layers that are
    stored in 4 bits, None if none is; `config` says nothing of them.
    """

    source: str
    path: Path
    config: PreTrainedConfig
    dtype_name: str
    content_hash: str
    warnings: tuple[str, ...]
    weights: Weights = field(repr=False, compare=False)
    packed: PackedLinears | None = field(default=None, repr=False)


def open_checkpoint(model: str) -> Checkpoint:
    """Open a Hugging Face directory, a hub id or a `.gguf` file; `BuildError` if it cannot be compiled."""
    path = _locate(model)
    if path.is_file():
        return _open_gguf(model, path)
    return _open_directory(model, path)


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, on_warning: Callable[[str], None] = lambda _: None
) -> PreTrainedModel:
    """The model in `dtype` on the CPU for inference; every parameter loaded exactly once.

    Packed layers are `Int4Linear`s. `on_warning` is told what only the weights themselves show.
    """
    config, packed, source = checkpoint.config, checkpoint.packed, checkpoint.source
    with checkpoint.weights.open() as tensors:
        if packed is None:
            return load_tensors(config, tensors, dtype, source)
        model = load_tensors(config, placeholders(tensors, packed, dtype), dtype, source)
        place_layers(model, tensors, packed, on_warning)
        return model


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The transformers tokenizer. Raises `BuildError` if it cannot be loaded, or has no form that can be served."""
    if isinstance(checkpoint.weights, GgufFile):
        return checkpoint.weights.tokenizer()
    return _load_tokenizer(checkpoint.path)


def write_serving_files(checkpoint: Checkpoint, directory: Path) -> None:
    """Write what the runtime needs to turn text into tokens and back, and to know where a text ends.

    The tokenizer is written as transformers understands it (its BOS and EOS rules applied to
    tokenizer.json), so that serving without transformers gives the same ids. Truncation and padding stored
    in a tokenizer.json are not kept: a server must never cut a prompt on its own.
    """
    tokenizer = load_tokenizer(checkpoint)
    if isinstance(checkpoint.weights, GgufFile):
        checkpoint.weights.generation_config().save_pretrained(directory)
        write_config(checkpoint.config, directory, getattr(torch, checkpoint.dtype_name))
    else:
        for name in _CONFIG_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, directory / name)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        tokenizer.save_pretrained(scratch)
        for name in _SERVED_TOKENIZER_FILES:
            if (Path(scratch) / name).is_file():
                shutil.move(Path(scratch) / name, directory / name)


def _locate(model: str) -> Path:
    path = Path(model).expanduser()
    if _is_bundle(path):
        raise BuildError(
            f"{model}: this is a bundle already; `pelton inspect` says which checkpoint it was built from"
        )
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.exists():
        raise BuildError(f"{model}: give a checkpoint directory, a .gguf file or a Hugging Face model id")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise BuildError(f"{model}: no such file or directory")
    return _download(model)


def _is_bundle(path: Path) -> bool:
    """Whether the directory has a bundle's manifest, of whatever version."""
    try:
        facts = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "content_key" in facts


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED))
    except GatedRepoError as error:
        raise BuildError(
            f"{model}: access to this model is restricted; accept its terms on huggingface.co and set "
            "HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise BuildError(
            f"{model}: no such directory here and no such model on the Hugging Face hub"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise BuildError(
            f"{model}: no such directory here, and downloading it from the Hugging Face hub failed: "
            f"{_one_line(error)}"
        ) from error


def _open_gguf(model: str, path: Path) -> Checkpoint:
    weights = GgufFile(path)
    weights.check_tokenizer()
    match_tensors(empty_model(weights.config), weights.infos, model)
    dtype_name = str(weights.stored_dtype).removeprefix("torch.")
    return Checkpoint(model, path, weights.config, dtype_name, _content_hash([path]), (), weights)


def _open_directory(model: str, path: Path) -> Checkpoint:
    config, packed_format = _read_config(path)
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise BuildError(f"{path}: no tokenizer: expected one of {', '.join(_VOCABULARIES)}")
    weights = find_safetensors(path)
    warnings = list(weights.warnings)
    packed = None
    if packed_format is not None:
        weights, packed = _find_packed(path, config, weights, packed_format, warnings)
    elif stray := [name for name in weights.infos if name.endswith(".qweight")]:
        raise BuildError(
            f"{path}: {stray[0]} is packed, but config.json has no quantization_config that says how; take it from the "
            "checkpoint's quantize_config.json or quant_config.json, with its quant_method (gptq or awq)"
        )
    infos = weights.infos if packed is None else plain_infos(weights.infos, packed)
    empty = empty_model(config)
    found = match_tensors(empty, infos, str(path))
    for head, embedding in tied_pairs(empty, found):
        if not _equal(weights, head, embedding):
            config.tie_word_embeddings = False
            warnings.append(
                f"config.json ties {head} to {embedding}, but the checkpoint holds two different tensors: "
                f"the file's {head} is used"
            )
    dtype = config.dtype or most_common_dtype(infos)
    present = [path / name for name in (*_CONFIG_FILES, *_TOKENIZER_FILES) if (path / name).is_file()]
    content_hash = _content_hash([*present, *weights.files])
    dtype_name = str(dtype).removeprefix("torch.")
    return Checkpoint(model, path, config, dtype_name, content_hash, tuple(warnings), weights, packed)


def _find_packed(
    path: Path,
    config: PreTrainedConfig,
    weights: SafetensorsWeights,
    packed_format: PackedFormat,
    warnings: list[str],
) -> tuple[SafetensorsWeights, PackedLinears]:
    """The packed layers, and the weights without what they store for nothing. A packed head is untied in `config`."""
    empty = empty_model(config)
    packed = find_layers(empty, weights.infos, packed_format, str(path))
    for name, layer in packed.layers.items():
        if f"{layer.module}.weight" in empty.all_tied_weights_keys:
            config.tie_word_embeddings = False
            warnings.append(
                f"config.json ties {name} to the embedding, but the checkpoint holds it packed: that is used"
            )
    with weights.open() as tensors:
        needless = needless_biases(empty, tensors, packed)
    infos = {name: info for name, info in weights.infos.items() if name not in needless}
    return replace(weights, infos=infos), packed


def _read_config(path: Path) -> tuple[PreTrainedConfig, PackedFormat | None]:
    """The config, and how linear layers are packed if they are.

    Refused if it is not that of a text-only causal LM that transformers knows, or one quantised in a way that is not
    known here.
    """
    file = path / "config.json"
    if not file.is_file():
        adapter = " (a LoRA adapter? Merge it into its base model first)"
        raise BuildError(
            f"{path}: no config.json{adapter if (path / 'adapter_config.json').is_file() else ''}"
        )
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        model_type = facts["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{file}: not a model config ({type(error).__name__}: {error})") from error
    if model_type not in CONFIG_MAPPING:
        remote = (
            "; it needs Python code from the checkpoint, which is never run" if "auto_map" in facts else ""
        )
        raise BuildError(
            f"{file}: transformers {transformers_version} has no model type {model_type!r}{remote}"
        )
    try:
        with held_interrupts():  # transformers imports the family's code now
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise BuildError(f"{file}: not a valid {model_type} config: {_one_line(error)}") from error
    _check_supported(file, config, facts.get("architectures") or [])
    quantisation = facts.get("quantization_config")
    if quantisation is None:
        return config, None
    del config.quantization_config  # or transformers would look for the libraries that it names
    if not isinstance(quantisation, dict):
        raise BuildError(f"{file}: quantization_config is no object")
    try:
        return config, read_format(quantisation)
    except BuildError as error:
        raise BuildError(f"{file}: {error}") from error


def _check_supported(file: Path, config: PreTrainedConfig, architectures: list[str]) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise BuildError(
            f"{file}: {config.model_type} is an encoder-decoder model; only causal LMs can be compiled"
        )
    if config.get_text_config() is not config:
        raise BuildError(
            f"{file}: {config.model_type} is a multi-modal model; only text models can be compiled. Use a "
            "text-only checkpoint of this family."
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BuildError(f"{file}: {config.model_type} is not a causal LM")
    if architectures and not any(name.endswith(_CAUSAL_LM) for name in architectures):
        raise BuildError(f"{file}: the checkpoint is a {' / '.join(architectures)}, not a causal LM")


def _load_tokenizer(path: Path) -> Any:
    try:
        with held_interrupts():  # transformers imports the tokenizer's code now
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path}: the tokenizer cannot be loaded: {_one_line(error)}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise BuildError(
            f"{path}: {type(tokenizer).__name__} has no form that the tokenizers library can run"
        )
    return tokenizer


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _equal(weights: Weights, first: str, second: str) -> bool:
    with weights.open() as tensors:
        one, other = tensors[first][...], tensors[second][...]
        return one.dtype == other.dtype and torch.equal(one, other)


def _content_hash(files: Iterable[Path]) -> str:
    """sha256 over the names and contents of `files`; large files in parallel (hashing releases the GIL)."""
    ordered = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_file_digest, ordered))
    total = hashlib.sha256()
    for path, digest in zip(ordered, digests, strict=True):
        total.update(f"{path.name}\0{digest}\n".encode())
    return total.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
