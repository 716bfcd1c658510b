"""TensorRT's messages become a layer, a cause and a remedy."""

from __future__ import annotations

import pytest

from pelton.compile.diagnose import ParserError, diagnose

# As TensorRT 10/11 and TensorRT-RTX print them.
MESSAGES = {
    "no kernel": (
        "Error Code 10: Internal Error (Could not find any implementation for node "
        "{ForeignNode[model.layers.3.mlp/Mul...model.layers.3.mlp.down_proj/MatMul]}.)",
        "model.layers.3.mlp/Mul to model.layers.3.mlp.down_proj/MatMul",
        "no kernel",
        "--gpu",
    ),
    "memory": (
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        None,
        "memory ran out",
        "--max-step-tokens",
    ),
    "requested memory": (
        "Requested amount of GPU memory (8589934592 bytes) could not be allocated.",
        None,
        "memory ran out",
        "--max-batch-size",
    ),
    "profile": (
        "IExecutionContext::setInputShape: Error Code 3: API Usage Error (Parameter check failed, condition: "
        "engineDims.d[i] == dims.d[i] ... Set dimension [65] for tensor seq_lens does not satisfy any optimization "
        "profiles.)",
        None,
        "outside the optimisation profile",
        "--max-batch-size",
    ),
    "version": (
        "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion stdVersionRead == "
        "kSERIALIZATION_VERSION failed. Version tag does not match. Note: Current Version: 239, Serialized Engine "
        "Version: 228)",
        None,
        "another version of TensorRT",
        "build the bundle again",
    ),
    "gpu": (
        "Using an engine plan file across different models of devices is not supported: it was generated on a "
        "different device",
        None,
        "another GPU",
        "--gpu",
    ),
    "fp8": (
        "model.layers.0.mlp.up_proj/fp8_linear: FP8 is not supported on SM 8.6",
        "model.layers.0.mlp.up_proj/fp8_linear",
        "FP8 is not supported",
        "8.9",
    ),
    "cut file": ("Failed to parse the ONNX model protobuf: truncated", None, "cut or damaged", "disk space"),
    "unknown": ("something that nobody has seen before", None, "could not build the engine", "--target cpu"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_become_layer_cause_and_remedy(name: str) -> None:
    message, layer, cause, remedy = MESSAGES[name]
    found = diagnose(["an unrelated line", message] if name != "unknown" else [message])
    assert found.layer == layer
    assert cause in found.cause
    assert remedy in found.remedy
    assert message.split()[0] in found.detail


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "Plugin not found, are the plugin name, version, and namespace correct?",
            "nor one of Pelton's plugins",
        ),
        ("Axis input must resolve to a build-time constant", "computed at run time"),
        ("Assertion failed: !isDynamic(shape)", "does not support this operator in this form"),
    ],
)
def test_parser_errors_name_their_node(message: str, cause: str) -> None:
    error = ParserError("model.layers.1.self_attn/frobnicate", "frobnicate", message)
    found = diagnose([], [error])
    assert found.layer == "model.layers.1.self_attn/frobnicate"
    assert cause in found.cause


def test_it_reads_as_one_line() -> None:
    text = str(
        diagnose(["Could not find any\n\n   implementation for node [model.layers.0.mlp/Mul]" + "x" * 1000])
    )
    assert "\n" not in text
    assert text.startswith("model.layers.0.mlp/Mul: ")
    assert len(text) < 700


def test_no_message_at_all() -> None:
    assert "no message" in str(diagnose([]))
