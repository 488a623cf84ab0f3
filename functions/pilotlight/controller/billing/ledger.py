"""The ledger: every usage record, exactly once, and exact sums over them.

A record is immutable and unique by its id, so an activator can resend it until it is acknowledged.
The database adds costs as whole picounits, the high and the low half separately, because SQLite's
SUM overflows at 2**63."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from decimal import Decimal, InvalidOperation
from itertools import product
from operator import itemgetter
from types import NoneType
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing import rollups
from pilotlight.controller.billing.usage_aggregation import (
    AT,
    COLUMNS,
    DAY_S,
    SpendKey,
    UsageAggregate,
    aggregate,
    month_of_day,
    next_month,
    spend_by_key,
)
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import InvalidInput
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import COST_QUANTUM

log = logging.getLogger(__name__)

ADJUSTMENT = "ADJUSTMENT"
_MAX_PICOS = 2**62
_MISSING = object()
_DEFAULTS: dict[str, Any] = {
    f.name: f.default for f in fields(UsageRecord) if f.default is not MISSING
}
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "str | None": (str, NoneType),
}
_TYPES: dict[str, tuple[type, ...]] = {f.name: _KINDS[str(f.type)] for f in fields(UsageRecord)}
"""Types of a record's fields as parsed from JSON."""
_SOUND = frozenset(product(*_TYPES.values()))
"""Every valid combination of types, in the order of a record's fields: one lookup checks a whole
record."""
_values = itemgetter(*_TYPES)
_STARTED_AT, _COST, _KIND, _EXPERIMENT = AT["started_at"], AT["cost"], AT["kind"], AT["experiment"]
LedgerRow = tuple[Any, ...]
"""A record as the ledger stores it, in the order of `COLUMNS`."""
_experiment = itemgetter(_EXPERIMENT)
_tenant_and_month = itemgetter(AT["tenant"], AT["month"])
_ISSUED = "SELECT tenant, currency, month FROM invoices WHERE tenant {} AND month >= {}"
_is_plain = re.compile(r"[0-9]{1,6}\.[0-9]{12}").fullmatch
"""Matches costs as activators write them: whole picounits, less than a million units, below
2**62."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerInsert:
    """The result of adding a batch.

    Attributes:
        new: the number of new records.
        conflicts: ids that exist with different content; the first content is kept.
        spent: cost of the new records, in picounits.
        batch: cost of all records as sent, including those that existed before.
        in_experiments: the new records that belong to an experiment.
    """

    new: int
    conflicts: Sequence[str] = ()
    spent: Mapping[SpendKey, int] = field(default_factory=dict)
    batch: Mapping[SpendKey, int] = field(default_factory=dict)
    in_experiments: Sequence[LedgerRow] = ()


def add(write: Write, records: Sequence[UsageRecord]) -> LedgerInsert:
    """Insert the records that are new. Raises InvalidInput for a cost that is not a decimal of
    whole picounits."""
    return add_rows(write, [record.to_json() for record in records])


def add_rows(write: Write, rows: Sequence[Mapping[str, Any]]) -> LedgerInsert:
    """Insert the new ones of records given as JSON values: the ledger's hot path. Updates the
    rollups in the same transaction.

    Raises InvalidInput with the record and the key that is missing, unknown or of the wrong type.
    """
    if not rows:
        return LedgerInsert(new=0)
    values = _in_open_months(write.sql, [_row(row, i, write.now) for i, row in enumerate(rows)])
    try:
        fresh, sums = _insert(write, values)
        rollups.add(write, sums)
    except (OverflowError, UnicodeEncodeError, sa.exc.DataError) as e:
        raise InvalidInput(
            f"usage: a number or text in these records is too large for the ledger: {e}"
        ) from e
    spent, new = spend_by_key(sums.days), len(fresh)
    assigned = [row for row in fresh if row[_EXPERIMENT]] if any(map(_experiment, fresh)) else ()
    if new == len(rows):
        return LedgerInsert(new=new, spent=spent, batch=spent, in_experiments=assigned)
    conflicts = _conflicts(write, [_checked(row, i) for i, row in enumerate(rows)])
    return LedgerInsert(
        new=new,
        conflicts=conflicts,
        spent=spent,
        batch=spend_by_key(aggregate(values).days),
        in_experiments=assigned,
    )


def _insert(
    write: Write, values: Sequence[LedgerRow]
) -> tuple[Sequence[LedgerRow], UsageAggregate]:
    """Insert rows and return those that are new. Uses one prepared statement for the whole batch;
    only if some rows existed, a query finds which."""
    with write.sql.begin_nested() as attempt:
        if _insert_all(write.sql, values) == len(values):
            return values, aggregate(values)
        attempt.rollback()
    fresh = _unknown(write.sql, values)
    if fresh:
        _insert_all(write.sql, fresh)
    return fresh, aggregate(fresh)


def _insert_all(sql: sa.Connection, values: Sequence[LedgerRow]) -> int:
    return int(
        sql.exec_driver_sql(
            _insertion(sql.dialect.name), list(values), {"preserve_rowcount": True}
        ).rowcount
    )


def _unknown(sql: sa.Connection, values: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Return the first row of each id that the ledger does not have."""
    first: dict[str, LedgerRow] = {}
    for row in values:
        first.setdefault(row[AT["id"]], row)
    known = sa.select(tables.usage.c.id).where(tables.usage.c.id.in_(list(first)))
    for found in sql.execute(known).scalars().all():
        del first[found]
    return list(first.values())


def _in_open_months(sql: sa.Connection, values: list[LedgerRow]) -> list[LedgerRow]:
    """Move records of months whose invoices are issued, and so cannot change, to the first month
    that is not issued."""
    pairs = set(map(_tenant_and_month, values))
    tenants, earliest = {tenant for tenant, _ in pairs}, min(month for _, month in pairs)
    if sql.dialect.name == "postgresql":
        found = sql.exec_driver_sql(_ISSUED.format("= ANY(%s)", "%s"), (list(tenants), earliest))
    else:
        found = sql.exec_driver_sql(
            _ISSUED.format("IN (SELECT value FROM json_each(?))", "?"),
            (json.dumps(list(tenants)), earliest),
        )
    issued = {tuple(row) for row in found}
    return [_moved(row, issued) for row in values] if issued else values


def _moved(row: LedgerRow, issued: set[tuple[str, ...]]) -> LedgerRow:
    month = row[AT["month"]]
    while (row[AT["tenant"]], row[AT["currency"]], month) in issued:
        month = next_month(month)
    return (*row[: AT["month"]], month)


@functools.cache
def _insertion(dialect: str) -> str:
    """Return the INSERT statement as text, because SQLAlchemy's handling of the parameters costs
    more than the database's work."""
    columns = ", ".join(f'"{name}"' for name in COLUMNS)
    markers = ", ".join(["%s" if dialect == "postgresql" else "?"] * len(COLUMNS))
    table = tables.usage.name
    return f"INSERT INTO {table} ({columns}) VALUES ({markers}) ON CONFLICT (id) DO NOTHING"


def _row(row: Mapping[str, Any], at: int, now: float) -> LedgerRow:
    """Return a record's values in the order of `COLUMNS`."""
    try:
        values = _values(row)
    except KeyError:
        values = _values(_checked(row, at))
    if len(row) > len(_TYPES) or tuple(map(type, values)) not in _SOUND:
        _checked(row, at)
    cost, started_at = values[_COST], values[_STARTED_AT]
    picos = int(cost.replace(".", "")) if _is_plain(cost) else _picos(cost, at, kind=values[_KIND])
    try:
        day = int(started_at // DAY_S)
        return (*values, now, picos, day, month_of_day(day))
    except (ValueError, OverflowError) as e:
        raise InvalidInput(
            f"records[{at}].started_at = {started_at!r} is not a valid time",
            parameter="started_at",
        ) from e


def _conflicts(write: Write, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids whose record in the ledger differs from the one that was sent."""
    known = {
        record.id: record
        for record in find(write.sql, tables.usage.c.id.in_([row["id"] for row in rows]))
    }
    conflicts = [row["id"] for row in rows if known[row["id"]] != UsageRecord(**row)]
    for record_id in conflicts:
        log.error("event=usage_conflict record=%s", record_id)
    return conflicts


def _checked(row: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    for name, kinds in _TYPES.items():
        value = row.get(name, _DEFAULTS.get(name, _MISSING))
        if type(value) not in kinds:
            what = (
                "is missing"
                if value is _MISSING
                else f"= {value!r}: expected {' or '.join(kind.__name__ for kind in kinds)}"
            )
            raise InvalidInput(f"records[{at}].{name} {what}", parameter=name)
    if len(row) > len(_TYPES) or not _TYPES.keys() >= row.keys():
        unknown = min(set(row) - set(_TYPES))
        raise InvalidInput(f"records[{at}]: unknown key {unknown!r}", parameter=unknown)
    return row if len(row) == len(_TYPES) else {**_DEFAULTS, **row}


def find(sql: sa.Connection, *where: sa.ColumnElement[bool]) -> list[UsageRecord]:
    """Return the matching records, ordered by attempt."""
    columns = [tables.usage.c[name] for name in UsageRecord.__slots__]
    query = sa.select(*columns).where(*where).order_by(tables.usage.c.attempt, tables.usage.c.id)
    return [UsageRecord(**row) for row in sql.execute(query).mappings()]


def attempts(sql: sa.Connection, *, tenant: str, call: str) -> list[UsageRecord]:
    """Return the attempts of a call."""
    return find(sql, tables.usage.c.tenant == tenant, tables.usage.c.call == call)


def _picos(cost: str, at: int, *, kind: str) -> int:
    try:
        picos = Decimal(cost) / COST_QUANTUM
    except InvalidOperation as e:
        raise InvalidInput(
            f"records[{at}].cost = {cost!r} is not a decimal number", parameter="cost"
        ) from e
    minimum = -_MAX_PICOS if kind == ADJUSTMENT else 0  # only a correction may be negative
    if not picos.is_finite() or picos != int(picos) or not minimum <= picos < _MAX_PICOS:
        raise InvalidInput(
            f"records[{at}].cost = {cost!r} is not a whole number of {COST_QUANTUM}",
            parameter="cost",
        )
    return int(picos)
