"""Calls that wait and calls that run, of throttlers: what those ask who are neither a call nor the
autoscaler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from activator.balancing.throttler import Throttler
from pilotlight import errors


def desired_pods_hint(throttler: Throttler | None) -> int:
    """Calls that wait for an instance; at least one where fewer are there than are kept warm, or
    none is: then a start is wanted for what is to come (a new revision takes over, a warm-up).
    Beyond that nobody is asked for instances before calls need them: who decides on their number
    sees the calls that run by itself. None: nobody has called."""
    if throttler is None or throttler.is_retired:
        return 0
    return max(throttler.waiting, int(len(throttler.instances) < max(1, throttler.min_instances)))


def calls_per_instance(throttlers: Iterable[Throttler]) -> Mapping[str, int]:
    """Calls in each instance, by its id."""
    return {
        instance.id: instance.in_flight
        for throttler in throttlers
        for instance in throttler.instances.values()
    }


def refuse_waiting(throttlers: Iterable[Throttler], error: errors.PilotlightError) -> None:
    """Answer all calls that wait: no instance will come for them."""
    for throttler in throttlers:
        throttler.refuse_waiting(error)
