"""`pelton inspect`: what a bundle is, and whether it is whole and fit for this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ..compile.bundle import Manifest
from ..errors import BundleError, ConfigError


@click.command(name="inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest.")
@click.option("--layers", is_flag=True, help="List the engine's layers, with the names of the HF modules.")
@click.option("--verify", is_flag=True, help="Read every file and compare its sha256.")
def command(bundle: Path, as_json: bool, layers: bool, verify: bool) -> None:
    """Show what BUNDLE holds. Exit code 2 if it is damaged or cannot run on this machine."""
    from ..compile.bundle import HostFacts, check_bundle, read_manifest

    manifest = read_manifest(bundle)
    if as_json:
        click.echo(json.dumps(asdict(manifest), indent=2))
    else:
        try:
            rows = _rows(bundle, manifest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BundleError(
                f"{bundle}: manifest.json: engine or quality is not as a build writes it "
                f"({type(error).__name__}: {error}); build the bundle again"
            ) from error
        for name, value in rows:
            click.echo(f"{name:<16} {value}")
    if layers:
        _show_layers(bundle, manifest)
    check_bundle(manifest, bundle, HostFacts.detect(), verify=verify)
    if verify:
        click.echo("every file is whole", err=True)


def _rows(bundle: Path, manifest: Manifest) -> list[tuple[str, str]]:
    from ..compile.bundle import build_command_into

    model, limits = manifest.model, manifest.limits
    proofs = manifest.quality.get("proofs", [])
    size = sum(record.size for record in manifest.files.values())
    return [
        ("model", f"{model.source} ({model.model_type}, {model.num_parameters / 1e6:.0f} M parameters)"),
        ("target", f"{manifest.target}, {manifest.dtype}"),
        *_quantisation(manifest),
        *_drafter(manifest),
        ("KV pages", _kv_pages(manifest)),
        ("limits", ", ".join(f"{name}={value}" for name, value in asdict(limits).items())),
        ("size", f"{size / 2**20:.0f} MiB in {len(manifest.files)} files"),
        (
            "built with",
            f"pelton {manifest.versions.pelton}, torch {manifest.versions.torch}, {manifest.versions.compiler}",
        ),
        ("needs", _needs(manifest)),
        *(
            (
                proof["subject"],
                f"relative error {proof['relative_error']:.1e}, top-1 agreement {proof['top1_agreement']:.1%} "
                f"over {proof['num_rows']} rows",
            )
            for proof in proofs
        ),
        *_cost(manifest),
        ("content key", manifest.content_key),
        ("build again", build_command_into(manifest.build_command, bundle)),
    ]


def _quantisation(manifest: Manifest) -> list[tuple[str, str]]:
    """How the weights were quantised, if they were."""
    facts = manifest.engine.get("quantization")
    return [("quantisation", ", ".join(f"{name}={value}" for name, value in facts.items()))] if facts else []


def _drafter(manifest: Manifest) -> list[tuple[str, str]]:
    """The drafter heads in the bundle, if there are any."""
    facts = manifest.drafter
    if facts is None:
        return []
    return [
        ("drafter", f"{facts.kind}, up to {facts.num_draft_tokens} tokens out of {facts.draft_vocab_size}")
    ]


def _cost(manifest: Manifest) -> list[tuple[str, str]]:
    """What rounding the weights cost, if the build did that."""
    report = manifest.quality.get("quantization")
    if not report:
        return []
    text = (
        f"KL divergence {report['kl_divergence']:.3f} nats, top-1 agreement {report['top1_agreement']:.1%}, perplexity "
        f"{report['perplexity']:.2f} (original {report['original_perplexity']:.2f}) on {report['num_tokens']} tokens"
    )
    return [("rounding cost", text)]


def _kv_pages(manifest: Manifest) -> str:
    cache = manifest.engine.get("kv_cache", {"dtype": manifest.dtype})
    if "k_scales" not in cache:
        return str(cache["dtype"])
    ranges = (
        f"{name} {min(cache[key]):.2g} to {max(cache[key]):.2g}"
        for name, key in (("keys", "k_scales"), ("values", "v_scales"))
    )
    return f"{cache['dtype']}, a scale for each layer: {', '.join(ranges)}"


def _needs(manifest: Manifest) -> str:
    host = f"{manifest.needs.machine} with {' '.join(manifest.needs.cpu_flags)}"
    if manifest.target == "cpu":
        return host
    if manifest.target == "cuda":
        gpu = " or ".join(manifest.engine.get("gpus", ()))
        return f"{host}, torch {manifest.versions.torch}, a GPU of compute capability {gpu}"
    gpus = " or ".join(manifest.engine.get("gpus", ())) or "that of the building machine"
    return f"{manifest.needs.machine}, {manifest.versions.compiler}, a GPU of compute capability {gpus}"


def _show_layers(bundle: Path, manifest: Manifest) -> None:
    """The network's layers as the builder had them: which kernels they became is chosen on the user's GPU."""
    if manifest.target in ("cpu", "cuda"):
        raise ConfigError(
            f"layers: the target {manifest.target} has no list of layers; --json shows its engine"
        )
    try:
        facts = json.loads((bundle / "engine.json").read_text())
        rows = [(str(name), str(kind), str(precision)) for name, kind, precision in facts["layers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"{bundle}: engine.json cannot be read ({error}); build the bundle again"
        ) from error
    for name, kind, precision in rows:
        click.echo(f"{kind:<28} {precision:<8} {name}")
