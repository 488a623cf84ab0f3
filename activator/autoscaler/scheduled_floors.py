"""The floors that scaling schedules set, as their windows open and close."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator

from activator.routing.route_table import CallTarget, RouteTable
from pilotlight.schedules.scaling_schedules import ScheduledFloor, floor_at

log = logging.getLogger(__name__)

AT_ONCE = 100
"""Functions whose cron expressions are searched in one round (about 0.2 ms each): many have windows
that begin at the same full hour. The others follow in the next rounds."""
BROKEN_S = 3600.0
"""When a function whose schedules cannot be computed is tried again, such as for a time zone that
this machine lacks."""


class ScheduledFloors:
    """When the floors of functions with scaling schedules change. Owner: the AutoscalerLoop.

    Attributes:
        wall: seconds since the epoch."""

    def __init__(self, table: RouteTable, wall: Callable[[], float] = time.time) -> None:
        self._table = table
        self.wall = wall
        self._holds: dict[str, ScheduledFloor] = {}

    def __repr__(self) -> str:
        return f"<ScheduledFloors of {len(self._holds)} functions>"

    def forget(self, name: str) -> None:
        """The function was changed."""
        self._holds.pop(name, None)

    def changes(self) -> Iterator[tuple[CallTarget, int]]:
        """Yield the revisions of at most AT_ONCE functions whose floors may have changed, with
        their floors."""
        now, names = self.wall(), self._table.functions.with_scaling_schedules()
        for name in self._holds.keys() - names:
            del self._holds[name]
        due = (n for n in sorted(names) if n not in self._holds or not self._holds[n].is_valid(now))
        for name in itertools.islice(due, AT_ONCE):
            until, most = math.inf, 0
            for target in self._table.targets_of(name):
                try:
                    floor = floor_at(target.spec.scaling.schedules, now)
                except (ValueError, KeyError) as e:
                    log.warning("scaling schedule not computed target=%r error=%s", target, e)
                    until = min(until, now + BROKEN_S)
                    continue
                until, most = min(until, floor.until), max(most, floor.min_instances)
                yield target, floor.min_instances
            self._holds[name] = ScheduledFloor(min_instances=most, since=now, until=until)
