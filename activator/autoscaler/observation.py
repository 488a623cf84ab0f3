"""What the decider is told of a revision: frozen records of one moment. What is not known is None,
which is not zero."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engines of a language model say, those of its ready instances that could be asked.

    Attributes:
        slots: calls at once that one instance takes, by its KV memory: the average. queued_tokens:
        prompt tokens of the calls that wait, for a slot or inside an engine. tokens_per_s: prompt
        tokens that one instance works off, answers included: the best of late; None = unknown.
        first_tokens: answers that began lately, since the newest instance came. late: the share of
        them that began later than the objective; None = there is no objective.
    """

    slots: float
    queued_tokens: int = 0
    tokens_per_s: float | None = None
    first_tokens: int = 0
    late: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What is seen of a revision now.

    Attributes:
        stable, panic: calls at once (executing and waiting), averaged over the two windows; None =
        no data. ready, starting: instances that take calls, and that are on their way; draining
        ones are neither. in_flight, waiting: calls executing, and calls without a slot. idle_s: for
        each ready instance without a call, for how long. oldest_wait_s: age of the oldest waiting
        call. start_s: expected time of the rung that the next start will take; None = unknown.
        call_s, arrivals_per_s: mean execution time and rate of calls; None = unknown. engine: of a
        language model's server, what its engines say; None = it is none, or they said nothing
        lately. kept: how many instances the function's pauses say are worth keeping (`gaps`); None
        = a fixed window decides. is_crowded: starts wait for room, of whatever function: what idles
        here is waited for elsewhere. occupancy: of a function that gathers calls, how full its
        batches are: size ÷ the greatest size, 0 to 1; None = there were none.
    """

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
        """Ready instances with calls."""
        return max(0, self.ready - len(self.idle_s))

    def free_slots(self, max_inputs: int) -> int:
        """Slots of ready instances without a call."""
        return max(0, self.ready * max_inputs - self.in_flight)
