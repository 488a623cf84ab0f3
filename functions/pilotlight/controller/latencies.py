"""Percentiles of how long calls took, from histograms by the hour."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.aggregation import BOUNDS_MS, HOUR_S, SILENT_CLOCKS


@dataclass(slots=True)
class Histogram:
    """Times of calls in buckets that grow by a tenth."""

    buckets: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def calls(self) -> int:
        """How many it counts."""
        return sum(self.buckets.values())

    def percentile(self, percent: float) -> float | None:
        """Milliseconds that cover so many percent of the calls (nearest rank), at most a tenth too high; None without calls."""
        wanted, covered = max(1, math.ceil(self.calls * percent / 100)), 0
        for bucket, calls in sorted(self.buckets.items()):
            covered += calls
            if covered >= wanted:
                return BOUNDS_MS[bucket]
        return None


def latencies(
    sql: sa.Connection,
    *,
    tenant: str,
    clock: str,
    since: float,
    until: float,
    environment: str | None = None,
    function_id: str | None = None,
    groups: Sequence[str] = (),
) -> dict[tuple[Any, ...], Histogram]:
    """Histograms of a clock (CLOCKS) over whole hours, by `groups` (`start_kind`, `function_id`, `environment`, `hour`)."""
    c = tables.latency_hours.c
    asked = (clock, "total") if clock in SILENT_CLOCKS else (clock,)
    within = [c.tenant == tenant, c.hour >= int(since // HOUR_S), c.hour < -int(-until // HOUR_S), c.clock.in_(asked)]
    within += [c[name] == value for name, value in {"environment": environment, "function_id": function_id}.items() if value is not None]
    keys = [c[name] for name in groups]
    query = sa.select(*keys, c.clock, c.bucket, sa.func.sum(c.calls)).where(*within).group_by(*keys, c.clock, c.bucket)
    out: dict[tuple[Any, ...], Histogram] = defaultdict(Histogram)
    for *key, found, bucket, calls in sql.execute(query):
        buckets = out[tuple(key)].buckets
        if found == clock:
            buckets[bucket] += int(calls)
        if clock in SILENT_CLOCKS:  # bucket 0 is what is missing to all calls
            buckets[0] += int(calls) if found == "total" else -int(calls)
    return dict(out)
