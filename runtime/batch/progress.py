"""How far a batch job is, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

# A run's rate of lines says nothing earlier: what it refuses is done at once, what it answers takes a while.
_MIN_RATE_S = 2.0


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Lines are counted over all runs of the job; tokens and `elapsed_s` over this run.

    `num_requests` is the number of lines that get a record (all but blank ones), `num_done` those that have
    it, `num_done_before` those that earlier runs wrote, `num_errors` the error records among those done.
    """

    num_requests: int
    num_done: int
    num_done_before: int
    num_errors: int
    num_in_flight: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def lines_per_s(self) -> float:
        return (self.num_done - self.num_done_before) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at this run's rate of lines; None while that cannot be known.

        It can once the run has done as many lines as it has in flight: before, most of its time went into lines that
        are not counted yet.
        """
        num_done_now = self.num_done - self.num_done_before
        if self.elapsed_s < _MIN_RATE_S or num_done_now < max(1, self.num_in_flight):
            return None
        return (self.num_requests - self.num_done) / self.lines_per_s


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The end of a run. `num_dropped_bytes` of torn or damaged records were removed when it began."""

    progress: JobProgress
    num_blank_lines: int
    num_dropped_bytes: int

    @property
    def is_complete(self) -> bool:
        return self.progress.num_done == self.progress.num_requests
