"""How much memory an executor of a TensorRT engine takes, decided before any is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from ..compile.bundle import Limits
from ..errors import ConfigError
from ..plugins_trt.sampling_memory import SamplerSizes, num_logits_rows, sampler_sizes
from .executor import ExecutorLimits
from .trt_facts import EngineFacts
from .trt_shapes import StepSize

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device.

        device = KV pages + activations + inputs + logits + sampling (parameters + results + scratch + counts)
        pinned = inputs + sampling (parameters + results)

    `num_blocks` is the number of pages of each page tensor, `num_logits_rows` how many rows one run can return.
    """

    num_blocks: int
    num_logits_rows: int
    kv_bytes: int
    activation_bytes: int
    input_bytes: int
    logits_bytes: int
    sampling: SamplerSizes

    @property
    def device_bytes(self) -> int:
        model_bytes = self.kv_bytes + self.activation_bytes + self.input_bytes + self.logits_bytes
        return model_bytes + self.sampling.device_bytes

    @property
    def pinned_bytes(self) -> int:
        """Of host memory."""
        return self.input_bytes + self.sampling.pinned_bytes


def engine_limits(
    facts: EngineFacts, built: Limits, num_blocks: int, num_logits_rows: int | None = None
) -> ExecutorLimits:
    """What the scheduler may plan: the bundle's limits, and never more than the profiles hold.

    `num_logits_rows`: how many rows of logits one run can return, once that is known.
    """
    widest = facts.widest
    max_batch_size, max_pages = widest.largest("block_table")
    return ExecutorLimits(
        max_model_len=min(built.max_model_len, max_pages * facts.block_size),
        max_batch_size=min(
            built.max_batch_size,
            max_batch_size,
            widest.largest("seq_lens")[0],
            widest.largest("query_start_loc")[0] - 1,
            widest.largest("logits_rows")[0],
        ),
        max_step_tokens=min(
            built.max_step_tokens, widest.largest("input_ids")[1], widest.largest("positions")[1]
        ),
        block_size=facts.block_size,
        num_blocks=num_blocks,
        vocab_size=facts.vocab_size,
        max_logits_rows=num_logits_rows,
    )


def plan_memory(
    facts: EngineFacts, built: Limits, *, kv_cache_bytes: int | None, activation_bytes: int, free_bytes: int
) -> MemoryPlan:
    """Pages for `kv_cache_bytes` (None: what the bundle was built for), and everything else that a step needs.

    `activation_bytes` is what the engine's contexts share, `free_bytes` what the device has free with the weights
    loaded. Raises `ConfigError` naming the setting when it does not fit.
    """
    available = built.kv_cache_bytes if kv_cache_bytes is None else kv_cache_bytes
    num_blocks = available // facts.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory: {available} bytes hold no block of {facts.block_bytes} bytes; raise it"
        )
    _check_num_blocks(facts, num_blocks)
    limits = engine_limits(facts, built, num_blocks)
    num_rows = num_logits_rows(
        facts.vocab_size,
        max_batch_size=limits.max_batch_size,
        max_rows=facts.widest.largest("logits_rows")[0],
    )
    tables = [profile.largest("block_table") for profile in facts.profiles]
    largest = StepSize(
        num_tokens=facts.widest.largest("input_ids")[1],
        num_sequences=max(num_sequences for num_sequences, _ in tables),
        num_pages=max(num_pages for _, num_pages in tables),
        num_rows=num_rows,
    )
    plan = MemoryPlan(
        num_blocks=num_blocks,
        num_logits_rows=num_rows,
        kv_bytes=num_blocks * facts.block_bytes,
        activation_bytes=activation_bytes,
        input_bytes=largest.num_bytes,
        logits_bytes=num_rows * facts.vocab_size * _FLOAT32,
        sampling=sampler_sizes(facts.vocab_size, limits.max_batch_size, num_rows),
    )
    if plan.device_bytes > free_bytes:
        others = plan.device_bytes - plan.kv_bytes
        raise ConfigError(
            f"kv_cache_memory: {plan.kv_bytes >> 20} MiB of KV pages and {others >> 20} MiB for activations, inputs, "
            f"logits and sampling are needed, but only {free_bytes >> 20} MiB of the GPU are free; "
            + (
                f"lower it to at most {(free_bytes - others) >> 20} MiB"
                if free_bytes - others >= max(facts.block_bytes, 1 << 20)
                else "build again with smaller limits, or free the GPU"
            )
        )
    return plan


def _check_num_blocks(facts: EngineFacts, num_blocks: int) -> None:
    for profile in facts.profiles:
        shapes = {name: facts.cache_shape(name, num_blocks) for name in facts.cache_names}
        if fault := profile.fault(shapes):
            name = fault.partition(":")[0]
            low, high = profile.shapes[name][0][0], profile.shapes[name][2][0]
            remedy = "lower it" if num_blocks > high else "raise it" if num_blocks < low else "build again"
            raise ConfigError(
                f"kv_cache_memory: {num_blocks} blocks, but {low} to {high} can be used; {remedy} ({fault})"
            )
