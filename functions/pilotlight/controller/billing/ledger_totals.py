"""Exact sums of the ledger for reports and pages, computed from the coarsest exact rows.

Whole days come from `usage_days`, whole hours from `usage_hours`, and only partial hours from the
records themselves: a month by function reads a few thousand rows, regardless of the number of
records. Sums by customer come from rollups of their own, which have only the records that name
one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing.usage_aggregation import HOUR_S, HOURS_PER_DAY, MEASURES
from pilotlight.controller.database import tables
from pilotlight.errors import InvalidInput
from pilotlight.spec.pricing import COST_QUANTUM, GIB, NOT_RUN

HALF = 10**9
MAX_CUSTOMERS = 10_000
"""Most customers of one report: callers may name any number of them."""
_OF_CUSTOMERS = {
    tables.usage_hours: tables.customer_hours,
    tables.usage_days: tables.customer_days,
}


def money_sums(table: sa.Table) -> tuple[sa.ColumnElement[Any], sa.ColumnElement[Any]]:
    """Return both halves of the sum in picounits, the part above HALF and the rest: SQLite's SUM
    overflows at 2**63."""
    if table is not tables.usage:
        return sa.func.sum(table.c.high), sa.func.sum(table.c.low)
    return sa.func.sum(table.c.cost_picos // HALF), sa.func.sum(table.c.cost_picos % HALF)


def picos_of(high: Any, low: Any) -> int:
    """Return the sum of picounits whose halves are `money_sums`; 0 of no rows."""
    return int(high or 0) * HALF + int(low or 0)


@dataclass(slots=True, kw_only=True)
class Total:
    """Sums of one group. `picos` is exact; the three floats are for display. `sums`: MEASURES."""

    group: dict[str, str | int]
    records: int
    errors: int
    sums: dict[str, int]
    cpu_core_s: float
    memory_gib_s: float
    gpu_s: float
    picos: int

    @property
    def cost(self) -> Decimal:
        """The exact cost in the group's currency (if there may be several, group by `currency`)."""
        return COST_QUANTUM * self.picos

    def absorb(self, other: Total) -> None:
        """Add another part of the same group."""
        self.records += other.records
        self.errors += other.errors
        self.sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        self.cpu_core_s += other.cpu_core_s
        self.memory_gib_s += other.memory_gib_s
        self.gpu_s += other.gpu_s
        self.picos += other.picos

    def negated(self) -> Total:
        """The total that makes this one zero."""
        return Total(
            group=self.group,
            records=-self.records,
            errors=-self.errors,
            sums={name: -value for name, value in self.sums.items()},
            cpu_core_s=-self.cpu_core_s,
            memory_gib_s=-self.memory_gib_s,
            gpu_s=-self.gpu_s,
            picos=-self.picos,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollupSlice:
    """A part of a report's time range, and the table that has it exactly: days [first, end), hours,
    or records of one hour by `started_at`."""

    table: sa.Table
    first: float | None
    end: float | None
    hour: int | None = None

    @property
    def of_customers(self) -> RollupSlice:
        """The same part of the records that name a customer."""
        return replace(self, table=_OF_CUSTOMERS.get(self.table, self.table))


def split_range(
    since: float | None, until: float | None, *, by_hour: bool = False
) -> list[RollupSlice]:
    """Split since <= time < until into the largest whole units. Pure."""
    if since is not None and until is not None and until <= since:
        return []
    first = None if since is None else -int(-since // HOUR_S)
    end = None if until is None else int(until // HOUR_S)
    if (
        since is not None
        and until is not None
        and first is not None
        and end is not None
        and first > end
    ):
        return [RollupSlice(table=tables.usage, first=since, end=until, hour=end)]
    out = []
    if since is not None and first is not None and since < first * HOUR_S:
        out.append(RollupSlice(table=tables.usage, first=since, end=first * HOUR_S, hour=first - 1))
    out += (
        [RollupSlice(table=tables.usage_hours, first=first, end=end)]
        if by_hour
        else _days_and_hours(first, end)
    )
    if until is not None and end is not None and end * HOUR_S < until:
        out.append(RollupSlice(table=tables.usage, first=end * HOUR_S, end=until, hour=end))
    return out


def _days_and_hours(first: int | None, end: int | None) -> list[RollupSlice]:
    first_day = None if first is None else -(-first // HOURS_PER_DAY)
    end_day = None if end is None else end // HOURS_PER_DAY
    if first_day is not None and end_day is not None and first_day > end_day:
        return [RollupSlice(table=tables.usage_hours, first=first, end=end)]
    out = [RollupSlice(table=tables.usage_days, first=first_day, end=end_day)]
    if first is not None and first_day is not None and first < first_day * HOURS_PER_DAY:
        out.insert(
            0, RollupSlice(table=tables.usage_hours, first=first, end=first_day * HOURS_PER_DAY)
        )
    if end is not None and end_day is not None and end_day * HOURS_PER_DAY < end:
        out.append(RollupSlice(table=tables.usage_hours, first=end_day * HOURS_PER_DAY, end=end))
    return [span for span in out if span.first is None or span.end is None or span.first < span.end]


def totals(
    sql: sa.Connection,
    *,
    tenant: str | None,
    groups: Sequence[str],
    since: float | None,
    until: float | None,
    environment: str | None = None,
    where: Mapping[str, str] | None = None,
) -> list[Total]:
    """Return sums by `groups` over since <= started_at < until, in the groups' order; `tenant`
    None: all tenants.

    `groups` are ROLLUP_GROUPS, `tenant`, `customer`, `day` or `hour` (whole units since the epoch);
    `where` filters by values of the same. Raises InvalidInput for too many customers."""
    chosen = (
        dict(where or {})
        | ({} if tenant is None else {"tenant": tenant})
        | ({} if environment is None else {"environment": environment})
    )
    spans = split_range(since, until, by_hour="hour" in groups)
    if "customer" in chosen:
        return _merged(_named(sql, spans, groups, chosen))
    if "customer" not in groups:
        return _merged(_every(sql, spans, groups, chosen))
    _require_few_customers(sql, spans, chosen)
    named = _merged(_named(sql, spans, groups, chosen))
    others = [name for name in groups if name != "customer"]
    rest = [
        replace(total, group={name: total.group.get(name, "") for name in groups})
        for total in _every(sql, spans, others, chosen)
    ]
    less = [replace(total.negated(), group={**total.group, "customer": ""}) for total in named]
    return _merged([*named, *(total for total in _merged([*rest, *less]) if total.records)])


def names_customer(table: sa.Table) -> sa.ColumnElement[bool]:
    """The condition of the index of records that name a customer, as a literal: a database does not
    see it in a parameter."""
    return table.c.customer != sa.literal_column("''")


def _merged(found: Iterable[Total]) -> list[Total]:
    """Return one total per group, in the groups' order."""
    out: dict[tuple[str | int, ...], Total] = {}
    for total in found:
        key = tuple(total.group.values())
        if key in out:
            out[key].absorb(total)
        else:
            out[key] = total
    return [out[key] for key in sorted(out)]


def _every(
    sql: sa.Connection,
    spans: Sequence[RollupSlice],
    groups: Sequence[str],
    chosen: Mapping[str, str],
) -> Iterator[Total]:
    for span in spans:
        yield from _span_totals(sql, span, groups, chosen)


def _named(
    sql: sa.Connection,
    spans: Sequence[RollupSlice],
    groups: Sequence[str],
    chosen: Mapping[str, str],
) -> Iterator[Total]:
    """Yield the sums of the records that name a customer."""
    for span in spans:
        part = span.of_customers
        yield from _span_totals(sql, part, groups, chosen, names_customer(part.table))


def _require_few_customers(
    sql: sa.Connection, spans: Sequence[RollupSlice], chosen: Mapping[str, str]
) -> None:
    found: set[str] = set()
    for span in (one.of_customers for one in spans):
        within = [span.table.c[name] == value for name, value in chosen.items()] + _bounds(span)
        query = sa.select(span.table.c.customer).where(*within, names_customer(span.table))
        found.update(sql.execute(query.distinct().limit(MAX_CUSTOMERS + 1)).scalars())
        if len(found) > MAX_CUSTOMERS:
            raise InvalidInput(
                f"more than {MAX_CUSTOMERS} customers have usage in this period: name one "
                f"(customer=), or export the records",
                parameter="by",
            )


def _span_totals(
    sql: sa.Connection,
    span: RollupSlice,
    groups: Sequence[str],
    chosen: Mapping[str, str],
    *more: sa.ColumnElement[bool],
) -> Iterator[Total]:
    keys = [_key(span, name) for name in groups]
    within = [span.table.c[name] == value for name, value in chosen.items()] + _bounds(span)
    within += more
    query = sa.select(*keys, *_sums_of(span.table)).where(*within)
    if keys:
        query = query.group_by(
            *(key.element for key in keys if not isinstance(key.element, sa.BindParameter))
        )
    for row in sql.execute(query).mappings():
        if row["records"]:
            yield _total(row, groups)


def _key(span: RollupSlice, name: str) -> sa.Label[Any]:
    c = span.table.c
    if name == "hour":
        return (
            sa.literal(span.hour).label(name) if span.table is tables.usage else c.hour.label(name)
        )
    if name == "day" and "day" not in c:
        return (c.hour // HOURS_PER_DAY).label(name)
    if name == "gpu" and span.table is tables.usage:
        return sa.func.coalesce(c.gpu, "").label(name)
    return c[name].label(name)


def _bounds(span: RollupSlice) -> list[sa.ColumnElement[bool]]:
    c = span.table.c
    unit: sa.ColumnElement[Any] = (
        c.started_at if span.table is tables.usage else c.day if "day" in c else c.hour
    )
    return ([] if span.first is None else [unit >= span.first]) + (
        [] if span.end is None else [unit < span.end]
    )


def _sums_of(table: sa.Table) -> list[sa.Label[Any]]:
    c = table.c
    money = [
        half.label(name) for half, name in zip(money_sums(table), ("high", "low"), strict=True)
    ]
    # SQLite can sum 300 years of instance time in nanoseconds, which 300 instances exceed in a
    # year. So these are summed in halves too.
    billed = [
        sa.func.sum(c.billed_ns // HALF).label("billed_s"),
        sa.func.sum(c.billed_ns % HALF).label("billed_rest"),
    ]
    sums = [
        *(sa.func.sum(c[name]).label(name) for name in MEASURES if name != "billed_ns"),
        *billed,
    ]
    if table is not tables.usage:
        return [
            *sums,
            *money,
            *(
                sa.func.sum(c[name]).label(name)
                for name in ("records", "errors", *tables.ROLLUP_FLOATS)
            ),
        ]
    # first in each product: bytes times nanoseconds exceed 64 bits
    seconds = c.billed_ns * sa.literal(1e-9, sa.Double)
    return [
        *sums,
        *money,
        sa.func.count().label("records"),
        sa.func.sum(
            sa.case((sa.and_(c.status >= 500, c.outcome.not_in(NOT_RUN)), 1), else_=0)
        ).label("errors"),
        sa.func.sum(seconds * c.cpu).label("cpu_core_s"),
        sa.func.sum(seconds * c.memory_bytes).label("memory_byte_s"),
        sa.func.sum(seconds * c.gpu_count).label("gpu_s"),
    ]


def _total(row: sa.RowMapping, groups: Sequence[str]) -> Total:
    return Total(
        group={name: row[name] for name in groups},
        records=int(row["records"]),
        errors=int(row["errors"]),
        sums={
            name: picos_of(row["billed_s"], row["billed_rest"])
            if name == "billed_ns"
            else int(row[name])
            for name in MEASURES
        },
        cpu_core_s=float(row["cpu_core_s"]),
        memory_gib_s=float(row["memory_byte_s"]) / GIB,
        gpu_s=float(row["gpu_s"]),
        picos=picos_of(row["high"], row["low"]),
    )
