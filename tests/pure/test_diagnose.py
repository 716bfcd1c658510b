"""TensorRT's messages become a layer, a cause and a remedy: of a build here, of loading a plan in the second half."""

from __future__ import annotations

import pytest

from pelton.compile.diagnose import ParserError, diagnose
from pelton.plugins_trt.messages import Meaning, recognise
from pelton.runtime.trt_loading import explain

_NO_DRIVER = (
    "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at "
    "/_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: CUDA driver version is insufficient for CUDA "
    "runtime version))"
)

# What TensorRT-RTX 1.7.1 said when it was made to fail (tests/cpu/test_tensorrt_failures.py makes it again).
SEEN = {
    "fp8": (
        "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:1500: run_passes] Cannot compile for "
        "target(s) "
        "sm86, because the model contains HW-specific datatypes: fp8_e4m3. In compileGraph at "
        "/_src/optimizer/myelin/codeGenerator.cpp:2012)",
        None,
        "FP8 is not supported on this GPU",
        "8.9",
    ),
    "bf16": (
        "Myelin ([pass.cpp:1500: run_passes] Cannot compile for target(s) sm75, because the model contains HW-specific "
        "datatypes: b16. In compileGraph at /_src/optimizer/myelin/codeGenerator.cpp:2012)",
        None,
        "bfloat16 is not supported on this GPU",
        "--dtype float16",
    ),
    "plugin without dtypes": (
        "IBuilder::buildSerializedNetwork: Error Code 9: Internal Error "
        "(model.layers.0.self_attn/paged_attention: could "
        "not find any supported formats consistent with input/output data types In reportPluginError at "
        "/_src/optimizer/gpu/jit/pluginV3Builder.cpp:31)",
        "model.layers.0.self_attn/paged_attention",
        "does not take this node",
        "--dtype",
    ),
    "plugin that raises": (
        "IBuilder::buildSerializedNetwork: Error Code 4: Internal Error (Plugin node model.layers.0.self_attn/"
        "paged_attentionreported a negative number of custom tactics In getValidTactics at pluginV3Builder.cpp:73)",
        "model.layers.0.self_attn/paged_attention",
        "does not take this node",
        "report it",
    ),
    "scratch": (
        "IBuilder::buildSerializedNetwork: Error Code 4: Internal Error (Internal error: plugin node model.layers.0."
        "self_attn/paged_attention requires 294912 bytes of scratch space, but only 64 is available. Try "
        "increasing the "
        "workspace size with IBuilderConfig::setMemoryPoolLimit(). In makeRunner at pluginV3Builder.cpp:256)",
        "model.layers.0.self_attn/paged_attention",
        "more scratch memory",
        "--max-step-tokens",
    ),
    "host memory": (
        "[myelinResourceManager.cpp::virtual void* nvinfer1::rt::MyelinHostBuffer::allocate(const string&, "
        "cudaStream_t)::"
        "206] Error Code 2: OutOfMemory (Requested size was 134218111 bytes.)",
        None,
        "memory ran out",
        "--max-batch-size",
    ),
    "exception": ("Unexpected exception std::bad_alloc", None, "memory ran out", "more memory"),
    "profile": (
        "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Dimension mismatch for tensor k_caches_0 and "
        "profile 0. At dimension axis 1, profile has min=16, opt=16, max=16 but tensor has 32. In validate at "
        "/_src/optimizer/api/network.cpp:4054)",
        "input k_caches_0",
        "do not go with the network's input",
        "--dry-run",
    ),
    "types": (
        "ITensor::getDimensions: Error Code 4: API Usage Error (model.layers.0.mlp/MatMul: IMatrixMultiplyLayer "
        "must have "
        "same input types. `A` is of type Half and `B` is of type Float. In validateTypes at "
        "matrixMultiplyNode.cpp:38)",
        "model.layers.0.mlp/MatMul",
        "do not go together",
        "--target cpu",
    ),
    "unquantised fp8": (
        "API Usage Error (Tensor x has datatype FP8 but is not consumed by IPluginLayer, IDequantizeLayer, "
        "IShapeLayer, or "
        "IdentityLayer. In validateQuantizedTypesProducersConsumers at /_src/optimizer/api/network.cpp:271)",
        None,
        "does not support this operator in this form",
        "report it",
    ),
    "empty graph": (
        "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Network must have at least one output. In "
        "validate at /_src/optimizer/api/network.cpp:3810)",
        None,
        "cut or damaged",
        "disk space",
    ),
    "driver": (
        "CUDA initialization failure with error: 35",
        None,
        "driver is missing",
        "--target tensorrt-rtx",
    ),
    "unknown": ("something that nobody has seen before", None, "could not build the engine", "--target cpu"),
}

# As users of TensorRT 8 to 10 quoted them in public trackers.
QUOTED = {
    "no kernel": (  # NVIDIA/TensorRT#2035
        "Error Code 10: Internal Error (Could not find any implementation for node "
        "{ForeignNode[model.layers.3.mlp/Mul...model.layers.3.mlp.down_proj/MatMul]}.)",
        "model.layers.3.mlp/Mul to model.layers.3.mlp.down_proj/MatMul",
        "no kernel",
        "--gpu",
    ),
    "no kernel for reshapes": (  # NVIDIA/TensorRT#3423
        "Error Code 10: Internal Error (Could not find any implementation for node {ForeignNode[(Unnamed Layer* 1247) "
        "[Shuffle]...model.layers.7/Transpose_2 + model.layers.7/Reshape_4]}.)",
        "(Unnamed Layer* 1247) [Shuffle] to model.layers.7/Transpose_2 + model.layers.7/Reshape_4",
        "no kernel",
        "--gpu",
    ),
    "memory": (
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        None,
        "memory ran out",
        "--max-step-tokens",
    ),
    "virtual memory": (  # NVIDIA/TensorRT#3882
        "2: [virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory (no further information)",
        None,
        "memory ran out",
        "--max-batch-size",
    ),
    "fp8": (  # NVIDIA/TensorRT-LLM#1428
        "9: [standardEngineBuilder.cpp::buildEngine::2266] Error Code 9: Internal Error (Networks with FP8 precision "
        "require hardware with FP8 support.)",
        None,
        "FP8 is not supported on this GPU",
        "8.9",
    ),
    "fp8 of one layer": (
        "model.layers.0.mlp.up_proj/fp8_linear: FP8 is not supported on SM 8.6",
        "model.layers.0.mlp.up_proj/fp8_linear",
        "FP8 is not supported",
        "8.9",
    ),
    "old gpu": (
        "Error Code 9: API Usage Error (Target GPU SM 61 is not supported by this TensorRT release.)",
        None,
        "does not build for this GPU",
        "--gpu",
    ),
    "optimum": (  # NVIDIA/TensorRT#1947
        "4: [shapeCompiler.cpp::evaluateShapeChecks::832] Error Code 4: Internal Error (kOPT values for profile "
        "0 violate "
        "shape constraints: broadcast with incompatible dimensions.)",
        None,
        "do not go with the network's input",
        "--dry-run",
    ),
}
MESSAGES = [*SEEN.values(), *QUOTED.values()]


@pytest.mark.parametrize(
    ("message", "layer", "cause", "remedy"), MESSAGES, ids=[*SEEN, *(f"quoted {name}" for name in QUOTED)]
)
def test_messages_become_layer_cause_and_remedy(
    message: str, layer: str | None, cause: str, remedy: str
) -> None:
    is_known = "nobody" not in message
    found = diagnose(["an unrelated line", message, _NO_DRIVER] if is_known else [message])
    assert found.layer == layer
    assert cause in found.cause
    assert remedy in found.remedy
    assert message.split()[0] in found.detail


def test_the_layer_of_the_cause_counts_not_that_of_another_message() -> None:
    found = diagnose(["model.layers.0.mlp/Add: nobody knows", SEEN["scratch"][0]])
    assert found.layer == SEEN["scratch"][1]


def test_a_kernel_that_did_not_fit_into_memory_is_no_missing_kernel() -> None:
    """NVIDIA/TensorRT#2035: only a warning says why there is no implementation."""
    skipped = (
        "Skipping tactic 0 due to insuficient memory on requested size of 29147520 detected for tactic 0."
    )
    unrelated = "Make sure input input_ids has Int64 binding."
    found = diagnose([QUOTED["no kernel"][0]], warnings=[unrelated, skipped])
    assert found.cause == "memory ran out"
    assert found.layer == QUOTED["no kernel"][1]
    assert skipped in found.detail
    assert diagnose([SEEN["types"][0]], warnings=[skipped]).cause != "memory ran out"
    assert "no kernel" in diagnose([QUOTED["no kernel"][0]], warnings=[unrelated]).cause


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "Plugin not found, are the plugin name, version, and namespace correct?",
            "nor one of Pelton's plugins",
        ),
        ("Axis input must resolve to a build-time constant", "computed at run time"),
        ("Assertion failed: !isDynamic(shape)", "does not support this operator in this form"),
        ("false", "does not support this operator in this form"),
    ],
)
def test_parser_errors_name_their_node(message: str, cause: str) -> None:
    error = ParserError("model.layers.1.self_attn/frobnicate", "frobnicate", message, "UNSUPPORTED_NODE")
    found = diagnose([_NO_DRIVER], [error])
    assert found.layer == "model.layers.1.self_attn/frobnicate"
    assert cause in found.cause
    assert "(frobnicate, UNSUPPORTED_NODE)" in found.detail


def test_it_reads_as_one_line() -> None:
    text = str(
        diagnose(["Could not find any\n\n   implementation for node [model.layers.0.mlp/Mul]" + "x" * 1000])
    )
    assert "\n" not in text
    assert text.startswith("model.layers.0.mlp/Mul: ")
    assert len(text) < 700


def test_no_message_at_all() -> None:
    assert "no message" in str(diagnose([]))
    assert "it gives no reason" in explain([], unknown="the plan does not load")


LOADING = {
    # TensorRT-RTX 1.7.1, with bytes that are no plan; the driver is missing too.
    "damaged": (
        [
            "malformed engine",
            "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion header.magicTag == "
            "kEXPECTED_MAGIC_TAG failed.Trying to load an engine created with incompatible serialization version "
            "(2021161080 != 1953657974).)",
            _NO_DRIVER,
        ],
        "it was written by another version of TensorRT, or is damaged",
        "; REBUILD",
    ),
    # TensorRT-RTX 1.7.1 without a GPU: the message has the word `version`, and is about the driver.
    "driver": (
        [
            "Error reading CUDA GPU properties: In getCurrentCC at /_src/runtime/dispatch/planHeaders.cpp:130 "
            "(cudaError "
            "35: CUDA driver version is insufficient for CUDA runtime version) Ensure that the GPU driver is installed",
            _NO_DRIVER,
        ],
        "the CUDA driver is missing or too old",
        "; install a newer NVIDIA driver",
    ),
    "version": (  # TensorRT 8 to 10
        [
            "Error Code 1: Serialization (Serialization assertion stdVersionRead == kSERIALIZATION_VERSION "
            "failed. Version "
            "tag does not match. Note: Current Version: 239, Serialized Engine Version: 228)"
        ],
        "it was written by another version of TensorRT",
        "; REBUILD",
    ),
    "gpu": (  # NVIDIA/TensorRT#2176
        [
            "6: The engine plan file is generated on an incompatible device, expecting compute 8.6 got compute "
            "7.5, please "
            "rebuild.",
            "4: [runtime.cpp::deserializeCudaEngine::50] Error Code 4: Internal Error (Engine deserialization failed.)",
        ],
        "it was built for another GPU",
        "; REBUILD",
    ),
    "plugin": (  # NVIDIA/TensorRT#1913
        [
            "1: [pluginV2Runner.cpp::load::290] Error Code 1: Serialization (Serialization assertion creator "
            "failed.Cannot "
            "deserialize plugin since corresponding IPluginCreator not found in Plugin Registry)"
        ],
        "it uses a plugin that is not registered",
        "; REBUILD",
    ),
    "rtx gpu": (["unsupported cc"], "it was built for another GPU", "; REBUILD"),
    "rtx memory": (["insufficient gpu memory"], "too little free memory", "or choose smaller limits and REBUILD"),
    "rtx driver": (["old cuda driver"], "driver is missing or too old", "; install a newer NVIDIA driver"),
    "profile": (  # NVIDIA/TensorRT-LLM#818
        [
            "3: [executionContext.cpp::setInputShape::2288] Error Code 3: API Usage Error (Parameter check failed, "
            "condition: satisfyProfile Runtime dimension does not satisfy any optimization profile.)"
        ],
        "a shape lies outside what the engine was built for",
        "; REBUILD",
    ),
    "unknown": (["nobody has seen this"], "the plan does not load", "; REBUILD"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADING)
def test_tr_01_what_is_said_of_a_plan_becomes_cause_and_remedy(name: str) -> None:
    messages, cause, remedy = LOADING[name]
    said = explain(messages, unknown="the plan does not load", remedy="REBUILD")
    assert said.startswith(cause) or f"the GPU has {cause}" in said or f"the CUDA {cause}" in said
    assert messages[0][:100] in said
    assert said.endswith(remedy)


def test_every_meaning_is_said_by_some_message() -> None:
    """A rule that another hides, or that no message was found for, is one too many."""
    messages = [
        *([message] for message, *_ in MESSAGES),
        *(messages for messages, *_ in LOADING.values()),
        ["Plugin not found"],
        ["Axis input must resolve to a build-time constant"],
        ["In node 85 with operator: Mish: only float32 or float16 input is supported"],
    ]
    found = {recognised[0] for said in messages if (recognised := recognise(said)) is not None}
    assert found == set(Meaning)
