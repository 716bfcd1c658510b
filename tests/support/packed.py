"""Linear layers and whole checkpoints packed as AWQ and GPTQ define it, written from their definitions."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]  # the output feature, of eight, in each nibble from the lowest


@dataclass(frozen=True)
class Layer:
    """A quantised layer as numbers: q `[K, N]`, zeros and scales `[G, N]`, the group of each input feature `[K]`."""

    q: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray

    @property
    def weight(self) -> torch.Tensor:
        """`[N, K]` float64."""
        steps = self.q.astype(np.float64) - self.zeros[self.group_of]
        return torch.from_numpy((steps * self.scales[self.group_of].astype(np.float64)).T.copy())


def pack(values: np.ndarray, order: list[int] | None = None) -> torch.Tensor:
    """`[R, C]` -> `[R, C / 8]` int32: `order[i]` of eight neighbours in nibble i."""
    rows, columns = values.shape
    words = np.zeros((rows, columns // 8), np.uint32)
    for column in range(columns // 8):
        for nibble in range(8):
            value = values[:, 8 * column + (order or range(8))[nibble]]
            words[:, column] |= value.astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def as_awq(layer: Layer) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(layer.q, AWQ_NIBBLES),
        "qzeros": pack(layer.zeros, AWQ_NIBBLES),
        "scales": torch.from_numpy(layer.scales),
    }


def as_gptq(layer: Layer, version: int) -> dict[str, torch.Tensor]:
    zeros = pack(layer.zeros)
    if version == 1:  # as AutoGPTQ's conversion does: one is taken from each nibble, in the whole word
        zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - np.uint32(0x11111111)).view(np.int32))
    return {
        "qweight": pack(layer.q.T).T.contiguous(),
        "qzeros": zeros,
        "scales": torch.from_numpy(layer.scales),
        "g_idx": torch.from_numpy(layer.group_of.astype(np.int32)),
    }


def quantise(
    weight: torch.Tensor, group_size: int, *, symmetric: bool = False, order: np.ndarray | None = None
) -> Layer:
    """`[N, K]` rounded to the nearest. `order`: how the input features are dealt out to groups (act-order)."""
    columns = weight.double().numpy().T  # [K, N]
    in_features = len(columns)
    size = in_features if group_size == -1 else group_size
    group_of = np.empty(in_features, np.int64)
    group_of[np.arange(in_features) if order is None else order] = np.arange(in_features) // size
    groups = [columns[group_of == g] for g in range(-(-in_features // size))]
    low = np.stack([group.min(0).clip(max=-1e-3) for group in groups])
    high = np.stack([group.max(0).clip(min=1e-3) for group in groups])
    if symmetric:
        scales, zeros = np.maximum(-low, high) / 7, np.full(low.shape, 8)
    else:
        scales = (high - low) / 14
        zeros = np.clip(np.rint(-low / scales), 1, 15).astype(int)
    scales = scales.astype(np.float16)
    q = np.rint(columns / scales[group_of].astype(np.float64)) + zeros[group_of]
    return Layer(q.clip(0, 15).astype(int), zeros, scales, group_of)


def pack_checkpoint(
    path: Path,
    method: str,
    group_size: int,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    plain: tuple[str, ...] = ("lm_head",),
) -> Path:
    """Quantise the linear layers of the checkpoint in `path` in place; return a copy that holds what they stand for.

    `method`: awq, gptq or gptq_v2. `plain` are names of layers that stay as they are.
    """
    tensors = load_file(path / "model.safetensors")
    packed, restored = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or "embed" in name or any(entry in module for entry in plain):
            continue
        order = None
        if act_order:  # layers that read one tensor are calibrated on it, and so have one order
            seed = zlib.crc32(f"{module.rpartition('.')[0]} {weight.shape[1]}".encode())
            order = np.random.default_rng(seed).permutation(weight.shape[1])
        layer = quantise(weight, group_size, symmetric=symmetric, order=order)
        leaves = as_awq(layer) if method == "awq" else as_gptq(layer, 2 if method == "gptq_v2" else 1)
        del packed[name]
        packed |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
        restored[name] = layer.weight.to(weight.dtype)
    copy = path.with_name(f"{path.name}-restored")
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    save_file(restored, copy / "model.safetensors", metadata={"format": "pt"})
    say_how(path, quantization_config(method, group_size, symmetric=symmetric, act_order=act_order))
    return copy


def quantization_config(
    method: str, group_size: int, *, symmetric: bool = False, act_order: bool = False
) -> dict[str, Any]:
    """What AutoAWQ and GPTQModel write of such a checkpoint."""
    if method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
        }
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": symmetric, "desc_act": act_order,
        "checkpoint_format": method,
    }  # fmt: skip


def say_how(path: Path, config: dict[str, Any]) -> None:
    """Set the `quantization_config` of the checkpoint in `path`."""
    file = path / "config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"quantization_config": config}))
