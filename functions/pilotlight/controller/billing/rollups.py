"""Rollups: the ledger's sums by hour and by day, and latency histograms, updated in the transaction
that adds the records.

They are derived from the records: `rebuild` computes them again, `verify` compares. Records that
were archived (`controller.usage_archive`) count with the sums that are kept of them; days of which
a tenant has archived records are not rebuilt.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing.ledger_totals import HALF, money_sums, picos_of
from pilotlight.controller.billing.usage_aggregation import (
    COLUMNS,
    HOURS_PER_DAY,
    BatchSums,
    GroupKey,
    UsageAggregate,
    aggregate,
    by_day,
)
from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.store import Write

REBUILD_ROWS = 20_000
"""Records in memory at once during a rebuild, about 60 MB."""
_NO_DAY = -(10**9)
"""Before any day."""


def add(write: Write, sums: UsageAggregate) -> None:
    """Add the sums of new records."""
    upsert_sums(write, tables.usage_hours, [_flat(key, one) for key, one in sums.hours.items()])
    upsert_sums(write, tables.usage_days, [_flat(key, one) for key, one in sums.days.items()])
    counts = [
        (*key, *at, calls)
        for key, buckets in sums.latencies.items()
        for at, calls in buckets.items()
    ]
    upsert_sums(write, tables.latency_hours, counts)
    customers = sums.customer_hours
    for table, found in (
        (tables.customer_hours, customers),
        (tables.customer_days, by_day(customers)),
    ):
        upsert_sums(write, table, [_flat(key, one) for key, one in found.items()])


def _flat(key: GroupKey, sums: BatchSums) -> tuple[Any, ...]:
    """Return a rollup's row in the order of its columns."""
    unit, tenant, *rest = key
    money = divmod(sums.picos, HALF)
    return (
        tenant,
        unit,
        *rest,
        sums.records,
        sums.errors,
        *sums.measures,
        *money,
        sums.cpu_core_s,
        sums.memory_byte_s,
        sums.gpu_s,
    )


def upsert_sums(write: Write, table: sa.Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add rows of a table of sums, in the order of its columns, to those with the same key."""
    if rows:
        bulk.insert(write.sql, table.name, _names(table), rows, _addition(table))


@functools.cache
def _names(table: sa.Table) -> tuple[str, ...]:
    return tuple(column.name for column in table.columns)


@functools.cache
def _addition(table: sa.Table) -> str:
    keys = [column.name for column in table.primary_key]
    sums = ", ".join(
        f'"{name}" = {table.name}."{name}" + excluded."{name}"'
        for name in _names(table)
        if name not in keys
    )
    return f"ON CONFLICT ({bulk.quoted(keys)}) DO UPDATE SET {sums}"


def rebuild(write: Write, *, tenant: str | None = None) -> int:
    """Rebuild the rollups of a tenant (None: of all) from the records, of days without archived
    records; return the number of records."""
    for table in (
        tables.usage_hours,
        tables.usage_days,
        tables.latency_hours,
        tables.customer_hours,
        tables.customer_days,
    ):
        write.sql.execute(sa.delete(table).where(*_of(table, tenant), ~_has_archived(table)))
    query = sa.select(*(tables.usage.c[name] for name in COLUMNS)).where(
        *_of(tables.usage, tenant), ~_has_archived(tables.usage)
    )
    records = 0
    with write.sql.execute(query, execution_options={"yield_per": REBUILD_ROWS}) as found:
        for page in found.partitions():
            records += len(page)
            add(write, aggregate([tuple(row) for row in page]))
    return records


def count(sql: sa.Connection, *, tenant: str | None = None) -> int:
    """Return the number of records, according to the rollups."""
    table = tables.usage_days
    return int(
        sql.execute(
            sa.select(sa.func.coalesce(sa.func.sum(table.c.records), 0)).where(*_of(table, tenant))
        ).scalar_one()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollupDifference:
    """A sum that differs between a rollup and the records.

    Attributes:
        table: name of the rollup.
        expected, found: (records, picounits) of the records, and of the rollup.
    """

    table: str
    tenant: str
    month: str
    currency: str
    expected: tuple[int, int]
    found: tuple[int, int]


def verify(sql: sa.Connection, *, tenant: str | None = None) -> list[RollupDifference]:
    """Compare number and cost of the rollups with the ledger's records, by day, invoice month and
    currency; [] = they are equal."""
    archived = tables.usage_archive_days
    records = _sum(_money_by_day(sql, tables.usage, tenant), _money_by_day(sql, archived, tenant))
    of_customers = _sum(
        _money_by_day(sql, tables.usage, tenant, tables.usage.c.customer != ""),
        _money_by_day(sql, archived, tenant, archived.c.has_customer),
    )
    out = []
    for table, expected in (
        (tables.usage_hours, records),
        (tables.usage_days, records),
        (tables.customer_hours, of_customers),
        (tables.customer_days, of_customers),
    ):
        found = _money_by_day(sql, table, tenant)
        for key in sorted(expected.keys() | found.keys()):
            pair = expected.get(key, (0, 0)), found.get(key, (0, 0))
            if pair[0] != pair[1]:
                out.append(
                    RollupDifference(
                        table=table.name,
                        tenant=key[0],
                        month=key[2],
                        currency=key[3],
                        expected=pair[0],
                        found=pair[1],
                    )
                )
    return out


def _money_by_day(
    sql: sa.Connection, table: sa.Table, tenant: str | None, *where: sa.ColumnElement[bool]
) -> dict[Any, tuple[int, int]]:
    c = table.c
    records = sa.func.count() if table is tables.usage else sa.func.sum(c.records)
    day = c.day if "day" in c else c.hour // HOURS_PER_DAY
    keys = [c.tenant, day, c.month, c.currency]
    within = (*_of(table, tenant), *where)
    query = sa.select(*keys, records, *money_sums(table)).where(*within).group_by(*keys)
    return {
        tuple(key): (int(count), picos_of(high, low))
        for *key, count, high, low in sql.execute(query)
    }


def _sum(*parts: dict[Any, tuple[int, int]]) -> dict[Any, tuple[int, int]]:
    total: dict[Any, tuple[int, int]] = {}
    for part in parts:
        for key, (records, picos) in part.items():
            known = total.get(key, (0, 0))
            total[key] = (known[0] + records, known[1] + picos)
    return total


def _has_archived(table: sa.Table) -> sa.ColumnElement[bool]:
    """The condition for rows of days until the last one of which their tenant has archived
    records."""
    days = tables.usage_archive_days.c
    day = table.c.day if "day" in table.c else table.c.hour // HOURS_PER_DAY
    last = sa.select(sa.func.max(days.day)).where(days.tenant == table.c.tenant).correlate(table)
    return day <= sa.func.coalesce(last.scalar_subquery(), _NO_DAY)


def _of(table: sa.Table, tenant: str | None) -> list[sa.ColumnElement[bool]]:
    return [] if tenant is None else [table.c.tenant == tenant]
