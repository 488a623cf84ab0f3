"""How many instances the scaling schedules of a function keep at a time: a pure function.

Source of the terms: "scaling schedules" of Google Compute Engine's managed instance groups (cron
expression, time zone, duration, minimum number of replicas)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.schedules import cron
from pilotlight.spec.policies import ScalingSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledFloor:
    """The largest `min_instances` of the windows that are open at `since`, 0 if none is, and until
    when that holds at least, in seconds since the epoch."""

    min_instances: int
    since: float
    until: float

    def is_valid(self, now: float) -> bool:
        """Whether it holds at `now`. A clock that was set back begins anew."""
        return self.since <= now < self.until


def floor_at(schedules: Sequence[ScalingSchedule], now: float) -> ScheduledFloor:
    """The floor at `now`, in seconds since the epoch.

    Costs one search of a cron expression for each schedule. A window is as long as its duration,
    whatever the clock of its time zone does meanwhile."""
    floor, until = 0, math.inf
    for one in schedules:
        begins = cron.next_after(one.begins, now - one.duration_s)
        if begins <= now:
            floor = max(floor, one.min_instances)
            until = min(until, begins + one.duration_s)
        else:
            until = min(until, begins)
    return ScheduledFloor(min_instances=floor, since=now, until=until)
