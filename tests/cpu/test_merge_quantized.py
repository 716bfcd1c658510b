"""Quantised linears that read one tensor, merged on the exported program: the same numbers, fewer nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pelton.compile.export import export, kv_geometry
from pelton.compile.merge_quantized import merge_quantized_siblings
from pelton.compile.proof import FlatStep, StepResult, compare, exported_step, record
from pelton.compile.quantize import Fp8Linear, Int4Linear, Quantization, quantize_linears
from pelton.compile.segments import layer_prefix
from pelton.plugins_trt.fp8_linear import Fp8Weight, fp8_linear, quantize_fp8
from pelton.plugins_trt.int4_linear import Int4Weight, quantize_int4
from support.checkpoints import tiny_model

OPERATORS = (torch.ops.pelton.int4_linear.default, torch.ops.pelton.fp8_linear.default)


def num_linears(program: ExportedProgram) -> int:
    return sum(len(program.graph.find_nodes(op="call_function", target=target)) for target in OPERATORS)


class Siblings(nn.Module):
    """Layers that read one tensor."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def merged(layers: Sequence[nn.Module], *, num_left: int) -> ExportedProgram:
    """Export and merge `layers`; the outputs must not change by a bit."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        program = torch.export.export(Siblings(layers), (x,), dynamic_shapes=({0: Dim("T")},), strict=False)
        expected = program.module()(x)
        assert merge_quantized_siblings(program) == len(layers) - num_left
        program.validate()
        assert num_linears(program) == num_left
        for actual, wanted in zip(program.module()(x), expected, strict=True):
            assert torch.equal(actual, wanted)
        for actual, wanted in zip(Siblings(layers)(x), expected, strict=True):
            assert torch.equal(actual, wanted), "the modules read the joined weights now"
    return program


def int4(
    out_features: int,
    group_size: int = 32,
    *,
    symmetric: bool = False,
    perm: Tensor | None = None,
    bias: bool = False,
) -> Int4Linear:
    random = torch.Generator().manual_seed(out_features)
    weight = quantize_int4(torch.randn(out_features, 64, generator=random), group_size, symmetric)
    stored = Int4Weight(
        weight.qweight, weight.scales, weight.zeros, group_size, 64, None if perm is None else perm.int()
    )
    return Int4Linear(stored, nn.Parameter(torch.randn(out_features), requires_grad=False) if bias else None)


class StaticFp8Linear(nn.Module):
    """A scale for all output features and perhaps one for the activations, as checkpoints in FP8 have them."""

    def __init__(self, weight: Fp8Weight, input_scale: float | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.weight)
        self.register_buffer("weight_scale", weight.scale)
        self.register_buffer("input_scale", None if input_scale is None else torch.tensor([input_scale]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = fp8_linear(x, self.weight, self.weight_scale, self.input_scale)
        return out


def fp8(magnitude: float, *, per_channel: bool, input_scale: float | None = None) -> nn.Module:
    random = torch.Generator().manual_seed(int(magnitude))
    weight = magnitude * torch.randn(24, 64, generator=random)
    return StaticFp8Linear(quantize_fp8(weight, per_channel), input_scale)


@pytest.mark.parametrize(
    ("family", "dtype", "scheme", "sizes"),
    [
        ("llama", torch.float32, Quantization("int4", 32), (14, 8)),
        ("qwen2", torch.bfloat16, Quantization("int4", 64, True), (14, 8)),
        ("gemma2", torch.float32, Quantization("fp8"), (14, 8)),
        ("phi3", torch.float32, Quantization("int4", 32), (8, 8)),
    ],
    ids=["llama", "qwen2", "gemma2", "phi3"],
)
def test_a_model_is_the_same_with_fewer_launches(
    family: str, dtype: torch.dtype, scheme: Quantization, sizes: tuple[int, int]
) -> None:
    """Q/K/V and gate/up are merged; Phi-3 stores them so."""
    model = tiny_model(family).to(dtype).requires_grad_(False)
    geometry = kv_geometry(model.config)
    assert quantize_linears(model, layer_prefix(model, 2), scheme) == sizes[0]
    program = export(model, block_size=32)
    trace = record(model, windows=[0], block_size=32)

    def logits() -> Tensor:
        run, rows = exported_step(program, geometry, trace, dtype), []

        def step(flat: FlatStep) -> StepResult:
            result = run(flat)
            rows.append(result.logits)
            return result

        compare(trace, step, "graph")
        return torch.cat(rows)

    before = logits()
    assert merge_quantized_siblings(program) == sizes[0] - sizes[1]
    program.validate()
    assert num_linears(program) == sizes[1]
    assert torch.equal(logits(), before)


def test_nothing_is_held_twice() -> None:
    layers = [int4(24), int4(40), int4(8)]
    size = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    program = merged(layers, num_left=1)
    tensors = [*program.state_dict.values(), *(buffer for layer in layers for buffer in layer.buffers())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(storages.values()) == size


def test_ql_01_one_order_of_features_is_merged_and_two_are_not() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    merged([int4(24, perm=order), int4(40, perm=order.clone())], num_left=1)
    merged([int4(24, perm=order), int4(40, perm=order.flip(0))], num_left=2)
    merged([int4(24, perm=order), int4(40)], num_left=2)


def test_what_agrees_is_merged_beside_what_does_not() -> None:
    layers = [
        int4(8),
        int4(16, 64),
        int4(24),
        int4(32, symmetric=True),
        int4(40, 64),
        int4(48, symmetric=True),
    ]
    program = merged(layers, num_left=3)
    shapes = [tuple(t.shape) for name, t in program.state_dict.items() if name.endswith("qweight")]
    assert sorted(shape[1] for shape in shapes) == [32, 56, 80]


def test_biases_stay_outside() -> None:
    merged([int4(24, bias=True), int4(40, bias=True), int4(8)], num_left=1)


def test_a_weight_that_is_used_twice_stays_as_it_is() -> None:
    shared = int4(24)
    merged([shared, shared, int4(24)], num_left=3)


@pytest.mark.parametrize("per_channel", [(False, False, False), (True, True, True), (False, True, False)])
@pytest.mark.parametrize("input_scale", [None, 0.05])
def test_ql_11_scales_of_siblings_become_scales_of_their_channels(
    per_channel: tuple[bool, ...], input_scale: float | None
) -> None:
    layers = [
        fp8(magnitude, per_channel=each, input_scale=input_scale)
        for magnitude, each in zip((1.0, 5.0, 40.0), per_channel, strict=True)
    ]
    program = merged(layers, num_left=1)
    (scale,) = [t for name, t in program.state_dict.items() if name.endswith("weight_scale")]
    assert scale.shape == (72,)
    assert len(scale.unique()) >= 3


def test_ql_11_scales_of_activations_that_differ_are_not_merged() -> None:
    merged([fp8(s, per_channel=False, input_scale=s / 20) for s in (1.0, 2.0)], num_left=2)
    merged([fp8(1.0, per_channel=False), fp8(2.0, per_channel=False, input_scale=0.1)], num_left=2)


def test_rounded_layers_of_fp8_are_merged() -> None:
    linears = [nn.Linear(64, size, bias=False).requires_grad_(False) for size in (24, 40)]
    merged([Fp8Linear(linear) for linear in linears], num_left=1)
