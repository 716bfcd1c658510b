"""Bundles: a strict manifest, refusals that say what to do, directories that appear whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pelton.compile.bundle import (
    FORMAT_VERSION,
    DrafterFacts,
    HostFacts,
    HostNeeds,
    Limits,
    Manifest,
    ModelFacts,
    Versions,
    check_bundle,
    content_key,
    find_unchanged,
    read_manifest,
    record_files,
    staged_bundle,
    write_manifest,
)
from pelton.errors import BuildError, BundleError

COMMAND = "pelton build some/model --target cpu"
LIMITS = Limits(
    max_model_len=100, max_batch_size=8, max_step_tokens=64, block_size=16, kv_cache_bytes=1 << 20
)
VERSIONS = Versions(
    pelton="0.1.0", torch="2.13.0+cpu", transformers="5.24.0", compiler="inductor, g++ 12.2.0"
)
HOST = HostFacts(
    machine="x86_64", cpu_flags=frozenset({"avx2", "avx512f", "amx_tile"}), torch_version="2.13.0+cpu"
)


def manifest_of(directory: Path) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        target="cpu",
        dtype="bfloat16",
        versions=VERSIONS,
        needs=HostNeeds(machine="x86_64", cpu_flags=("avx512f", "amx_tile")),
        limits=LIMITS,
        model=ModelFacts(
            source="some/model",
            model_type="llama",
            num_parameters=1000,
            num_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            head_dim=16,
            hidden_size=64,
            vocab_size=320,
            max_position_embeddings=512,
        ),
        engine={
            "package": "engine.pt2",
            "cache": {"dtype": "bfloat16", "key_layout": ["block", "dim", "slot"]},
        },
        quality={"max_abs_error": 0.001, "exact": True, "note": None},
        checkpoint_hash="0" * 64,
        content_key="1" * 64,
        build_command=COMMAND,
        files=record_files(directory),
    )


def build(path: Path, engine: bytes = b"engine") -> Manifest:
    return build_then(path, lambda staging: None, engine)


def build_then(path: Path, last: Callable[[Path], None], engine: bytes = b"engine") -> Manifest:
    """Build a bundle at `path`; `last` is called with the staging directory when all is written."""
    with staged_bundle(path) as staging:
        (staging / "engine.pt2").write_bytes(engine)
        (staging / "weights").mkdir()
        (staging / "weights" / "w.safetensors").write_bytes(b"weights")
        manifest = manifest_of(staging)
        write_manifest(manifest, staging)
        last(staging)
    return manifest


def throw(error: type[BaseException]) -> None:
    raise error


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    facts = json.loads((path / "manifest.json").read_text())
    edit(facts)
    (path / "manifest.json").write_text(json.dumps(facts))


def tree(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


def test_a_built_bundle_reads_back_equal_and_passes(tmp_path: Path) -> None:
    manifest = build(tmp_path / "deep" / "bundle")
    assert set(manifest.files) == {"engine.pt2", "weights/w.safetensors"}
    assert read_manifest(tmp_path / "deep" / "bundle") == manifest
    check_bundle(manifest, tmp_path / "deep" / "bundle", HOST, verify=True)
    assert tree(tmp_path / "deep") == {
        "bundle",
        "bundle/manifest.json",
        "bundle/engine.pt2",
        "bundle/weights",
        "bundle/weights/w.safetensors",
    }


@pytest.mark.parametrize(
    ("edit", "built", "found"),
    [
        (lambda f: f["versions"].update(torch="2.12.1+cpu"), "torch 2.12.1+cpu", "torch 2.13.0+cpu"),
        (lambda f: f["needs"].update(machine="aarch64"), "aarch64", "x86_64"),
        (lambda f: f["needs"].update(cpu_flags=["avx512f", "avx10_2"]), "avx10_2", "without"),
        (lambda f: f["files"]["engine.pt2"].update(size=7), "instead of 7", "has 6 bytes"),
        (lambda f: f["files"].update(more=f["files"]["engine.pt2"]), "more", "missing"),
    ],
)
def test_a_bundle_for_something_else_is_refused(
    edit: Callable[[dict[str, Any]], None], built: str, found: str, tmp_path: Path
) -> None:
    build(tmp_path / "b")
    edit_manifest(tmp_path / "b", edit)
    with pytest.raises(BundleError) as error:
        check_bundle(read_manifest(tmp_path / "b"), tmp_path / "b", HOST)
    for part in (built, found, f"rebuild with: {COMMAND} -o {tmp_path / 'b'}", str(tmp_path / "b")):
        assert part in str(error.value)


def test_a_bundle_that_was_moved_is_rebuilt_where_it_is(tmp_path: Path) -> None:
    build(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "my bundle")
    hint = re.escape(f"rebuild with: {COMMAND} -o '{tmp_path}/my bundle'") + "$"
    edit_manifest(tmp_path / "my bundle", lambda f: f.update(needs=None))
    with pytest.raises(BundleError, match=hint):
        read_manifest(tmp_path / "my bundle")
    edit_manifest(tmp_path / "my bundle", lambda f: f.update(format_version=1))
    with pytest.raises(BundleError, match=hint):
        read_manifest(tmp_path / "my bundle")


def test_every_mismatch_is_told_at_once(tmp_path: Path) -> None:
    manifest = build(tmp_path / "b")
    other = HostFacts(machine="aarch64", cpu_flags=frozenset(), torch_version="2.14.0")
    with pytest.raises(
        BundleError, match=r"torch 2\.13\.0\+cpu and .*x86_64.* and .*avx512f, amx_tile.*found"
    ):
        check_bundle(manifest, tmp_path / "b", other)


def test_what_does_not_bind_a_bundle_is_no_reason_to_refuse_it(tmp_path: Path) -> None:
    build(tmp_path / "b")
    edit_manifest(tmp_path / "b", lambda f: f["versions"].update(pelton="0.2.0", transformers="5.25.0"))
    check_bundle(read_manifest(tmp_path / "b"), tmp_path / "b", HOST)


def test_a_changed_byte_is_found_when_asked_for(tmp_path: Path) -> None:
    manifest = build(tmp_path / "b")
    (tmp_path / "b" / "engine.pt2").write_bytes(b"Engine")
    check_bundle(manifest, tmp_path / "b", HOST)
    with pytest.raises(BundleError, match=r"engine\.pt2 was changed.*rebuild with"):
        check_bundle(manifest, tmp_path / "b", HOST, verify=True)


@pytest.mark.parametrize("damage", [b"engin", b"", None])
def test_a_torn_or_missing_file_is_always_found(damage: bytes | None, tmp_path: Path) -> None:
    manifest = build(tmp_path / "b")
    file = tmp_path / "b" / "engine.pt2"
    file.unlink()
    if damage is not None:
        file.write_bytes(damage)
    with pytest.raises(BundleError, match=r"engine\.pt2"):
        check_bundle(manifest, tmp_path / "b", HOST)


def _fields(facts: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all fixed fields; `engine`, `quality` and the entries of `files` are open-ended."""
    paths = []
    for name, value in facts.items():
        paths.append((*prefix, name))
        if isinstance(value, dict) and name not in ("engine", "quality", "files"):
            paths.extend(_fields(value, (*prefix, name)))
    return paths


FIELDS = _fields(dataclasses.asdict(manifest_of(Path(os.devnull))))


def test_a_manifest_with_a_drafter_reads_back_equal(tmp_path: Path) -> None:
    facts = DrafterFacts(kind="eagle", hidden_size=64, draft_vocab_size=100, num_draft_tokens=4)
    manifest = dataclasses.replace(manifest_of(tmp_path), drafter=facts)
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize("field", FIELDS, ids=".".join)
def test_every_field_is_required_and_typed(field: tuple[str, ...], tmp_path: Path) -> None:
    text = build(tmp_path / "b").to_json()
    # Bundles without drafter heads need not say so.
    for change in ("mistype",) if field == ("drafter",) else ("remove", "rename", "mistype"):
        facts = json.loads(text)
        inner = facts
        for name in field[:-1]:
            inner = inner[name]
        value = inner.pop(field[-1])
        if change == "rename":
            inner[f"{field[-1]}_"] = value
        if change == "mistype":
            inner[field[-1]] = [1.5] if not isinstance(value, int) else str(value)
        if field == ("drafter",) and change == "remove":  # none is written as none, or left out
            assert Manifest.from_json(json.dumps(facts)).drafter is None
            continue
        with pytest.raises(BundleError) as error:
            Manifest.from_json(json.dumps(facts))
        assert field[-1] in str(error.value) or field == ("format_version",)
        assert "rebuild" in str(error.value)


@pytest.mark.parametrize(
    "edit",
    [
        lambda f: f["limits"].update(block_size=0),
        lambda f: f["limits"].update(block_size=True),
        lambda f: f["limits"].update(max_step_tokens=4),
        lambda f: f["files"]["engine.pt2"].update(mode="rw"),
        lambda f: f["files"].update({"../outside": f["files"]["engine.pt2"]}),
        lambda f: f["files"].update({"/etc/passwd": f["files"]["engine.pt2"]}),
        lambda f: f.update(needs=None),
    ],
)
def test_values_that_make_no_sense_are_refused(
    edit: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    build(tmp_path / "b")
    edit_manifest(tmp_path / "b", edit)
    with pytest.raises(BundleError, match=r"limits|files|needs"):
        read_manifest(tmp_path / "b")


def test_another_format_version_is_named_before_anything_else(tmp_path: Path) -> None:
    text = json.dumps({"format_version": 1, "build_command": COMMAND, "unknown": 1})
    with pytest.raises(BundleError, match="bundle format 1, this Pelton reads format 2") as error:
        Manifest.from_json(text)
    assert str(error.value).endswith(f"rebuild with: {COMMAND}")


def test_a_manifest_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "b")
    file = tmp_path / "b" / "manifest.json"
    data = file.read_bytes()
    for length in range(0, len(data) - 2, 37):
        file.write_bytes(data[:length])
        with pytest.raises(BundleError, match=r"manifest\.json.*rebuild"):
            read_manifest(tmp_path / "b")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match=r"manifest\.json"):
        read_manifest(tmp_path / "b")


def test_no_bundle_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no such bundle directory; build one with"):
        read_manifest(tmp_path / "nothing")
    with pytest.raises(BundleError, match="not a bundle"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, 1.5, "16", None, True])
def test_limits_are_positive_integers(field: str, value: object) -> None:
    with pytest.raises(BuildError, match=field):
        dataclasses.replace(LIMITS, **{field: value})


def test_limits_fit_each_other() -> None:
    assert dataclasses.replace(LIMITS, max_model_len=97).max_blocks_per_sequence == 7
    assert dataclasses.replace(LIMITS, max_model_len=96).max_blocks_per_sequence == 6
    with pytest.raises(BuildError, match="max_step_tokens"):
        dataclasses.replace(LIMITS, max_step_tokens=7)


def test_the_content_key_depends_on_each_input_and_on_nothing_else() -> None:
    base: dict[str, Any] = {
        "checkpoint_hash": "a",
        "target": "cpu",
        "dtype": "bfloat16",
        "limits": LIMITS,
        "versions": VERSIONS,
        "options": {"freeze": True, "threads": 2},
    }
    changes: list[dict[str, Any]] = [
        {},
        {"checkpoint_hash": "b"},
        {"target": "cuda"},
        {"dtype": "float32"},
        *({"limits": dataclasses.replace(LIMITS, **{f.name: 60})} for f in dataclasses.fields(Limits)),
        *({"versions": dataclasses.replace(VERSIONS, **{f.name: "0"})} for f in dataclasses.fields(Versions)),
        {"options": {"freeze": False, "threads": 2}},
        {"options": {}},
    ]
    keys = [content_key(**(base | change)) for change in changes]
    assert len(set(keys)) == len(keys)
    assert content_key(**(base | {"options": {"threads": 2, "freeze": True}})) == keys[0]


def test_an_unchanged_build_is_found(tmp_path: Path) -> None:
    manifest = build(tmp_path / "b")
    assert find_unchanged(tmp_path / "b", manifest.content_key) == manifest
    assert find_unchanged(tmp_path / "b", "2" * 64) is None
    assert find_unchanged(tmp_path / "nothing", manifest.content_key) is None
    (tmp_path / "b" / "engine.pt2").unlink()
    assert find_unchanged(tmp_path / "b", manifest.content_key) is None


def test_a_bundle_with_a_changed_byte_is_built_again(tmp_path: Path) -> None:
    manifest = build(tmp_path / "b")
    file = tmp_path / "b" / "engine.pt2"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    assert find_unchanged(tmp_path / "b", manifest.content_key) is None


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_what_was_there(
    interruption: type[BaseException], tmp_path: Path
) -> None:
    before = build(tmp_path / "b")
    for path in (tmp_path / "b", tmp_path / "new"):
        with pytest.raises(interruption):
            build_then(path, lambda staging: throw(interruption))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    check_bundle(before, tmp_path / "b", HOST, verify=True)


def test_a_build_that_is_not_whole_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no manifest\.json"), staged_bundle(tmp_path / "b"):
        pass
    with pytest.raises(BundleError, match="missing"):
        build_then(tmp_path / "b", lambda staging: (staging / "engine.pt2").unlink())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_bundle_is_replaced_whole(tmp_path: Path) -> None:
    build(tmp_path / "b", b"old engine")
    (tmp_path / "b" / "left over").touch()
    manifest = build(tmp_path / "b", b"new engine")
    check_bundle(manifest, tmp_path / "b", HOST, verify=True)
    assert tree(tmp_path / "b") == {"engine.pt2", "manifest.json", "weights", "weights/w.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_foreign_files_and_directories_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    for name in ("dir", "file"):
        with pytest.raises(BuildError, match="not a Pelton bundle"), staged_bundle(tmp_path / name):
            pytest.fail("the body must not run")
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    build(tmp_path / "empty")


def test_a_directory_that_became_foreign_meanwhile_is_kept(tmp_path: Path) -> None:
    def occupy(staging: Path) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "thesis.txt").write_text("mine")

    with pytest.raises(BuildError, match="not a Pelton bundle"):
        build_then(tmp_path / "b", occupy)
    assert tree(tmp_path) == {"b", "b/thesis.txt"}


KILLED = """
import os, signal, sys
from pathlib import Path
from pelton.compile.bundle import staged_bundle
with staged_bundle(Path(sys.argv[1])) as staging:
    (staging / "engine.pt2").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_build_left_is_removed_by_the_next_and_a_running_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "b[1]"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (dead,) = tmp_path.iterdir()
    with staged_bundle(path) as running:
        assert not dead.exists()
        build(path)
        assert running.exists()
        write_manifest(manifest_of(running), running)
    assert [entry.name for entry in tmp_path.iterdir()] == ["b[1]"]


def test_a_bundle_that_a_killed_build_moved_aside_comes_back(tmp_path: Path) -> None:
    manifest = build(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / ".b.0badcafe.replaced")
    with pytest.raises(KeyboardInterrupt), staged_bundle(tmp_path / "b"):
        raise KeyboardInterrupt
    check_bundle(manifest, tmp_path / "b", HOST, verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_this_host_is_described() -> None:
    host = HostFacts.detect()
    assert host.torch_version.startswith("2.")
    if sys.platform == "linux" and host.machine == "x86_64":
        assert {"fpu", "sse2"} <= host.cpu_flags


def test_reading_bundles_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, pelton.compile.bundle, pelton.compile.progress\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
