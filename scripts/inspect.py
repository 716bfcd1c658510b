"""`pelton inspect`: what a bundle is, and whether it is whole and fit for this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command(name="inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest.")
@click.option("--verify", is_flag=True, help="Read every file and compare its sha256.")
def command(bundle: Path, as_json: bool, verify: bool) -> None:
    """Show what BUNDLE holds. Exit code 2 if it is damaged or cannot run on this machine."""
    from ..compile.bundle import HostFacts, build_command_into, check_bundle, read_manifest

    manifest = read_manifest(bundle)
    if as_json:
        click.echo(json.dumps(asdict(manifest), indent=2))
    else:
        model, limits = manifest.model, manifest.limits
        proofs = manifest.quality.get("proofs", [])
        size = sum(record.size for record in manifest.files.values())
        rows = [
            ("model", f"{model.source} ({model.model_type}, {model.num_parameters / 1e6:.0f} M parameters)"),
            ("target", f"{manifest.target}, {manifest.dtype}"),
            ("limits", ", ".join(f"{name}={value}" for name, value in asdict(limits).items())),
            ("size", f"{size / 2**20:.0f} MiB in {len(manifest.files)} files"),
            (
                "built with",
                f"pelton {manifest.versions.pelton}, torch {manifest.versions.torch}, {manifest.versions.compiler}",
            ),
            ("needs", f"{manifest.needs.machine} with {' '.join(manifest.needs.cpu_flags)}"),
            *(
                (
                    proof["subject"],
                    f"relative error {proof['relative_error']:.1e} over {proof['num_rows']} rows",
                )
                for proof in proofs
            ),
            ("content key", manifest.content_key),
            ("build again", build_command_into(manifest.build_command, bundle)),
        ]
        for name, value in rows:
            click.echo(f"{name:<16} {value}")
    check_bundle(manifest, bundle, HostFacts.detect(), verify=verify)
    if verify:
        click.echo("every file is whole", err=True)
