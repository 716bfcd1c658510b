"""A step's arrays -> the shapes that the engine runs: choice of profile, padding, one staging buffer for all inputs.

Steps in which every sequence has one token (decodes) are padded to few sizes, so that each can be captured as a CUDA
graph. Padding belongs to no sequence:

    sequence            0   1   2   (3) <- padded to 4
    input_ids         [ a | b | c |  0 ]      padding rows are past query_start_loc[-1]: attention writes nothing for
    query_start_loc   0   1   2   3   3       them, and nobody asks for their logits
    seq_lens          [ x | y | z |  0 ]
    block_table       zeros beyond a sequence's pages, and in padding rows: never read
    logits_rows       [ 0 | 1 | 2 |  0 ]      a row too many is row 0 again; its logits are dropped
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import EngineError
from .executor import ExecutorLimits
from .inputs import StepInputs
from .trt_facts import DECODE_PROFILE, STEP_INPUTS, EngineFacts, Shape

_ALIGNMENT = 256  # of a tensor's address; what cudaMalloc gives, and vectorised loads need less


@dataclass(frozen=True)
class StepSize:
    """The four numbers that all shapes of a step follow from."""

    num_tokens: int
    num_sequences: int
    num_pages: int
    num_rows: int

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return {
            "input_ids": (1, self.num_tokens),
            "positions": (1, self.num_tokens),
            "block_table": (self.num_sequences, self.num_pages),
            "seq_lens": (self.num_sequences,),
            "query_start_loc": (self.num_sequences + 1,),
            "logits_rows": (self.num_rows,),
        }

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Where each input begins in the staging buffer: one after the other, so that one copy carries them all."""
        offsets, end = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = end
            end = _align(end + _num_bytes(name, shape))
        return offsets

    @property
    def num_bytes(self) -> int:
        """Bytes of all inputs in the staging buffer."""
        return max(self.offsets[name] + _num_bytes(name, shape) for name, shape in self.shapes.items())


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step runs: `size` after padding, and the profile. Captured steps are replayed as CUDA graphs."""

    profile: int
    size: StepSize
    is_captured: bool


class Placer:
    """Chooses profile and padding of steps. Pure; `use_graphs` False runs decodes as they come, without padding."""

    def __init__(self, facts: EngineFacts, limits: ExecutorLimits, *, use_graphs: bool = True) -> None:
        self._profiles = facts.profiles
        self._capture_sizes = capture_sizes(limits.max_batch_size)
        names = [profile.name for profile in facts.profiles]
        self._mixed = [i for i, name in enumerate(names) if name != DECODE_PROFILE] or [0]
        self._max_pages = facts.widest.largest("block_table")[1]
        self.use_graphs = use_graphs

    def place(self, inputs: StepInputs, num_rows: int) -> Placement:
        """Where to run `inputs` for the logits of `num_rows` rows (0: one is computed and dropped).

        Raises `EngineError` naming the input when no profile holds the step.
        """
        num_sequences, num_pages = inputs.block_table.shape
        num_tokens = len(inputs.input_ids)
        width = round_up_pages(num_pages, self._max_pages)
        placement = self._place_decode(num_sequences, width, num_rows) if _is_decode(inputs) else None
        if placement is not None:
            return placement
        size = StepSize(num_tokens, num_sequences, width, max(num_rows, 1))
        faults = []
        for index in self._mixed:
            fault = self._profiles[index].fault(size.shapes)
            if fault is None:
                return Placement(index, size, is_captured=False)
            faults.append(fault)
        raise EngineError(f"{faults[0]}; send smaller steps or build again with larger limits")

    def _place_decode(self, num_sequences: int, width: int, num_rows: int) -> Placement | None:
        """None where no decode profile holds the step."""
        padded = num_sequences
        if self.use_graphs:
            padded = next((n for n in self._capture_sizes if n >= num_sequences), num_sequences)
        rows = padded if self.use_graphs else max(num_rows, 1)
        size = StepSize(padded, padded, width, rows)
        for index, profile in enumerate(self._profiles):
            if profile.name == DECODE_PROFILE and num_rows <= rows and profile.fault(size.shapes) is None:
                return Placement(index, size, is_captured=self.use_graphs)
        return None


def _is_decode(inputs: StepInputs) -> bool:
    """Whether each sequence has one token."""
    return len(inputs.seq_lens) > 0 and bool((np.diff(inputs.query_start_loc) == 1).all())


def capture_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes that are captured: powers of two, and the largest there is."""
    sizes = [1]
    while sizes[-1] * 2 < max_batch_size:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if max_batch_size == 1 else (*sizes, max_batch_size)


def round_up_pages(num_pages: int, max_pages: int) -> int:
    """Width of the block table: a power of two, at most `max_pages`; what is not in [1, max_pages] stays as it is."""
    return min(1 << (num_pages - 1).bit_length(), max_pages) if 1 <= num_pages <= max_pages else num_pages


def fill(staging: np.ndarray, size: StepSize, inputs: StepInputs, rows: np.ndarray) -> None:
    """Write `inputs`, padded to `size`, into the bytes of `staging`; `rows` are the logits rows of this pass."""
    num_sequences, num_pages = inputs.block_table.shape
    num_tokens = len(inputs.input_ids)
    views = {name: _view(staging, size, name) for name in size.shapes}
    for name, values in (("input_ids", inputs.input_ids), ("positions", inputs.positions)):
        views[name][0, :num_tokens] = values
        views[name][0, num_tokens:] = 0
    table = views["block_table"]
    table[:num_sequences, :num_pages] = inputs.block_table
    table[:num_sequences, num_pages:] = 0
    table[num_sequences:] = 0
    views["seq_lens"][:num_sequences] = inputs.seq_lens
    views["seq_lens"][num_sequences:] = 0
    views["query_start_loc"][: num_sequences + 1] = inputs.query_start_loc
    views["query_start_loc"][num_sequences + 1 :] = num_tokens
    views["logits_rows"][: len(rows)] = rows
    views["logits_rows"][len(rows) :] = 0


def check_consistent(inputs: StepInputs, block_size: int) -> None:
    """Raise `EngineError` naming an input whose rank or length does not go with the others'.

    Kernels trust these: a table too narrow for its sequence would be read past its end.
    """
    num_tokens, num_sequences = len(inputs.input_ids), len(inputs.seq_lens)
    expected: dict[str, Shape] = {
        "input_ids": (num_tokens,),
        "positions": (num_tokens,),
        "seq_lens": (num_sequences,),
        "query_start_loc": (num_sequences + 1,),
        "logits_rows": (len(inputs.logits_rows),),
    }
    for name, shape in expected.items():
        if getattr(inputs, name).shape != shape:
            raise EngineError(f"{name}: shape {getattr(inputs, name).shape}, expected {shape}")
    if inputs.block_table.ndim != 2 or len(inputs.block_table) != num_sequences:
        raise EngineError(f"block_table: shape {inputs.block_table.shape}, expected ({num_sequences}, pages)")
    if int(inputs.query_start_loc[-1]) != num_tokens:
        raise EngineError(
            f"query_start_loc: ends at {inputs.query_start_loc[-1]}, input_ids has {num_tokens}"
        )
    held = inputs.block_table.shape[1] * block_size
    if num_sequences and int(inputs.seq_lens.max()) > held:
        raise EngineError(f"block_table: its pages hold {held} tokens, seq_lens has {inputs.seq_lens.max()}")


def _view(staging: np.ndarray, size: StepSize, name: str) -> np.ndarray:
    shape, start = size.shapes[name], size.offsets[name]
    content = staging[start : start + _num_bytes(name, shape)]
    return content.view(STEP_INPUTS[name]).reshape(shape)


def _num_bytes(name: str, shape: Shape) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * (8 if STEP_INPUTS[name] == "int64" else 4)


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
