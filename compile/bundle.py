"""The bundle: a directory with an engine, what is needed to serve it, and a manifest that says what it is.

The manifest is read and checked before anything else is touched, so a bundle that cannot run here is refused
with what it was built with, what was found and how to rebuild it. This module imports neither torch nor
transformers: the runtime reads manifests with it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import BuildError, BundleError

MANIFEST_NAME = "manifest.json"
# Raised when the manifest, a file's form or what an engine's libraries take changes: older bundles are refused then.
FORMAT_VERSION = 2

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user asks a build to be able to do.

    `max_model_len` is prompt + output of one sequence, `max_step_tokens` the tokens of all sequences in one
    step, `block_size` the tokens of one KV page, `kv_cache_bytes` the memory of all pages of all layers.
    Raises `BuildError` naming the limit.
    """

    max_model_len: int
    max_batch_size: int
    max_step_tokens: int
    block_size: int
    kv_cache_bytes: int

    __pydantic_config__ = _STRICT

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BuildError(f"{field.name}: must be a positive integer, got {value!r}")
        if self.max_step_tokens < self.max_batch_size:
            raise BuildError(
                f"max_step_tokens: {self.max_step_tokens} is below max_batch_size {self.max_batch_size}; a "
                "step gives every running sequence at least one token"
            )

    @property
    def max_blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What built the bundle. `compiler` names the target's own compiler, such as `inductor, g++ 12.2.0`."""

    pelton: str
    torch: str
    transformers: str
    compiler: str

    __pydantic_config__ = _STRICT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """The machine that the engine's code is for: `platform.machine()` and CPU flags as Linux spells them."""

    machine: str
    cpu_flags: tuple[str, ...]

    __pydantic_config__ = _STRICT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model behind the engine. `source` is what the user gave to the build."""

    source: str
    model_type: str
    num_parameters: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int

    __pydantic_config__ = _STRICT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """The drafter heads in the bundle (`plugins_trt/draft_heads.py`); the engine gives the hidden states they read.

    They guess up to `num_draft_tokens` tokens, each one of `draft_vocab_size`.
    """

    kind: str
    hidden_size: int
    draft_vocab_size: int
    num_draft_tokens: int

    __pydantic_config__ = _STRICT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size in bytes and hex digest of one file."""

    size: int
    sha256: str

    __pydantic_config__ = _STRICT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything known about a bundle; equal builds have equal manifests (no dates, no host names).

    `engine` is the target's own: how its executor finds and feeds the engine (files, page layout, cache
    dtype). `quality` holds the results of the build's checks. `files` are the paths inside the bundle,
    `/`-separated, without the manifest itself. `drafter` is None where there is none.
    `build_command` has no output: a bundle may be moved and copied.
    """

    format_version: int
    target: str
    dtype: str
    versions: Versions
    needs: HostNeeds
    limits: Limits
    model: ModelFacts
    engine: Mapping[str, Any]
    quality: Mapping[str, Any]
    checkpoint_hash: str
    content_key: str
    build_command: str
    files: Mapping[str, FileRecord]
    drafter: DrafterFacts | None = None

    __pydantic_config__ = _STRICT

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, directory: Path | None = None) -> Manifest:
        """Parse strictly: unknown, missing or mistyped fields raise `BundleError` naming them.

        `directory` is the bundle that the text comes from, for what the errors say.
        """
        where = MANIFEST_NAME if directory is None else str(directory / MANIFEST_NAME)
        try:
            facts = json.loads(text)
        except ValueError as error:
            raise BundleError(f"{where}: not JSON, cut or damaged ({error}); {_REBUILD}") from error
        version = facts.get("format_version") if isinstance(facts, dict) else None
        if version != FORMAT_VERSION:
            command = facts.get("build_command") if isinstance(facts, dict) else None
            raise BundleError(
                f"{where}: built with bundle format {version!r}, this Pelton reads format {FORMAT_VERSION}; "
                f"{_rebuild(command, directory)}"
            )
        try:
            manifest = _ADAPTER.validate_json(text)
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(str(part) for part in fault["loc"])
            raise BundleError(
                f"{where}: {field}: {fault['msg']}; {_rebuild(facts.get('build_command'), directory)}"
            ) from error
        except BuildError as error:
            raise BundleError(
                f"{where}: limits.{error}; {_rebuild(facts.get('build_command'), directory)}"
            ) from error
        for name in manifest.files:
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts or "\\" in name:
                raise BundleError(f"{where}: files: {name!r} is not a path inside the bundle")
        return manifest


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)
_REBUILD = "rebuild it with `pelton build`"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The machine and versions that a bundle is to run on."""

    machine: str
    cpu_flags: frozenset[str]
    torch_version: str

    @classmethod
    def detect(cls) -> HostFacts:
        return cls(machine=platform.machine(), cpu_flags=_cpu_flags(), torch_version=_torch_version())


def content_key(
    *,
    checkpoint_hash: str,
    target: str,
    dtype: str,
    limits: Limits,
    versions: Versions,
    options: Mapping[str, Any],
) -> str:
    """Equal for builds that would give the same bundle; `options` is whatever else decides it, as JSON."""
    facts = {
        "format": FORMAT_VERSION,
        "checkpoint": checkpoint_hash,
        "target": target,
        "dtype": dtype,
        "limits": dataclasses.asdict(limits),
        "versions": dataclasses.asdict(versions),
        "options": options,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, allow_nan=False).encode()).hexdigest()


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Size and sha256 of every file under `directory` but the manifest."""
    paths = sorted(
        path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST_NAME
    )
    return {
        path.relative_to(directory).as_posix(): FileRecord(size=path.stat().st_size, sha256=_digest(path))
        for path in paths
    }


def write_manifest(manifest: Manifest, directory: Path) -> None:
    (directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the bundle at `path`; `BundleError` if there is none or it cannot be read."""
    if path.exists() and not path.is_dir():
        raise BundleError(f"{path}: is a file, not a bundle directory")
    if not path.is_dir():
        raise BundleError(f"{path}: no such bundle directory; build one with `pelton build MODEL -o {path}`")
    file = path / MANIFEST_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BundleError(f"{path}: not a bundle (no {MANIFEST_NAME})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: cannot be read ({error}); {_REBUILD}") from error
    return Manifest.from_json(text, path)


def check_bundle(manifest: Manifest, path: Path, host: HostFacts, *, verify: bool = False) -> None:
    """Raise `BundleError` unless the bundle at `path` is whole and made for `host`.

    Sizes are always compared; `verify` also reads every file and compares its sha256.
    """
    built, found = [], []
    if manifest.target in ("cpu", "cuda") and manifest.versions.torch != host.torch_version:
        built.append(f"torch {manifest.versions.torch}")
        found.append(f"torch {host.torch_version}")
    if manifest.needs.machine != host.machine:
        built.append(f"a {manifest.needs.machine} machine")
        found.append(host.machine)
    lacking = [flag for flag in manifest.needs.cpu_flags if flag not in host.cpu_flags]
    if lacking:
        built.append(f"a CPU with {', '.join(lacking)}")
        found.append("a CPU without")
    if built:
        raise BundleError(
            f"{path}: built with/for {' and '.join(built)}, found {' and '.join(found)}; "
            f"{_rebuild(manifest.build_command, path)}"
        )
    _check_files(manifest, path, verify)


def find_unchanged(path: Path, key: str) -> Manifest | None:
    """The manifest of a bundle at `path` with this content key, whole to the byte; else None: there is work to do."""
    try:
        manifest = read_manifest(path)
        if manifest.content_key != key:
            return None
        _check_files(manifest, path, verify=True)
    except BundleError:
        return None
    return manifest


@contextmanager
def staged_bundle(path: Path) -> Iterator[Path]:
    """Yield a directory beside `path` to write a bundle into; it becomes `path` when the body ends well.

    The body must write the manifest. Whatever ends the body early, Ctrl-C included, removes the directory and
    leaves what was at `path` as it was; what a killed build left behind is removed by the next one. An
    existing bundle is replaced, any other file or directory is refused (`BuildError`) before the body runs.
    """
    path = path.resolve()
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover(path)
    staging, lock = _create_staging(path)
    try:
        yield staging
        _check_files(read_manifest(staging), staging, verify=False)
        _sync(staging)
        check_replaceable(path)
        _publish(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _check_files(manifest: Manifest, path: Path, verify: bool) -> None:
    for name, record in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise BundleError(f"{path}: {name} is missing; {_rebuild(manifest.build_command, path)}")
        size = file.stat().st_size
        if size != record.size:
            raise BundleError(
                f"{path}: {name} has {size} bytes instead of {record.size}; "
                f"{_rebuild(manifest.build_command, path)}"
            )
        if verify and _digest(file) != record.sha256:
            raise BundleError(
                f"{path}: {name} was changed (sha256 differs); {_rebuild(manifest.build_command, path)}"
            )


def check_replaceable(path: Path) -> None:
    """Raise `BuildError` if there is something at `path` that a build must not replace."""
    if not path.exists() or (path / MANIFEST_NAME).is_file():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise BuildError(
            f"{path}: exists and is not a Pelton bundle; it is not overwritten, choose another output"
        )


def _create_staging(path: Path) -> tuple[Path, int]:
    """A locked `.NAME.*.partial`; named so only once locked, or another build could take it for stale."""
    fresh = path.parent / f".{path.name}.{secrets.token_hex(4)}.new"
    fresh.mkdir()
    lock = os.open(fresh, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks: then nobody can take it for stale either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fresh.rename(fresh.with_suffix(".partial")), lock


def _recover(path: Path) -> None:
    """Clear what builds killed at `path` left: staging that nobody holds, a bundle that was moved aside."""
    for aside in path.parent.glob(f".{escape(path.name)}.*.replaced"):
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(path)
    for staging in path.parent.glob(f".{escape(path.name)}.*.partial"):
        with suppress(OSError):
            lock = os.open(staging, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(staging, ignore_errors=True)
            finally:
                os.close(lock)


def _publish(staging: Path, path: Path) -> None:
    if not path.exists():
        staging.rename(path)
        _sync_directory(path.parent)
        return
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.replaced"
    path.rename(aside)
    try:
        staging.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    _sync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_dir():
            _sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rebuild(command: object, directory: Path | None) -> str:
    if not isinstance(command, str) or not command:
        return _REBUILD
    return f"rebuild with: {command if directory is None else build_command_into(command, directory)}"


def build_command_into(command: str, directory: Path) -> str:
    """A manifest's `build_command`, as a command that builds into `directory`."""
    return f"{command} -o {shlex.quote(str(directory))}"


def _torch_version() -> str:
    """`torch.__version__`, without the second that importing torch takes.

    The metadata of a wheel from PyPI has no local part (`2.13.0`), its `__version__` has (`2.13.0+cu130`).
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        with suppress(OSError):
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            if found := re.search(r"^__version__ = ['\"](.+)['\"]", text, re.M):
                return found[1]
    return metadata.version("torch")


def _cpu_flags() -> frozenset[str]:
    """CPU features from /proc/cpuinfo (`flags` on x86, `Features` on Arm); empty where there is none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()
