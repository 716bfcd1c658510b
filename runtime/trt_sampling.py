"""Sampling on an executor's stream: parameters go up, tokens come down, and only that is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plugins_trt.sampling_memory import SamplerSizes
from .device import Device, DeviceBuffer, PinnedBuffer, Stream

if TYPE_CHECKING:  # nothing here needs torch by itself
    import torch

_INT64 = 8


@dataclass(frozen=True, slots=True)
class SamplingBuffers:
    """`staging` and `parameters` mirror each other, so do `tokens` and `results`; the pinned ones are the host's."""

    parameters: DeviceBuffer
    results: DeviceBuffer
    staging: PinnedBuffer
    tokens: PinnedBuffer

    @classmethod
    def allocate(cls, device: Device, sizes: SamplerSizes) -> SamplingBuffers:
        return cls(
            parameters=device.allocate(sizes.parameter_bytes),
            results=device.allocate(sizes.result_bytes),
            staging=device.allocate_pinned(sizes.parameter_bytes),
            tokens=device.allocate_pinned(sizes.result_bytes),
        )


class StreamTransfer:
    """`Transfer` of `sampler_device.py` on `stream`, where the engine writes `logits`.

    `enter` is called before anything is enqueued and may raise, `wait` returns when everything is done.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        buffers: SamplingBuffers,
        logits: DeviceBuffer,
        *,
        enter: Callable[[], None],
        wait: Callable[[], None],
    ) -> None:
        self._device, self._stream = device, stream
        self._buffers, self._logits = buffers, logits
        self._enter, self._wait = enter, wait
        self._place: torch.device = device.tensor(buffers.results, "int64", (1,)).device

    @property
    def device(self) -> torch.device:
        return self._place

    def run(self, parameters: np.ndarray, num_results: int, work: Callable[[Any, Any], None]) -> np.ndarray:
        """Raises `ValueError` when the buffers do not hold it, `EngineError` when the device fails."""
        num_bytes, result_bytes = len(parameters), num_results * _INT64
        buffers, device, stream = self._buffers, self._device, self._stream
        if num_bytes > buffers.parameters.num_bytes or result_bytes > buffers.results.num_bytes:
            raise ValueError(f"{num_bytes} bytes of parameters and {result_bytes} of results do not fit")
        self._enter()
        try:
            if num_bytes:
                device.view(buffers.staging)[:num_bytes] = parameters
                device.copy_to_device(buffers.staging, buffers.parameters, num_bytes, stream)
            results = device.tensor(buffers.results, "int64", (num_results,))
            device.run(
                lambda uploaded, *_: work(uploaded[:num_bytes], results),
                (buffers.parameters, buffers.results, self._logits),
                stream,
            )
            device.copy_to_host(buffers.results, buffers.tokens, result_bytes, stream)
        except BaseException:
            self._wait()  # the copy may still read the staging memory, which the next call writes
            raise
        self._wait()
        return device.view(buffers.tokens)[:result_bytes].view(np.int64).copy()
