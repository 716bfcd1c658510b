"""Checkpoint -> bundle: the stages of a build, in order."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.export import ExportedProgram

from ..errors import BuildError
from .build_plan import BuildPlan
from .bundle import (
    FORMAT_VERSION,
    Manifest,
    find_unchanged,
    record_files,
    staged_bundle,
    write_manifest,
)
from .checkpoint import load_model, load_tokenizer, write_serving_files
from .export import KVGeometry, check_windows, export, first_line, kv_geometry
from .host_memory import check_host_memory
from .kv_cache import CacheScales, calibrate, engine_tolerance, evaluation_ids, measure
from .merge_quantized import merge_quantized_siblings
from .progress import Progress, format_bytes
from .proof import MAX_PROVED_WINDOW, ProofResult, Trace, compare, exported_step, record
from .quality import QualityGate, QualityReport
from .quantize import Quantization, quantize_linears
from .quantize_experts import quantize_experts
from .segments import PAGED_ATTENTION, attention_of, layer_prefix
from .targets.base import Exported

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Weights on the disk at once: in the file that a compiler reads and in the engine, with something to spare.
_DISK_COPIES = 3


def build(plan: BuildPlan, progress: Progress, *, force: bool = False) -> tuple[Manifest, bool]:
    """Make the bundle, or find it unchanged (True). It appears whole or not at all.

    Raises `BuildError`, before anything is loaded where this machine has too little memory for the build.
    """
    output = plan.output
    if not force and (unchanged := find_unchanged(output, plan.content_key)) is not None:
        return unchanged, True
    check_host_memory(plan.build_memory, progress)
    try:
        with staged_bundle(output) as staging:
            manifest = _build_into(staging, plan, progress)
            with progress.stage("write bundle"):
                write_serving_files(plan.checkpoint, staging)
                if plan.drafter is not None:
                    plan.drafter.copy_into(staging)
                manifest = replace(manifest, files=record_files(staging))
                write_manifest(manifest, staging)
    except (OSError, SafetensorError) as error:
        if not _is_disk_full(error):
            raise
        raise BuildError(
            f"{output}: what the build writes does not fit on the disk ({first_line(error)}); it needs up to "
            f"{format_bytes(_DISK_COPIES * plan.memory.weights)} there: free some, or choose another --output"
        ) from error
    return manifest, False


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _DISK_FULL
    # safetensors, written in Rust, has the number in its text alone.
    return any(f"os error {number}" in str(error) for number in _DISK_FULL)


def _build_into(staging: Path, plan: BuildPlan, progress: Progress) -> Manifest:
    target, dtype, block_size = plan.target, getattr(torch, plan.dtype), plan.limits.block_size
    with progress.stage("load weights"):
        model = load_model(plan.checkpoint, dtype, progress.warning)
    geometry = kv_geometry(model.config)
    report = None if plan.quantization is None else _quantize(plan, plan.quantization, model, progress)
    if plan.checkpoint.packed:
        progress.warning(
            "the original of the packed weights is not here: what packing them cost is not measured"
        )
    with progress.stage("export"):
        program = export(
            model,
            block_size=block_size,
            experts=target.experts,
            cache_dtype=plan.kv_cache_dtype,
            with_hidden=plan.drafter is not None,
        )
        num_merged = merge_quantized_siblings(program)
    if num_merged:
        progress.note(f"{num_merged} quantised layers merged into others that read the same tensor")
    nodes = program.graph.find_nodes(op="call_function", target=PAGED_ATTENTION)
    layer_windows = [attention_of(node).window for node in nodes]
    check_windows(model.config, layer_windows)
    windows = sorted(set(layer_windows))
    unproved = [window for window in windows if window > MAX_PROVED_WINDOW]
    if unproved:
        progress.warning(f"the proof runs no sequence longer than the sliding window of {unproved[0]} tokens")
    trace, proofs, scales = _prove(plan, model, program, geometry, windows, progress)
    exported = Exported(
        model, program, geometry, dtype, plan.limits, plan.memory.num_blocks, plan.facts.vocab_size
    )
    del model, program
    engine = target.lower(exported, staging, progress)
    if (step := target.engine_step(staging, trace)) is not None:
        with progress.stage("check the engine against the model"):
            tolerance = engine_tolerance(trace, proofs[-1]) if scales else None
            proofs.append(compare(trace, step, "compiled engine", tolerance=tolerance))
    else:
        progress.warning(f"builds do not run {target.name} engines: only the exported graph was checked")
    for proof in proofs:
        hidden = "" if proof.hidden_error is None else f", of the hidden states {proof.hidden_error:.1e}"
        progress.note(
            f"{proof.subject}: relative error {proof.relative_error:.1e} (at most {proof.tolerance:.1e}){hidden}"
        )
    return Manifest(
        format_version=FORMAT_VERSION,
        target=target.name,
        dtype=plan.dtype,
        versions=plan.versions,
        needs=target.needs(),
        limits=plan.limits,
        model=plan.facts,
        engine={
            **engine,
            "windows": windows,
            "quantization": plan.weights.facts(),
            "kv_cache": {"dtype": plan.kv_cache_name, **(scales.to_json() if scales else {})},
        },
        quality={
            "proofs": [proof.to_json() for proof in proofs],
            "unproved_windows": unproved,
            "quantization": report.to_json() if report else None,
        },
        checkpoint_hash=plan.checkpoint.content_hash,
        content_key=plan.content_key,
        build_command=plan.command,
        files={},
        drafter=plan.drafter.facts() if plan.drafter else None,
    )


def _quantize(
    plan: BuildPlan, quantization: Quantization, model: nn.Module, progress: Progress
) -> QualityReport:
    """Round the weights of `model` in place, and measure what that costs."""
    config: Any = model.config
    with progress.stage("measure the original"):
        gate = QualityGate(model, load_tokenizer(plan.checkpoint), config)
    with progress.stage(f"quantise to {quantization.scheme}"):
        prefix = layer_prefix(model, config.num_hidden_layers)
        count = quantize_linears(model, prefix, quantization)
        num_experts = quantize_experts(model, prefix, quantization)
    experts = f", the routed experts of {num_experts} layers" if num_experts else ""
    progress.note(f"{count} linear layers{experts}")
    with progress.stage("measure what it costs"):
        report = gate.measure(model, plan.max_kl)
    progress.note(str(report))
    return report


def _prove(
    plan: BuildPlan,
    model: nn.Module,
    program: ExportedProgram,
    geometry: tuple[KVGeometry, ...],
    windows: list[int],
    progress: Progress,
) -> tuple[Trace, list[ProofResult], CacheScales | None]:
    """Compare the exported graph with the model; where its pages are quantised, calibrate it and measure the loss.

    The graph itself is proved with pages that lose nothing, so that a fault cannot hide in what quantisation loses.
    """
    block_size, cache_dtype, with_hidden = (
        plan.limits.block_size,
        plan.kv_cache_dtype,
        plan.drafter is not None,
    )
    if cache_dtype is None:
        with progress.stage("prove the exported graph"):
            trace = record(model, windows=windows, block_size=block_size, with_hidden=with_hidden)
            run = exported_step(program, geometry, trace, getattr(torch, plan.dtype))
            return trace, [compare(trace, run, "exported graph")], None
    tokenizer = load_tokenizer(plan.checkpoint)
    with progress.stage("calibrate the KV pages"):
        scales = calibrate(
            program, geometry, tokenizer, model.config, cache_dtype=cache_dtype, block_size=block_size
        )
    with progress.stage("prove the exported graph"):
        text = evaluation_ids(tokenizer, model.config)
        trace = record(model, windows=windows, block_size=block_size, text=text, with_hidden=with_hidden)
        run = exported_step(program, geometry, trace, torch.float32)
        proofs = [compare(trace, run, "exported graph"), measure(trace, program, geometry, cache_dtype)]
    progress.note(
        f"{proofs[-1].subject}: top-1 agreement {proofs[-1].top1_agreement:.1%}, KL divergence "
        f"{proofs[-1].kl_divergence:.1e} nats on text"
    )
    return trace, proofs, scales
