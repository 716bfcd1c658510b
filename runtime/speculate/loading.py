"""From the settings of speculation to a `Speculator`: what can be refused is refused before any engine is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...compile.bundle import HostFacts, Manifest, check_bundle, read_manifest
from ...errors import ConfigError
from ...features import unsupported_reason
from ..engine_config import EngineConfig
from ..executor import ExecutorLimits
from ..tokenizer import Tokenizer
from .config import SpeculationConfig
from .draft import Drafter
from .lengths import DraftLengths
from .ngram import NgramDrafter
from .speculator import Speculator
from .suffix import SuffixDrafter


@dataclass(frozen=True, slots=True)
class DraftBundle:
    """A built draft model, checked, and the memory of its pages."""

    directory: Path
    manifest: Manifest
    kv_cache_bytes: int
    num_threads: int | None


@dataclass(frozen=True, slots=True)
class Drafting:
    """What will draft for the bundle at `directory`.

    `kv_cache_bytes` is left for the model's own pages (None: what its bundle was built for).
    """

    config: SpeculationConfig | None
    directory: Path
    manifest: Manifest
    kv_cache_bytes: int | None
    model: DraftBundle | None = None

    def open(self, tokenizer: Tokenizer, limits: ExecutorLimits) -> Speculator:
        """Raises `ConfigError` where the draft model cannot serve an engine of `limits`."""
        if self.config is None:
            return Speculator(eos_token_ids=tokenizer.eos_token_ids)
        drafter = self._open_drafter(self.config, limits)
        return Speculator(
            eos_token_ids=tokenizer.eos_token_ids,
            drafter=drafter,
            draft_limit=self.config.draft_limit,
            lengths=DraftLengths(is_adaptive=self.config.is_adaptive, has_shadows=drafter.is_lookup),
        )

    def _open_drafter(self, config: SpeculationConfig, limits: ExecutorLimits) -> Drafter:
        if config.method == "ngram":
            return NgramDrafter(*config.ngram_sizes)
        if config.method == "suffix":
            return SuffixDrafter()
        if self.model is None:
            from .heads import load_heads

            return load_heads(self.directory, self.manifest, limits)
        from ..executor_cpu import CpuExecutor
        from .draft_model import DraftModelDrafter

        executor = CpuExecutor(
            self.model.directory,
            self.model.manifest,
            kv_cache_bytes=self.model.kv_cache_bytes,
            num_threads=self.model.num_threads,
        )
        try:
            return DraftModelDrafter(executor, limits)
        except BaseException:
            executor.close()
            raise


def read_drafting(
    config: EngineConfig, directory: Path, manifest: Manifest, tokenizer: Tokenizer
) -> Drafting:
    """What `config` asks of the bundle at `directory`. Raises `ConfigError` naming the field, `BundleError`."""
    speculation = config.speculation
    if speculation is not None and speculation.method == "heads" and manifest.drafter is None:
        reason = unsupported_reason("drafter heads", manifest.target)
        raise ConfigError(
            f"speculation: {directory} has no drafter heads, and is built for {manifest.target}: {reason}"
            if reason is not None
            else f"speculation: method heads needs drafter heads, and {directory} has none; train some with `pelton "
            "train-drafter`, build with --drafter, or choose another method"
        )
    if speculation is None or speculation.method != "draft-model":
        return Drafting(speculation, directory, manifest, config.kv_cache_bytes)
    from ...plugins_trt.cpu_engine import EngineProgram
    from .draft_model import check_same_tokens

    assert speculation.draft_bundle is not None  # its method needs it
    path = speculation.draft_bundle
    draft = read_manifest(path)
    check_bundle(draft, path, HostFacts.detect())
    for name, one in (("the model", manifest), ("draft_bundle", draft)):
        reason = unsupported_reason("draft model", one.target)
        if reason is not None:
            raise ConfigError(
                f"speculation: {name} is built for {one.target}, but {reason}; use method ngram or suffix"
            )
    check_same_tokens(tokenizer, Tokenizer.from_directory(path))
    # Block b of the pool is a page of each model, so both have as many of them.
    total = manifest.limits.kv_cache_bytes if config.kv_cache_bytes is None else config.kv_cache_bytes
    own_bytes, draft_bytes = (EngineProgram.read(one).block_bytes for one in (directory, path))
    num_blocks = total // (own_bytes + draft_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory: {total} bytes hold no block of {own_bytes} + {draft_bytes} bytes (model and draft "
            "model); raise it"
        )
    model = DraftBundle(path, draft, num_blocks * draft_bytes, config.num_threads)
    return Drafting(speculation, directory, manifest, num_blocks * own_bytes, model)
