"""What every target is: the questions that a build asks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.export import ExportedProgram

from ..bundle import HostNeeds, Limits, ModelFacts
from ..export import KVGeometry
from ..memory import MemoryPlan
from ..progress import Progress
from ..proof import StepFunction, Trace


@dataclass(slots=True)
class Exported:
    """A model whose export is proved. `program` is the flat graph with the operators of the `pelton` domain.

    A target may drop `model` and `program` (`release`) once it has what it needs of them: a build should not hold the
    weights twice.
    """

    model: nn.Module
    program: ExportedProgram
    geometry: tuple[KVGeometry, ...]
    dtype: torch.dtype
    limits: Limits
    num_blocks: int
    vocab_size: int

    def release(self) -> None:
        del self.model, self.program


class Target(Protocol):
    """A way to lower an exported model. Its constructor has checked the user's options (`BuildError`)."""

    name: str
    dtypes: tuple[str, ...]
    # Times the engine's weights that a build holds at its peak: in the file that the compiler reads, in its network,
    # folded and laid out anew, in what it writes.
    compiler_copies: int
    experts: str  # how routed experts are exported: a name of `experts.py`

    def compiler(self) -> str:
        """Name and version of the compiler; `BuildError` saying how to get it when it is not there."""
        ...

    def needs(self) -> HostNeeds:
        """The machine that engines of this build will run on."""
        ...

    def options(self) -> Mapping[str, Any]:
        """What else decides the engine, as JSON: part of the content key."""
        ...

    def command_options(self) -> Mapping[str, object]:
        """The target's own options of the command that builds again, by name."""
        ...

    def warnings(self, dtype: str) -> list[str]:
        """What a user should know of engines in `dtype`; where they are for the building machine, on that one."""
        ...

    def plan_memory(
        self, config: Any, facts: ModelFacts, limits: Limits, dtype: torch.dtype, weights: int
    ) -> MemoryPlan:
        """`weights`: bytes of the model's parameters as they are built, quantised or not."""
        ...

    def explain(
        self, geometry: tuple[KVGeometry, ...], limits: Limits, num_blocks: int
    ) -> list[tuple[str, str]]:
        """Rows (name, text) for `--dry-run` on what the target derives from the limits."""
        ...

    def lower(self, exported: Exported, directory: Path, progress: Progress) -> Mapping[str, Any]:
        """Write the engine into `directory`; returns the manifest's `engine`."""
        ...

    def engine_step(self, directory: Path, trace: Trace) -> StepFunction | None:
        """The engine of `directory` as a function of a step; None where it is not run after a build."""
        ...
