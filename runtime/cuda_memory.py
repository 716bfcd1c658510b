"""How much GPU memory an executor of the `cuda` target takes, decided before any is allocated.

    total = weights + KV pages + activations + inputs + logits + sampling

What was counted when the bundle was built (`CudaNeeds`) is taken from its manifest; pages are `kv_cache_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compile.bundle import Limits, Manifest
from ..errors import BundleError, ConfigError
from ..plugins_trt.sampling_memory import SamplerSizes, sampler_sizes
from .trt_facts import EngineFacts
from .trt_shapes import StepSize

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class CudaNeeds:
    """What a bundle's manifest says of the memory of a step: an upper bound of what a step computes on the way, and how
    many rows of logits one run can return.
    """

    activation_bytes: int
    num_logits_rows: int

    @classmethod
    def read(cls, manifest: Manifest, remedy: str) -> CudaNeeds:
        """Raises `BundleError` naming the field; `remedy` says what to do then."""
        values = {}
        for name in ("activation_bytes", "num_logits_rows"):
            value = manifest.engine.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BundleError(
                    f"manifest.json: engine.{name}: must be a positive integer, got {value!r}; {remedy}"
                )
            values[name] = value
        return cls(**values)


@dataclass(frozen=True, slots=True)
class CudaMemoryPlan:
    """Bytes on the device. `input_bytes` and `sampling.pinned_bytes` are needed once more in pinned host memory."""

    num_blocks: int
    num_logits_rows: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    input_bytes: int
    logits_bytes: int
    sampling: SamplerSizes

    @property
    def other_bytes(self) -> int:
        """All but the pages."""
        step = self.activation_bytes + self.input_bytes + self.logits_bytes + self.sampling.device_bytes
        return self.weight_bytes + step

    @property
    def device_bytes(self) -> int:
        return self.kv_bytes + self.other_bytes


def plan_memory(
    facts: EngineFacts,
    needs: CudaNeeds,
    built: Limits,
    *,
    weight_bytes: int,
    kv_cache_bytes: int | None,
    free_bytes: int,
) -> CudaMemoryPlan:
    """Pages for `kv_cache_bytes` (None: what the bundle was built for), and everything else that a process needs.

    `free_bytes` is what the device has free. Raises `ConfigError` naming the setting when it does not fit.
    """
    available = built.kv_cache_bytes if kv_cache_bytes is None else kv_cache_bytes
    num_blocks = available // facts.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory: {available} bytes hold no block of {facts.block_bytes} bytes; raise it"
        )
    for profile in facts.profiles:
        if fault := profile.fault({name: facts.cache_shape(name, num_blocks) for name in facts.cache_names}):
            raise ConfigError(f"kv_cache_memory: {num_blocks} blocks cannot be used; lower it ({fault})")
    rows = min(needs.num_logits_rows, facts.widest.largest("logits_rows")[0])
    tables = [profile.largest("block_table") for profile in facts.profiles]
    largest = StepSize(
        num_tokens=facts.widest.largest("input_ids")[1],
        num_sequences=max(num_sequences for num_sequences, _ in tables),
        num_pages=max(num_pages for _, num_pages in tables),
        num_rows=rows,
    )
    plan = CudaMemoryPlan(
        num_blocks=num_blocks,
        num_logits_rows=rows,
        weight_bytes=weight_bytes,
        kv_bytes=num_blocks * facts.block_bytes,
        activation_bytes=needs.activation_bytes,
        input_bytes=largest.num_bytes,
        logits_bytes=rows * facts.vocab_size * _FLOAT32,
        sampling=sampler_sizes(facts.vocab_size, largest.num_sequences, rows),
    )
    if plan.device_bytes > free_bytes:
        left = free_bytes - plan.other_bytes
        remedy = (
            f"lower it to at most {left >> 20} MiB"
            if left >= max(facts.block_bytes, 1 << 20)
            else "build again with smaller limits or --quantize int4, or free the GPU"
        )
        step_bytes = plan.other_bytes - plan.weight_bytes
        raise ConfigError(
            f"kv_cache_memory: {plan.kv_bytes >> 20} MiB of KV pages, {plan.weight_bytes >> 20} MiB of weights and "
            f"{step_bytes >> 20} MiB for a step are needed, but only {free_bytes >> 20} MiB "
            f"of the GPU are free; {remedy}"
        )
    return plan
