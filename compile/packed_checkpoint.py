"""AWQ and GPTQ checkpoints: which linear layers of a model are stored packed, and how they get there.

transformers loads everything else and names all of it. It sees each packed layer as the one `weight` that the layer
would have (`plain_infos`), so names, shapes, ties and the rule that every tensor counts exactly once are checked by the
code that checks any checkpoint (`model_loading.py`). The weight itself is a placeholder of one element; afterwards the
layer becomes an `Int4Linear` (`place_layers`). No weight is ever held dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import BuildError
from .model_loading import renamed
from .packed_weights import PackedFormat, layer_shape, repack
from .quantize import Int4Linear, int4_bytes
from .weights import TensorInfo, name_some

_LEAVES = ("qweight", "qzeros", "scales", "g_idx")
_INT32_BYTES = 4


@dataclass(frozen=True)
class PackedLinear:
    """A packed layer as its headers describe it. `module` is its name in the model, `tensors` the stored ones by their
    last name; `num_bytes` is what it takes in the layout of `int4_linear`, at most.
    """

    module: str
    shape: tuple[int, int]
    tensors: Mapping[str, TensorInfo]
    num_bytes: int


@dataclass(frozen=True)
class PackedLinears:
    """The packed layers of a checkpoint, by the name that it stores them under."""

    format: PackedFormat
    layers: Mapping[str, PackedLinear]

    def facts(self) -> dict[str, Any]:
        """Where the 4-bit weights come from, for the manifest and the content key."""
        return {
            "method": self.format.method,
            "group_size": self.format.group_size,
            "act_order": self.format.act_order,
            "num_layers": len(self.layers),
        }

    def num_bytes(self) -> dict[str, int]:
        """What the weight of each layer takes in the layout of `int4_linear`, at most, by the module's name."""
        return {layer.module: layer.num_bytes for layer in self.layers.values()}

    def __str__(self) -> str:
        method, size = self.format.method, self.format.group_size
        groups = "one group" if size == -1 else f"groups of {size}"
        order = ", act-order" if self.format.act_order else ""
        return f"{len(self.layers)} linear layers as the {method} checkpoint stores them, {groups}{order}"


def find_layers(
    model: PreTrainedModel, infos: Mapping[str, TensorInfo], packed: PackedFormat, source: str
) -> PackedLinears:
    """The packed layers among the stored tensors `infos`, each with its place in `model` (which may be on `meta`).

    `BuildError` names the layer or tensor that is incomplete, of a wrong shape, or no linear layer of the model.
    """
    names = sorted({name.rpartition(".")[0] for name in infos if name.rpartition(".")[2] in _LEAVES})
    if not names:
        raise BuildError(
            f"{source}: config.json says {packed.method}, but no tensor is packed (*.qweight); without its "
            "quantization_config this is an ordinary checkpoint"
        )
    layers = {}
    expected = model.state_dict()
    places = renamed(model, [f"{name}.weight" for name in names])
    for name, (_, target, merged) in zip(names, places, strict=True):
        tensors = {leaf: infos[f"{name}.{leaf}"] for leaf in _LEAVES if f"{name}.{leaf}" in infos}
        try:
            shape = layer_shape(name, tensors, packed)
        except BuildError as error:
            raise BuildError(f"{source}: {error}") from error
        _check_place(source, name, infos, packed)
        if merged is not None:
            raise BuildError(
                f"{source}: {name} is packed and one of several that {target} is made of (experts); only packed "
                "linear layers are supported. Use the original checkpoint."
            )
        if target not in expected:
            raise BuildError(
                f"{source}: {name}.qweight has no place in the model; config.json belongs to another model"
            )
        module = target.removesuffix(".weight")
        if not isinstance(model.get_submodule(module), nn.Linear):
            kind = type(model.get_submodule(module)).__name__
            raise BuildError(f"{source}: {name} is packed, but no linear layer of the model ({kind})")
        wanted = tuple(expected[target].shape)
        if shape != wanted:
            raise BuildError(
                f"{source}: {name} holds packed weights of {list(shape)}, config.json asks for {list(wanted)}"
            )
        layers[name] = PackedLinear(module, shape, tensors, _bytes(shape, tensors, packed))
    return PackedLinears(packed, layers)


def plain_infos(infos: Mapping[str, TensorInfo], packed: PackedLinears) -> dict[str, TensorInfo]:
    """`infos` as they would be without quantisation: a `weight` in place of the tensors of each packed layer."""
    hidden = {f"{name}.{leaf}" for name in packed.layers for leaf in _LEAVES}
    plain = {name: info for name, info in infos.items() if name not in hidden}
    for name, layer in packed.layers.items():
        scales = layer.tensors["scales"]
        plain[f"{name}.weight"] = TensorInfo(layer.shape, scales.dtype, scales.file)
    return plain


def needless_biases(model: PreTrainedModel, tensors: Mapping[str, Any], packed: PackedLinears) -> set[str]:
    """Biases of packed layers that have none in `model` and are stored as zeros, as AutoGPTQ does for every layer."""
    expected = model.state_dict()
    stored = [bias for name in packed.layers if (bias := f"{name}.bias") in tensors]
    return {
        name
        for name, target, _ in renamed(model, stored)
        if target not in expected and not tensors[name][...].any()
    }


def placeholders(tensors: Mapping[str, Any], packed: PackedLinears, dtype: torch.dtype) -> dict[str, Any]:
    """`tensors` as `plain_infos` names them. The weight of a packed layer is NaN, of one element seen as all of them;
    in `dtype` it stays that when it is loaded.
    """
    hidden = {f"{name}.{leaf}" for name in packed.layers for leaf in _LEAVES}
    plain = {name: tensor for name, tensor in tensors.items() if name not in hidden}
    missing = torch.full((), torch.nan, dtype=dtype)
    plain |= {f"{name}.weight": missing.expand(layer.shape) for name, layer in packed.layers.items()}
    return plain


def place_layers(
    model: nn.Module, tensors: Mapping[str, Any], packed: PackedLinears, on_warning: Callable[[str], None]
) -> None:
    """Replace each packed layer of `model`, one after the other; `tensors` are the stored ones, read by `[...]`.

    Raises `BuildError` naming a tensor whose values cannot be honoured.
    """
    warnings: dict[str, list[str]] = {}
    for name, layer in packed.layers.items():
        linear = model.get_submodule(layer.module)
        assert isinstance(linear, nn.Linear)
        stored: dict[str, Tensor] = {leaf: tensors[f"{name}.{leaf}"][...] for leaf in layer.tensors}
        repacked = repack(name, stored, packed.format)
        model.set_submodule(layer.module, Int4Linear(repacked.weight, linear.bias), strict=True)
        for warning in repacked.warnings:
            tensor, _, text = warning.partition(": ")
            warnings.setdefault(text, []).append(tensor)
    for text, names in warnings.items():  # what holds for one layer mostly holds for all
        on_warning(f"{name_some(names, limit=1)}: {text}")


def _check_place(source: str, name: str, infos: Mapping[str, TensorInfo], packed: PackedFormat) -> None:
    if f"{name}.weight" in infos:
        raise BuildError(f"{source}: {name} is stored both packed and as {name}.weight; one must go")
    said = [entry for entry in packed.plain if f".{entry}." in f".{name}."]
    if said:
        raise BuildError(
            f"{source}: {name} is stored packed, but modules_not_to_convert of config.json lists {said[0]}; the two "
            "belong to different checkpoints"
        )


def _bytes(shape: tuple[int, int], tensors: Mapping[str, TensorInfo], packed: PackedFormat) -> int:
    out_features, in_features = shape
    weight = int4_bytes(
        out_features, in_features, packed.group_size,
        has_zeros=not packed.symmetric, scale_bytes=tensors["scales"].dtype.itemsize,
    )  # fmt: skip
    return weight + (in_features * _INT32_BYTES if packed.act_order else 0)
