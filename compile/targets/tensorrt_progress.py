"""TensorRT's progress monitor -> one line that a person can follow.

Phases nest, and the inner ones come and go by the hundred. The line shows where the outermost one stands and the
innermost one that has steps to count:

    Building engine (3 of 6): Timing graph nodes (12 of 50)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Phase:
    name: str
    depth: int
    num_steps: int
    num_done: int = 0

    def __str__(self) -> str:
        # The step that is running; TensorRT counts one more than it announced now and then.
        return f"{self.name} ({min(self.num_done + 1, self.num_steps)} of {self.num_steps})"


class Phases:
    """The phases that are running, by TensorRT's events."""

    def __init__(self) -> None:
        self._running: dict[str, _Phase] = {}

    def start(self, name: str, parent: str | None, num_steps: int) -> None:
        above = self._running.get(parent) if parent is not None else None
        self._running[name] = _Phase(name, above.depth + 1 if above else 0, num_steps)

    def complete(self, name: str, step: int) -> None:
        """`step` counts from 0 and is done."""
        if (phase := self._running.get(name)) is not None:
            phase.num_done = step + 1

    def finish(self, name: str) -> None:
        self._running.pop(name, None)

    def __str__(self) -> str:
        phases = sorted(self._running.values(), key=lambda phase: phase.depth)
        counted = [phase for phase in phases if phase.num_steps > 1]
        shown = [*counted[:1], *counted[1:][-1:]] or phases[:1]
        return ": ".join(map(str, shown))


def make_monitor(
    trt: Any, on_progress: Callable[[str], None], is_interrupted: Callable[[], bool], *, can_cancel: bool
) -> Any:
    """A monitor that calls `on_progress` with the line whenever it changes.

    A builder that can be cancelled stops at its next step once `is_interrupted`; another goes on to its end, and the
    line says so. What `on_progress` raises must not pass through the builder's C++ frames: it is kept in `interrupt`,
    for the caller to raise.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Method names and arguments are TensorRT's."""

        def __init__(self) -> None:
            super().__init__()
            self.interrupt: BaseException | None = None
            self.phases = Phases()
            self.line = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._update(lambda: self.phases.start(phase_name, parent_phase, num_steps))

        def phase_finish(self, phase_name: str) -> None:
            self._update(lambda: self.phases.finish(phase_name))

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._update(lambda: self.phases.complete(phase_name, step))
            return not can_cancel or (self.interrupt is None and not is_interrupted())

        def _update(self, event: Callable[[], None]) -> None:
            try:
                event()
                line = self._describe()
                if line and line != self.line:
                    self.line = line
                    on_progress(line)
            except BaseException as error:
                self.interrupt = error

        def _describe(self) -> str:
            if is_interrupted():
                return "interrupted: stopping" + ("" if can_cancel else " when the builder is done")
            return str(self.phases)

    return Monitor()
