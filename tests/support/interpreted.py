"""Run functions in a child process whose Triton interprets kernels on CPU tensors.

Whether a kernel is interpreted is settled when Triton is first imported, and much of torch imports it, so a process
that also compiles kernels (or merely exports a model) cannot be told to interpret. A child of its own can.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Yields `call(function, *arguments)`, which returns the function's result, or raises what it raises.

    The function must be importable from a module of `support` or `pelton`; arguments and result are pickled.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_interpret) as pool:

        def call(function: Callable[..., T], *arguments: Any) -> T:
            return pool.submit(function, *arguments).result()

        yield call


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    _correct_bfloat16()
    _leave_out_overflow_checks()
    _patch_the_language_once()


def _correct_bfloat16() -> None:
    """Triton 3.7's interpreter keeps bfloat16 as uint16: `tl.dot` multiplies the bit patterns, casts truncate.

    Here the product is taken of the numbers, and float32 is rounded to the nearest, as GPUs do both.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    own_dot, own_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return own_dot(self, widened(a), widened(b), *others)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return own_cast(self, source, dtype)
        bits = source.data.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded = np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded)
        return TensorHandle(rounded, tl.bfloat16)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def _leave_out_overflow_checks() -> None:
    """They double the interpreter's integer operations."""
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def _patch_the_language_once() -> None:
    """Each call of a function replaces all of `triton.language`'s, a quarter of the time; here they stay replaced."""
    from triton.runtime import interpreter

    own_patch, done = interpreter._patch_lang, set()

    def patch_lang(function: Callable[..., Any]) -> SimpleNamespace:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            own_patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang


@dataclass(frozen=True)
class Region:
    """Memory in units of `unit` bytes from `address`; those that `is_forbidden` [units] marks must not be read."""

    address: int
    unit: int
    is_forbidden: Any  # numpy array of bool

    def count(self, addresses: Any) -> int:
        index = (addresses - self.address) // self.unit
        index = index[(index >= 0) & (index < len(self.is_forbidden))]
        return int(self.is_forbidden[index].sum())


@contextmanager
def counted_reads(regions: Sequence[Region]) -> Iterator[Counter[str]]:
    """In a process that interprets: counts, as "forbidden", the elements of `regions` that kernels load."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    reads: Counter[str] = Counter()
    own_load = InterpreterBuilder.create_masked_load

    def create_masked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        addresses = np.atleast_1d(pointers.data)[np.atleast_1d(mask.data).astype(bool)].astype(np.int64)
        reads["forbidden"] += sum(region.count(addresses) for region in regions)
        return own_load(self, pointers, mask, *others)

    InterpreterBuilder.create_masked_load = create_masked_load
    try:
        yield reads
    finally:
        InterpreterBuilder.create_masked_load = own_load
