"""How many starts a waiting burst deserves right now: no tick lies between a cold request and its
instance.

A waiting call is *covered* when a free slot is there for it, when an instance that is already
starting will take it, or when the running instances will have worked it off before a new start
could be ready. Only the rest is worth starting for."""

from __future__ import annotations

import math

SHORTEST_CALL_S = 1e-9
"""No call is shorter than the clock's own unit; a mean that says so is rounding."""


def instances_now(
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
    """Starts to begin at once for `waiting` calls, at least 0.

    Args:
        waiting: calls without a slot.
        free_slots: slots free on running instances.
        starting_slots: slots of the instances that are starting.
        max_inputs: slots of one instance.
        instances, max_instances: running and starting ones, and the ceiling.
        running_slots: slots of all running instances, busy ones too.
        start_s: expected time of the rung that a start would take; None = unknown.
        call_s: mean execution time of a call; None = unknown.
    """
    uncovered = (
        waiting
        - free_slots
        - starting_slots
        - drained_meanwhile(slots=running_slots, start_s=start_s, call_s=call_s)
    )
    if uncovered <= 0:
        return 0
    return max(0, min(math.ceil(uncovered / max_inputs), max_instances - instances))


def drained_meanwhile(*, slots: int, start_s: float | None, call_s: float | None) -> int:
    """Calls that `slots` slots finish while one start is on its way; 0 when either time is
    unknown."""
    if start_s is None or not call_s:
        return 0
    return math.floor(slots * start_s / max(call_s, SHORTEST_CALL_S))
