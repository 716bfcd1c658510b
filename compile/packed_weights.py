"""Linear layers that a checkpoint stores in 4 bits, AWQ or GPTQ, brought into the one layout of `int4_linear`.

What the formats store for a layer of K input and N output features in G groups, eight values to an int32:

                 AWQ (GEMM)                      GPTQ
    qweight      [K, N / 8], along N             [K / 8, N], along K
    qzeros       [G, N / 8], along N             [G, N / 8], along N
    scales       [G, N]                          [G, N]
    g_idx                                        [K] group of each feature; absent: feature // group_size

    order in     nibble i (from the lowest) is   nibble i is value i
    an int32     value 0 2 4 6 1 3 5 7 [i]
    zero point   as it is                        v1: less 1 (in the int32: a 0 borrows from its neighbour); v2: as it is

Both say w = (q - zero) * scale. Format definitions: AutoAWQ's awq/modules/linear/gemm.py, AutoGPTQ's
auto_gptq/nn_modules/qlinear and its v1 <-> v2 conversion.

GPTQ files written as v2 under v1's name exist. A symmetric layer shows what it is: its zero points are all 8, stored
as 7 (v1) or 8 (v2); there what is stored decides, and a label that disagrees is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import BuildError
from ..plugins_trt.int4_linear import GROUP_SIZES, SYMMETRIC_ZERO, Int4Weight, num_groups, pack_int4

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = 8
_ONE_PER_NIBBLE = 0x11111111
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedFormat:
    """What a checkpoint's `quantization_config` says of all its packed layers.

    `method`: awq, gptq (v1) or gptq_v2. `symmetric` is None if it does not say. `act_order`: input features may be
    dealt out to groups in any order. `plain` are the modules that it says are stored as they were.
    """

    method: str
    group_size: int
    symmetric: bool | None = None
    act_order: bool = False
    plain: tuple[str, ...] = ()


class Described(Protocol):
    """A tensor, or what the header of its file says of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class PackedLayer:
    """One layer in the operator's layout. `warnings` are for the user to read; each names the layer."""

    weight: Int4Weight
    warnings: tuple[str, ...] = ()


def read_format(config: Mapping[str, Any]) -> PackedFormat:
    """The format that a `quantization_config` describes.

    `BuildError` naming the field, the reason and what to do if its layers cannot be repacked.
    """
    method = config.get("quant_method")
    if method not in ("awq", "gptq"):
        raise _refusal(f"quant_method {method!r} is not read, only 4-bit awq and gptq are")
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _refusal(f"{method} with bits {bits}; the kernels take 4 bits only")
    group_size = config.get("group_size", config.get("q_group_size"))
    if group_size not in GROUP_SIZES:
        supported = ", ".join(map(str, GROUP_SIZES))
        raise _refusal(f"{method} with group_size {group_size}; supported are {supported} (-1: one group)")
    if config.get("dynamic"):
        raise _refusal("dynamic (settings that differ between layers) is not supported")
    plain = tuple(config.get("modules_not_to_convert") or ())
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise _refusal(f"AWQ version {version!r}; only gemm is supported")
        return PackedFormat("awq", group_size, plain=plain)
    label = "marlin" if config.get("is_marlin_format") else _checkpoint_format(config)
    if label not in ("gptq", "gptq_v2"):
        raise _refusal(f"GPTQ checkpoint_format {label!r}; only gptq and gptq_v2 are supported")
    if config.get("pack_dtype", "int32") not in ("int32", torch.int32):
        raise _refusal(f"pack_dtype {config['pack_dtype']}; only int32 is supported")
    return PackedFormat(label, group_size, config.get("sym"), bool(config.get("desc_act")), plain)


def _checkpoint_format(config: Mapping[str, Any]) -> object:
    return config.get("checkpoint_format", config.get("format", "gptq"))


def _refusal(reason: str) -> BuildError:
    return BuildError(
        f"quantization_config: {reason}; use an AWQ or GPTQ checkpoint of 4 bits, or the original one with --quantize"
    )


def layer_shape(name: str, tensors: Mapping[str, Described], packed: PackedFormat) -> tuple[int, int]:
    """(output features, input features) of the layer `name`, from its tensors by their last name.

    They are `qweight`, `qzeros`, `scales`, perhaps `g_idx`. `BuildError` names the one that is missing or does not fit
    the others; the values of `g_idx` are not looked at.
    """
    qweight, qzeros, scales = (_matrix(name, tensors, leaf) for leaf in ("qweight", "qzeros", "scales"))
    if packed.method == "awq":
        in_features, out_features = qweight[0], qweight[1] * _PER_WORD
    else:
        in_features, out_features = qweight[0] * _PER_WORD, qweight[1]
    groups = num_groups(in_features, packed.group_size)
    if scales != (groups, out_features):
        raise BuildError(
            f"{name}.scales: shape {list(scales)} where {in_features} x {out_features} weights in groups of "
            f"{packed.group_size} need {[groups, out_features]}"
        )
    if qzeros != (groups, out_features // _PER_WORD) or out_features % _PER_WORD:
        raise BuildError(
            f"{name}.qzeros: shape {list(qzeros)} does not fit {groups} groups of {out_features} output features"
        )
    g_idx = tensors.get("g_idx")
    if g_idx is not None and packed.method == "awq":
        raise BuildError(f"{name}.g_idx: AWQ has no act-order; is the checkpoint GPTQ?")
    if g_idx is not None and (
        tuple(g_idx.shape) not in ((0,), (in_features,)) or g_idx.dtype not in (torch.int32, torch.int64)
    ):
        raise BuildError(
            f"{name}.g_idx: {g_idx.dtype} {list(g_idx.shape)} where {in_features} integers are expected"
        )
    return out_features, in_features


def repack(name: str, tensors: Mapping[str, Tensor], packed: PackedFormat) -> PackedLayer:
    """The layer `name` (see `layer_shape`) in the operator's layout.

    `BuildError` names the tensor if it is missing, does not fit the others or has groups that cannot be honoured.
    """
    _, in_features = layer_shape(name, tensors, packed)
    qweight, qzeros = tensors["qweight"], tensors["qzeros"]
    perm: Tensor | None = None
    warnings: tuple[str, ...] = ()
    if packed.method == "awq":
        values, zeros = _in_awq_order(_nibbles(qweight)).T, _in_awq_order(_nibbles(qzeros))
    else:
        values = _nibbles(qweight.T.contiguous())
        zeros, warnings = _gptq_zeros(name, qzeros, packed)
        perm = _stored_order(name, tensors.get("g_idx"), in_features, packed.group_size)
    if perm is not None:
        values = values[:, perm]
    symmetric = bool((zeros == SYMMETRIC_ZERO).all())
    weight = Int4Weight(
        qweight=pack_int4(values),
        scales=tensors["scales"].contiguous(),
        zeros=None if symmetric else zeros.to(torch.int8).contiguous(),
        group_size=packed.group_size,
        in_features=in_features,
        perm=None if perm is None else perm.to(torch.int32),
    )
    return PackedLayer(weight, warnings)


def _matrix(name: str, tensors: Mapping[str, Described], leaf: str) -> tuple[int, ...]:
    """The shape of a tensor that must be a matrix, of int32 or, the scales, of floats."""
    tensor = tensors.get(leaf)
    if tensor is None:
        raise BuildError(f"{name}.{leaf}: missing from the checkpoint")
    shape, dtype = tuple(tensor.shape), tensor.dtype
    expected = dtype in _SCALE_DTYPES if leaf == "scales" else dtype == torch.int32
    if len(shape) != 2 or not expected:
        kind = "floating-point" if leaf == "scales" else "int32"
        raise BuildError(f"{name}.{leaf}: {dtype} {list(shape)} where a {kind} matrix is expected")
    return shape


def _nibbles(words: Tensor) -> Tensor:
    """int32 `[R, C]` -> 0..15 `[R, C * 8]` uint8, the lowest nibble of a word first."""
    nibbles = [(words >> 4 * place & 15).to(torch.uint8) for place in range(_PER_WORD)]
    return torch.stack(nibbles, 2).flatten(1)


def _in_awq_order(nibbles: Tensor) -> Tensor:
    """`[R, C]` in the order of AWQ's nibbles -> in the order of the output features."""
    ordered = torch.empty_like(nibbles).view(nibbles.shape[0], -1, _PER_WORD)
    ordered[:, :, list(_AWQ_ORDER)] = nibbles.view_as(ordered)
    return ordered.flatten(1)


def _gptq_zeros(name: str, qzeros: Tensor, packed: PackedFormat) -> tuple[Tensor, tuple[str, ...]]:
    """Zero points `[G, N]`, read as the version that they are, and what the user should know about it."""
    stored = _nibbles(qzeros)
    version = packed.method
    uniform = int(stored[0, 0]) if bool((stored == stored[0, 0]).all()) else None
    warnings = []
    if packed.symmetric is not False and uniform in (SYMMETRIC_ZERO - 1, SYMMETRIC_ZERO):
        version = "gptq_v2" if uniform == SYMMETRIC_ZERO else "gptq"
        if version != packed.method:
            warnings.append(
                f"{name}.qzeros: labelled {packed.method}, but all zero points are stored as {uniform}, which is how "
                f"{version} stores symmetric weights; read as {version}"
            )
    elif packed.symmetric:
        warnings.append(
            f"{name}.qzeros: the checkpoint says sym, but its zero points differ; read as asymmetric {version}"
        )
    if version == "gptq_v2":
        return stored, tuple(warnings)
    if bool((stored == 15).any()):
        warnings.append(
            f"{name}.qzeros: a zero point of 0, which GPTQ v1 cannot store without touching its neighbours; read as "
            "AutoGPTQ and GPTQModel write it"
        )
    words = qzeros.long() + _ONE_PER_NIBBLE  # carries undo the borrows; what leaves the 32 bits is dropped
    return _nibbles(words), tuple(warnings)


def _stored_order(name: str, g_idx: Tensor | None, in_features: int, group_size: int) -> Tensor | None:
    """The order that makes each group of an act-order layer a contiguous run; None: it is one already."""
    if g_idx is None or g_idx.numel() == 0:
        return None
    groups = num_groups(in_features, group_size)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise BuildError(
            f"{name}.g_idx: groups {int(g_idx.min())}..{int(g_idx.max())} where 0..{groups - 1} exist"
        )
    order = torch.argsort(g_idx, stable=True)
    size = in_features if group_size == -1 else group_size
    if not torch.equal(g_idx[order].long(), torch.arange(in_features) // size):
        raise BuildError(
            f"{name}.g_idx: groups of other sizes than group_size {group_size}; only even groups are supported"
        )
    return None if torch.equal(order, torch.arange(in_features)) else order
