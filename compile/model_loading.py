"""A checkpoint's tensors into a transformers model, each parameter exactly once.

transformers names, renames and merges tensors (`get_model_conversion_mapping`); its own loader then
initialises at random whatever it did not find and drops what it did not expect. Here both are errors.
`match_tensors` finds them from names and shapes alone, on a model without memory; `load_tensors` checks what
really happened.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import logging as transformers_logging

from ..errors import BuildError
from ..interrupts import held_interrupts
from .weights import TensorInfo, name_some

# Tables that older checkpoints store although the model computes them.
_COMPUTED = r"rotary_emb\.inv_freq$"
_LAYER = re.compile(r"\d+")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal LM of `config` on the meta device: module tree, names and shapes, no memory."""
    with held_interrupts():  # transformers imports the family's code now
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        return model_class._from_config(config)


def match_tensors(model: PreTrainedModel, infos: Mapping[str, TensorInfo], source: str) -> dict[str, str]:
    """Check the checkpoint's names, shapes and types against `model`; return parameter -> stored name.

    `BuildError` names what does not fit. Where transformers merges several stored tensors into one parameter
    (experts), only `load_tensors` can tell whether they are complete.
    """
    expected = model.state_dict()
    found: dict[str, str] = {}
    unexpected: list[str] = []
    has_merged = False
    for name, target, pattern in renamed(model, infos):
        info = infos[name]
        if target not in expected:
            unexpected.append(name)
            continue
        if expected[target].is_floating_point() and info.dtype not in _FLOATS:
            raise BuildError(
                f"{source}: {name} is stored as {_short(info.dtype)}; quantised checkpoints are not "
                "supported, use the original one"
            )
        if pattern is not None:
            has_merged = True
            continue
        if target in found:
            raise BuildError(f"{source}: both {found[target]} and {name} are the parameter {target}")
        found[target] = name
        if tuple(expected[target].shape) != info.shape:
            raise BuildError(
                f"{source}: {name} has shape {list(info.shape)}, config.json asks for "
                f"{list(expected[target].shape)}"
            )
    _refuse(source, unexpected=_not_ignored(model, unexpected))
    if not has_merged:
        tied = _present_through_ties(model, found.keys())
        _refuse(source, missing=[name for name in expected if name not in found and name not in tied])
    return found


def renamed(model: PreTrainedModel, names: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """`(name, parameter, pattern)` for each of the stored `names`, in order.

    `pattern` is set if several tensors are merged into that parameter.
    """
    expected = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    for name in names:
        yield name, *rename_source_key(name, renamings, converters, model.base_model_prefix, expected)


def tied_pairs(model: PreTrainedModel, found: Mapping[str, str]) -> list[tuple[str, str]]:
    """`(head, embedding)` as the checkpoint names them, where the config ties two tensors that it both holds.

    `found` is what `match_tensors` returned.
    """
    return [
        (found[target], found[source])
        for target, source in model.all_tied_weights_keys.items()
        if target in found and source in found
    ]


def load_tensors(
    config: PreTrainedConfig, tensors: Mapping[str, Any], dtype: torch.dtype, source: str
) -> PreTrainedModel:
    """The model of `config` on the CPU, in eval mode, without gradients; `tensors` are read by `[...]`.

    Parameters whose stored type is `dtype` may stay mapped to the file. `BuildError` names the tensors if any
    parameter was not loaded, any tensor was left over, or a shape differs.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _quiet_transformers():
        try:
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except RuntimeError as error:
            lost = _uneven_merges(empty_model(config), tensors)
            raise BuildError(
                f"{source}: transformers could not merge the stored tensors into "
                f"{name_some(lost) or 'one parameter'}; some are missing or of the wrong shape"
            ) from error
    wrong_shapes = [
        f"{name} ({list(stored)} instead of {list(wanted)})"
        for name, stored, wanted in report["mismatched_keys"]
    ]
    if wrong_shapes:
        raise BuildError(
            f"{source}: tensors of another shape than config.json asks for: {name_some(wrong_shapes)}"
        )
    _refuse(source, missing=report["missing_keys"], unexpected=_not_ignored(model, report["unexpected_keys"]))
    model.requires_grad_(False)
    return model.eval()


def _uneven_merges(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Merged parameters made from fewer stored tensors than the same parameter of another layer."""
    counts: dict[str, Counter[str]] = {}
    for _, target, pattern in renamed(model, names):
        if pattern is not None:
            counts.setdefault(target, Counter())[pattern] += 1
    usual: dict[str, Counter[str]] = {}
    for target, counter in counts.items():
        kind = _LAYER.sub("", target)
        usual[kind] = usual.get(kind, Counter()) | counter
    return [target for target, counter in counts.items() if counter != usual[_LAYER.sub("", target)]]


def _refuse(source: str, *, missing: Any = (), unexpected: Any = ()) -> None:
    if missing:
        raise BuildError(
            f"{source}: {len(missing)} parameters of the model are not in the checkpoint: "
            f"{name_some(list(missing))}. They would be random; the checkpoint is incomplete or config.json "
            "belongs to another model."
        )
    if unexpected:
        raise BuildError(
            f"{source}: {len(unexpected)} tensors have no place in the model: "
            f"{name_some(list(unexpected))}. They would be dropped; config.json belongs to another model, "
            "or this architecture is not supported."
        )


def _present_through_ties(model: PreTrainedModel, found: Any) -> set[str]:
    tied: set[str] = set()
    for target, source in model.all_tied_weights_keys.items():
        if target in found or source in found:
            tied.update((target, source))
    return tied


def _not_ignored(model: PreTrainedModel, names: Any) -> list[str]:
    """Without what transformers lists for this class as safe to drop, and computed tables."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), _COMPUTED]
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar and no loading report: what they say is raised as an error here."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
