"""Percentiles from histograms whose buckets grow by 10 %: accurate to 5 %, at a cost independent of
the number of calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from pilotlight.controller.analytics.time_range import HOUR_S
from pilotlight.controller.database import tables

HOURS = 24
GROWTH = 1.1
CLOCKS = ("total", "queue", "start", "exec")


@dataclass(slots=True)
class Histogram:
    """Calls by bucket: bucket b holds latencies above 1.1**(b-1) and up to 1.1**b ms. Owner: the
    caller that fills it, in one thread."""

    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, bucket: int, calls: int) -> None:
        """Add `calls` calls."""
        self.buckets[bucket] = self.buckets.get(bucket, 0) + calls

    @property
    def calls(self) -> int:
        """The total number of calls."""
        return sum(self.buckets.values())

    def percentile(self, percent: float) -> float | None:
        """Return milliseconds by the nearest-rank definition: the middle of the bucket that covers
        the share. None without calls."""
        count = self.calls
        if not count:
            return None
        rank = max(1, -(-count * percent // 100))
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return bucket_midpoint_ms(bucket)
        raise AssertionError("the last bucket covers every share")


def bucket_midpoint_ms(bucket: int) -> float:
    """Return the geometric middle of a bucket in ms; the first bucket holds everything up to 1
    ms."""
    return 1.0 if bucket <= 0 else float(GROWTH ** (bucket - 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyHistogram:
    """The histogram of one clock (`total`, `queue`, `start`, `exec`) of one function's calls with
    one start kind."""

    function_id: str
    start_kind: str
    clock: str
    histogram: Histogram


def read(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    now: float,
    function_id: str | None = None,
    clocks: Sequence[str] = CLOCKS,
) -> list[LatencyHistogram]:
    """Read the histograms of the last `HOURS` hours, including the current one, of these clocks."""
    table = tables.latency_hours
    last = int(now // HOUR_S)
    within: sa.ColumnElement[bool] = table.c.hour.between(last - HOURS + 1, last)
    # With each hour listed, the query seeks in the primary key instead of scanning every function's
    # rows.
    if function_id is not None:
        within = table.c.hour.in_(range(last - HOURS + 1, last + 1)) & (
            table.c.function_id == function_id
        )
    groups = (table.c.function_id, table.c.start_kind, table.c.clock, table.c.bucket)
    query = sa.select(*groups, sa.func.sum(table.c.calls)).where(
        table.c.tenant == tenant,
        within,
        table.c.environment == environment,
        table.c.clock.in_(clocks),
    )
    parts: dict[tuple[str, str, str], Histogram] = {}
    for function, start_kind, clock, bucket, calls in sql.execute(query.group_by(*groups)):
        parts.setdefault((function, start_kind, clock), Histogram()).add(bucket, int(calls))
    return [
        LatencyHistogram(function_id=f, start_kind=s, clock=c, histogram=h)
        for (f, s, c), h in parts.items()
    ]


def merge_histograms(parts: Iterable[LatencyHistogram]) -> Histogram:
    """Merge several histograms into one."""
    out = Histogram()
    for part in parts:
        for bucket, calls in part.histogram.buckets.items():
            out.add(bucket, calls)
    return out


def by_function(parts: Iterable[LatencyHistogram]) -> dict[str, Histogram]:
    """Merge the histograms of each function, by its id."""
    grouped: dict[str, list[LatencyHistogram]] = {}
    for part in parts:
        grouped.setdefault(part.function_id, []).append(part)
    return {
        identity: merge_histograms(grouped_parts) for identity, grouped_parts in grouped.items()
    }


def by_hour(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    now: float,
    function_id: str | None = None,
) -> dict[int, Histogram]:
    """Return the histogram of each hour's calls (clock `total`), by hours since the epoch. Hours
    without calls are omitted."""
    table = tables.latency_hours
    last = int(now // HOUR_S)
    where = [
        table.c.tenant == tenant,
        table.c.hour.in_(range(last - HOURS + 1, last + 1)),
        table.c.environment == environment,
    ]
    if function_id is not None:
        where.append(table.c.function_id == function_id)
    groups = (table.c.hour, table.c.bucket)
    found: dict[int, Histogram] = {}
    for hour, bucket, calls in sql.execute(
        sa.select(*groups, sa.func.sum(table.c.calls))
        .where(*where, table.c.clock == "total")
        .group_by(*groups)
    ):
        found.setdefault(hour, Histogram()).add(bucket, int(calls))
    return found
