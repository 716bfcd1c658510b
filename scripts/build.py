"""`pelton build`."""

from __future__ import annotations

from pathlib import Path

import click

from ..interrupts import held_interrupts
from .sizes import MEMORY


@click.command(name="build")
@click.argument("model")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Bundle directory. [default: artifacts/NAME-DTYPE, for GPUs with the target and what is quantised]",
)
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    type=click.Choice(["cpu", "tensorrt", "tensorrt-rtx", "cuda"]),
    help="What to compile for.",
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    help="Compute capability to build for, such as 8.9; may be given several times (tensorrt-rtx). [default: all]",
)
@click.option(
    "--frontend",
    type=click.Choice(["onnx", "torch-tensorrt"]),
    help="What hands the graph to TensorRT (--target tensorrt). [default: onnx]",
)
@click.option(
    "--quantize",
    type=click.Choice(["int4", "fp8"]),
    help="Round the weights of the decoder's linear layers (targets for GPUs).",
)
@click.option(
    "--max-kl",
    type=click.FloatRange(min=0, min_open=True),
    help="With --quantize: refuse to lose more, in nats of KL divergence from the original on text. [default: 1.0]",
)
@click.option(
    "--kv-cache-dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "fp8", "int8"]),
    help="KV pages of one byte an element, with scales measured on text (GPU targets); auto: as --dtype.",
)
@click.option(
    "--drafter",
    type=click.Path(path_type=Path),
    help="Directory of `pelton train-drafter`: heads that guess tokens, for speculation (cpu).",
)
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    help="Weights and cache; auto: as the checkpoint says.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="Prompt + output tokens. [default: the model's, at most 8192]",
)
@click.option(
    "--max-batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Sequences per step."
)
@click.option(
    "--max-step-tokens", default=512, show_default=True, type=click.IntRange(min=1), help="Tokens per step."
)
@click.option(
    "--block-size",
    default="32",
    show_default=True,
    type=click.Choice(["16", "32", "64"]),
    help="Tokens per KV page.",
)
@click.option(
    "--kv-cache-memory", default="1GiB", show_default=True, type=MEMORY, help="Memory of the KV pages."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be built and how much memory it needs; build nothing. Downloads the model of a hub id, and "
    "reads all weights once for the content key.",
)
@click.option("--force", is_flag=True, help="Build even if an unchanged bundle is there.")
def command(
    model: str,
    output: Path | None,
    target: str,
    gpus: tuple[str, ...],
    frontend: str | None,
    quantize: str | None,
    max_kl: float | None,
    kv_cache_dtype: str,
    drafter: Path | None,
    dtype: str,
    max_model_len: int | None,
    max_batch_size: int,
    max_step_tokens: int,
    block_size: str,
    kv_cache_memory: int,
    dry_run: bool,
    force: bool,
) -> None:
    """Compile MODEL (a Hugging Face directory, a hub id or a .gguf file) into a bundle.

    The exported graph, and on cpu and cuda the compiled engine too, are checked against the original model; a build
    that does not reproduce it fails. An unchanged build is found and not redone.
    """
    with held_interrupts():
        from ..compile.build import build
        from ..compile.build_plan import BuildRequest, resolve
        from ..compile.progress import Progress, format_bytes

    progress = Progress()
    request = BuildRequest(
        model=model,
        output=output,
        target=target,
        dtype=dtype,
        max_model_len=max_model_len,
        max_batch_size=max_batch_size,
        max_step_tokens=max_step_tokens,
        block_size=int(block_size),
        kv_cache_bytes=kv_cache_memory,
        quantize=quantize,
        max_kl=max_kl,
        kv_cache_dtype=kv_cache_dtype,
        drafter=drafter,
        gpus=tuple(gpu for given in gpus for gpu in given.split(",")),
        frontend=frontend,
    )
    with progress.stage("read checkpoint"):
        plan = resolve(request)
    for warning in plan.warnings:
        progress.warning(warning)
    if dry_run:
        _show_plan(plan)
        return
    memory = plan.memory
    progress.note(
        f"serving will need {format_bytes(memory.total)}: weights {format_bytes(memory.weights)}, KV pages "
        f"{format_bytes(memory.kv_pages)}, activations {format_bytes(memory.activations)}"
        + (f", sampling {format_bytes(memory.sampling)}" if memory.sampling else "")
    )
    manifest, is_unchanged = build(plan, progress, force=force)
    if is_unchanged:
        click.echo(f"{plan.output}: unchanged (content key {manifest.content_key[:12]}), nothing to do")
        return
    progress.summary()
    click.echo(str(plan.output))


def _show_plan(plan: object) -> None:
    from ..compile.build_plan import BuildPlan
    from ..compile.bundle import build_command_into
    from ..compile.progress import format_bytes

    assert isinstance(plan, BuildPlan)
    facts, limits, memory = plan.facts, plan.limits, plan.memory
    tokens = memory.num_blocks * limits.block_size
    has_padding = memory.kv_pages > memory.num_blocks * memory.block_bytes
    padding = ", and one for padding" if has_padding else ""
    rows = [
        ("model", f"{facts.source} ({facts.model_type}, {facts.num_parameters / 1e6:.0f} M parameters)"),
        ("output", str(plan.output)),
        ("target", f"{plan.request.target}, {plan.dtype}, KV pages of {plan.kv_cache_name}"),
        ("max_model_len", f"{limits.max_model_len} tokens of prompt and output"),
        ("max_batch_size", f"{limits.max_batch_size} sequences in a step"),
        ("max_step_tokens", f"{limits.max_step_tokens} tokens in a step"),
        ("weights", f"{format_bytes(memory.weights)}"),
        (
            "KV pages",
            f"{format_bytes(memory.kv_pages)} = {memory.num_blocks} blocks of {limits.block_size} tokens "
            f"({memory.block_bytes} bytes each){padding}: {tokens} tokens",
        ),
        ("activations", f"{format_bytes(memory.activations)} at most"),
        *([("sampling", f"{format_bytes(memory.sampling)} at most")] if memory.sampling else []),
        ("total", f"{format_bytes(memory.total)}"),
        ("build", f"{format_bytes(plan.build_memory)} of host memory at most"),
        *plan.explain(),
        ("content key", plan.content_key[:12]),
        ("command", build_command_into(plan.command, plan.output)),
    ]
    for name, value in rows:
        click.echo(f"{name:<16} {value}")
