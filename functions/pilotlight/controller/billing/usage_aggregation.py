"""In-memory sums of usage records: what a batch adds to each rollup. Pure and fast: every record of
the ledger passes through here once.

Records are tuples in the order of `COLUMNS`. Each is assigned to its group by one lookup; the sums
are then computed column by column."""

from __future__ import annotations

import datetime as dt
import functools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import add, itemgetter, mul
from typing import Any, NamedTuple

from pilotlight.controller.database import tables
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import NOT_RUN

HOUR_S = 3600
HOURS_PER_DAY = 24
DAY_S = HOURS_PER_DAY * HOUR_S
COLUMNS = (*(f.name for f in fields(UsageRecord)), "received_at", "cost_picos", "day", "month")
AT = {name: at for at, name in enumerate(COLUMNS)}
"""Each column's index in a record's tuple."""
CALL = "CALL"
CLOCKS = ("total", "queue", "start", "exec")
"""The latencies in `latency_hours`: a call from its arrival to its last byte, and its three
parts."""
BOUNDS_MS = tuple(1.1**bucket for bucket in range(240))
"""Upper bounds of the histogram's buckets, inclusive; the last one, a hundred days, also counts
everything above it."""
MEASURES = (
    "queued_ms",
    "start_ms",
    "exec_ms",
    "billed_ns",
    "tokens_in",
    "tokens_out",
    "bytes_in",
    "bytes_out",
)
_EPOCH = dt.date(1970, 1, 1).toordinal()

_group_of = itemgetter(AT["tenant"], *(AT[name] for name in tables.ROLLUP_GROUPS))
_numbers = itemgetter(
    *(
        AT[name]
        for name in (
            *MEASURES,
            "cost_picos",
            "status",
            "cpu",
            "memory_bytes",
            "gpu_count",
            "outcome",
        )
    )
)
_customer_group_of = itemgetter(
    AT["tenant"], AT["customer"], *(AT[name] for name in tables.ROLLUP_GROUPS)
)
_customer = itemgetter(AT["customer"])
_STARTED_AT = AT["started_at"]
_BILLED = MEASURES.index("billed_ns")
_KIND, _START_KIND, _FUNCTION_ID = (
    2 + tables.ROLLUP_GROUPS.index(name) for name in ("kind", "start_kind", "function_id")
)
_CURRENCY = 2 + tables.ROLLUP_GROUPS.index("currency")
_GPU = 2 + tables.ROLLUP_GROUPS.index("gpu")

GroupKey = tuple[Any, ...]
"""(hour or day, tenant, *ROLLUP_GROUPS)."""


class SpendKey(NamedTuple):
    """The key under which costs are summed for budgets: `day` is whole days since the epoch,
    `month` is that of `started_at`, both in UTC. `customer`: of the records that name this one;
    "" = of all records."""

    tenant: str
    environment: str
    app: str
    function: str
    day: int
    month: str
    currency: str
    customer: str = ""


@dataclass(frozen=True, slots=True)
class BatchSums:
    """Sums over records: counts, `MEASURES`, cost in picounits, and values for display only
    (floats)."""

    records: int
    errors: int
    measures: tuple[int, ...]
    picos: int
    cpu_core_s: float
    memory_byte_s: float
    gpu_s: float

    def __add__(self, other: BatchSums) -> BatchSums:
        return BatchSums(
            self.records + other.records,
            self.errors + other.errors,
            tuple(map(add, self.measures, other.measures)),
            self.picos + other.picos,
            self.cpu_core_s + other.cpu_core_s,
            self.memory_byte_s + other.memory_byte_s,
            self.gpu_s + other.gpu_s,
        )


class LatencyKey(NamedTuple):
    """The key of a latency histogram."""

    tenant: str
    hour: int
    environment: str
    function_id: str
    start_kind: str


@dataclass(frozen=True, slots=True)
class UsageAggregate:
    """What some records add to the rollups. `latencies` counts calls by clock and bucket;
    `customer_hours`: of the records that name a customer, by (hour, tenant, customer,
    *ROLLUP_GROUPS)."""

    hours: dict[GroupKey, BatchSums]
    days: dict[GroupKey, BatchSums]
    latencies: dict[LatencyKey, dict[tuple[str, int], int]]
    customer_hours: dict[GroupKey, BatchSums]


def aggregate(rows: Sequence[Sequence[Any]]) -> UsageAggregate:
    """Sum records by hour and by day."""
    grouped: defaultdict[GroupKey, list[Sequence[Any]]] = defaultdict(list)
    for row in rows:
        grouped[(int(row[_STARTED_AT]) // HOUR_S, *_group_of(row))].append(_numbers(row))
    hours: dict[GroupKey, BatchSums] = {}
    spans: defaultdict[LatencyKey, list[Sequence[Any]]] = defaultdict(list)
    for group, numbers in grouped.items():
        key = (*group[:_GPU], group[_GPU] or "", *group[_GPU + 1 :])
        hours[key] = _sums(numbers)
        if key[_KIND] == CALL:
            spans[LatencyKey(key[1], key[0], key[2], key[_FUNCTION_ID], key[_START_KIND])] += (
                numbers
            )
    return UsageAggregate(
        hours,
        by_day(hours),
        {key: _histograms(numbers) for key, numbers in spans.items()},
        by_customer(rows) if any(map(_customer, rows)) else {},
    )


def by_customer(rows: Iterable[Sequence[Any]]) -> dict[GroupKey, BatchSums]:
    """Sum the records that name a customer by hour."""
    grouped: defaultdict[GroupKey, list[Sequence[Any]]] = defaultdict(list)
    for row in filter(_customer, rows):
        group = (part or "" for part in _customer_group_of(row))  # only a GPU may be None
        grouped[(int(row[_STARTED_AT]) // HOUR_S, *group)].append(_numbers(row))
    return {key: _sums(numbers) for key, numbers in grouped.items()}


def by_day(hours: dict[GroupKey, BatchSums]) -> dict[GroupKey, BatchSums]:
    """Sum the hours of each day."""
    days: dict[GroupKey, BatchSums] = {}
    for (hour, *rest), sums in hours.items():
        key = (hour // HOURS_PER_DAY, *rest)
        days[key] = days[key] + sums if key in days else sums
    return days


def spend_by_key(sums: UsageAggregate) -> dict[SpendKey, int]:
    """Return the cost in picounits by the keys that budgets use."""
    out: defaultdict[SpendKey, int] = defaultdict(int)
    for key, one in sums.days.items():
        out[_spend_key(key)] += one.picos
    for (hour, tenant, customer, *group), one in sums.customer_hours.items():
        out[_spend_key((hour // HOURS_PER_DAY, tenant, *group), customer)] += one.picos
    return dict(out)


def _spend_key(key: GroupKey, customer: str = "") -> SpendKey:
    day, tenant, environment, app, function, *_ = key
    month = month_of_day(day)
    return SpendKey(tenant, environment, app, function, day, month, key[_CURRENCY], customer)


@functools.lru_cache(maxsize=4096)
def month_of_day(day: int) -> str:
    """Return the month of a day since the epoch: 20000 → "2024-10". Raises ValueError or
    OverflowError beyond the calendar."""
    return dt.date.fromordinal(_EPOCH + day).isoformat()[:7]


def next_month(month: str) -> str:
    """Return the following month: "2026-12" → "2027-01"."""
    year, number = int(month[:4]), int(month[5:])
    return f"{year + number // 12:04}-{number % 12 + 1:02}"


@functools.lru_cache(maxsize=2**13)
def bucket_of(ms: int) -> int:
    """Return the histogram bucket of a latency."""
    return min(bisect_left(BOUNDS_MS, ms), len(BOUNDS_MS) - 1)


def _sums(numbers: Sequence[Sequence[Any]]) -> BatchSums:
    *measures, picos, status, cpu, memory_bytes, gpu_count, outcomes = zip(*numbers, strict=True)
    billed_ns = measures[_BILLED]
    return BatchSums(
        records=len(numbers),
        errors=sum(
            one >= 500 and how not in NOT_RUN for one, how in zip(status, outcomes, strict=True)
        ),
        measures=tuple(map(sum, measures)),
        picos=sum(picos),
        cpu_core_s=sum(map(mul, cpu, billed_ns)) / 1e9,
        memory_byte_s=sum(map(mul, memory_bytes, billed_ns)) / 1e9,
        gpu_s=sum(map(mul, gpu_count, billed_ns)) / 1e9,
    )


def _histograms(numbers: Sequence[Sequence[Any]]) -> dict[tuple[str, int], int]:
    queue, start, execution, *_ = zip(*numbers, strict=True)
    total = map(add, map(add, queue, start), execution)
    return {
        (clock, bucket): calls
        for clock, column in zip(CLOCKS, (total, queue, start, execution), strict=True)
        for bucket, calls in Counter(map(bucket_of, column)).items()
    }
