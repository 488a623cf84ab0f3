"""How many starts a burst of waiting calls needs now, so that a cold request does not wait for the
next tick.

A waiting call is *covered* when there is a free slot for it, when a starting instance will serve
it, or when the running instances will have served it before a new start could be ready. Only
uncovered calls need starts."""

from __future__ import annotations

import math

SHORTEST_CALL_S = 1e-9
"""No call is shorter than the clock's resolution; a shorter mean is rounding."""


def starts_for_burst(
    *,
    waiting: int,
    free_slots: int,
    starting_slots: int,
    max_inputs: int,
    instances: int,
    max_instances: int,
    running_slots: int = 0,
    start_s: float | None = None,
    call_s: float | None = None,
) -> int:
    """Number of starts to begin at once for `waiting` calls, at least 0.

    Args:
        waiting: calls without a slot.
        free_slots: free slots of running instances.
        starting_slots: slots of the starting instances.
        max_inputs: slots of one instance.
        instances, max_instances: running and starting instances, and the ceiling.
        running_slots: slots of all running instances, including busy ones.
        start_s: expected duration of the next start; None = unknown.
        call_s: mean execution time of a call; None = unknown."""
    uncovered = (
        waiting
        - free_slots
        - starting_slots
        - drained_before_start(slots=running_slots, start_s=start_s, call_s=call_s)
    )
    if uncovered <= 0:
        return 0
    return max(0, min(math.ceil(uncovered / max_inputs), max_instances - instances))


def drained_before_start(*, slots: int, start_s: float | None, call_s: float | None) -> int:
    """Number of calls that `slots` slots finish during one start; 0 when either time is unknown."""
    if start_s is None or not call_s:
        return 0
    return math.floor(slots * start_s / max(call_s, SHORTEST_CALL_S))
