"""The decider's input for a revision: frozen records of one moment. Unknown values are None, which
is not zero."""

from __future__ import annotations

from dataclasses import dataclass

from activator.balancing.wait_queue import EngineLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionObservation:
    """Measurements of a revision.

    Attributes:
        stable, panic: concurrent calls (executing and waiting), averaged over the two windows; None
            = no data.
        ready, starting: instances that accept calls, and starting ones; draining ones are neither.
        in_flight, waiting: executing calls, and calls without a slot.
        idle_s: idle time of each ready instance without a call.
        oldest_wait_s: age of the oldest waiting call.
        start_s: expected duration of the next start; None = unknown.
        call_s, arrivals_per_s: mean execution time and rate of calls; None = unknown.
        engine: report of a language model's engines; None = not one, or no recent report.
        kept: how many instances are worth keeping by the function's pauses (`idle_histogram`); None
            = a fixed window decides.
        is_crowded: starts of any function wait for room that idle instances occupy.
        occupancy: how full the batches of a function that gathers calls are: size ÷ the maximum
            size, 0 to 1; None = there were none."""

    stable: float | None
    panic: float | None
    ready: int
    starting: int = 0
    in_flight: int = 0
    waiting: int = 0
    idle_s: tuple[float, ...] = ()
    oldest_wait_s: float = 0.0
    start_s: float | None = None
    call_s: float | None = None
    arrivals_per_s: float | None = None
    engine: EngineLoad | None = None
    occupancy: float | None = None
    kept: int | None = None
    is_crowded: bool = False

    @property
    def capacity(self) -> int:
        """Ready and starting instances."""
        return self.ready + self.starting

    @property
    def busy(self) -> int:
        """Number of ready instances with calls."""
        return max(0, self.ready - len(self.idle_s))

    def free_slots(self, max_inputs: int) -> int:
        """Free slots of ready instances."""
        return max(0, self.ready * max_inputs - self.in_flight)
