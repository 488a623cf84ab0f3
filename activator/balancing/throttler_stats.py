"""Counts of waiting and running calls of throttlers, for callers other than the autoscaler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from activator.balancing.throttler import Throttler
from pilotlight import errors


def desired_pods_hint(throttler: Throttler | None) -> int:
    """Return the number of calls that wait for an instance; at least one where there are fewer
    instances than must be kept warm, or none: then a start is needed for later calls (a new
    revision takes over, a warm-up).

    Running calls do not count: the external autoscaler observes them itself. `throttler`: None =
    the function was not called."""
    if throttler is None or throttler.is_retired:
        return 0
    return max(throttler.waiting, int(len(throttler.instances) < max(1, throttler.min_instances)))


def calls_per_instance(throttlers: Iterable[Throttler]) -> Mapping[str, int]:
    """Return the calls in each instance, by its id."""
    return {
        instance.id: instance.in_flight
        for throttler in throttlers
        for instance in throttler.instances.values()
    }


def refuse_waiting(throttlers: Iterable[Throttler], error: errors.PilotlightError) -> None:
    """Fail all waiting calls with `error`: they will get no instance."""
    for throttler in throttlers:
        throttler.refuse_waiting(error)
