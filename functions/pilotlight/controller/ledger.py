"""The ledger: every usage record, once, and the sums over them, exact to the last digit.

A record is immutable and unique by its id, so an activator may send it again until it hears that it arrived. Costs are
added as whole picounits inside the database: the high and the low half apart, because SQLite's SUM overflows at 2**63.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal, InvalidOperation
from itertools import product
from operator import itemgetter
from types import NoneType
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.store import Write
from pilotlight.errors import InvalidInput
from pilotlight.pricing import COST_QUANTUM, GIB
from pilotlight.protocol import UsageRecord

log = logging.getLogger(__name__)

DAY_S = 86_400
_HALF = 10**9
_MAX_PICOS = 2**62
GROUPS: dict[str, tuple[str, ...]] = {
    "function": ("environment", "app", "function"),
    "app": ("environment", "app"),
    "environment": ("environment",),
    "revision": ("environment", "app", "function", "revision"),
    "key": ("key",),
    "day": ("day",),
}
_MISSING = object()
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(UsageRecord) if f.default is not MISSING}
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "str | None": (str, NoneType)}
_TYPES: dict[str, tuple[type, ...]] = {f.name: _KINDS[str(f.type)] for f in fields(UsageRecord)}
"""Types of a record's fields as JSON gives them."""
_SOUND = frozenset(product(*_TYPES.values()))
"""Every combination of types that a record may have, in the order of its fields: one look-up checks a whole record."""
_values = itemgetter(*_TYPES)
_STARTED_AT, _COST = list(_TYPES).index("started_at"), list(_TYPES).index("cost")
_COLUMNS = (*_TYPES, "received_at", "cost_picos", "day")
_is_plain = re.compile(r"[0-9]{1,6}\.[0-9]{12}").fullmatch
"""Costs as our own activators write them, whole picounits of less than a million: below 2**62."""
_SUMMED = ("queued_ms", "start_ms", "exec_ms", "billed_ns", "tokens_in", "tokens_out", "bytes_in", "bytes_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a bill.

    Attributes:
        group: the values that it is grouped by.
        kind: `CALL`, `IDLE` or `RESERVED`.
        records: how many records it sums.
        cpu_core_s, memory_gib_s: for people; the money was computed per record.
        cost: exact.
    """

    group: dict[str, str]
    kind: str
    currency: str
    records: int
    sums: dict[str, int]
    cpu_core_s: float
    memory_gib_s: float
    cost: Decimal


def add(write: Write, records: Sequence[UsageRecord]) -> tuple[int, list[str]]:
    """Insert what is not there yet; returns (new records, ids that are there already with other content).

    The first content of an id stands. Raises InvalidInput for a cost that is not a decimal of whole picounits.
    """
    return add_rows(write, [record.to_json() for record in records])


def add_rows(write: Write, rows: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """`add` for records that are JSON values still: the ledger's hot path, one prepared statement for the whole batch.

    Raises InvalidInput naming the record and the key that is missing, unknown or of the wrong type.
    """
    if not rows:
        return 0, []
    values = [_row(row, i, write.now) for i, row in enumerate(rows)]
    try:
        new = write.sql.exec_driver_sql(_insertion(write.sql.dialect.name), values, {"preserve_rowcount": True}).rowcount
    except (OverflowError, UnicodeEncodeError, sa.exc.DataError) as e:
        raise InvalidInput(f"usage: a number or a text of these records does not fit into the ledger: {e}") from e
    return new, [] if new == len(rows) else _conflicts(write, [_checked(row, i) for i, row in enumerate(rows)])


@functools.cache
def _insertion(dialect: str) -> str:
    """Written out: SQLAlchemy's own handling of the parameters costs more than the database does."""
    columns = ", ".join(f'"{name}"' for name in _COLUMNS)
    places = ", ".join(["%s" if dialect == "postgresql" else "?"] * len(_COLUMNS))
    return f"INSERT INTO {tables.usage.name} ({columns}) VALUES ({places}) ON CONFLICT (id) DO NOTHING"


def _row(row: Mapping[str, Any], at: int, now: float) -> tuple[Any, ...]:
    """The values of `_COLUMNS`."""
    try:
        values = _values(row)
    except KeyError:
        values = _values(_checked(row, at))
    if len(row) > len(_TYPES) or tuple(map(type, values)) not in _SOUND:
        _checked(row, at)
    cost, started_at = values[_COST], values[_STARTED_AT]
    picos = int(cost.replace(".", "")) if _is_plain(cost) else _picos(cost, at)
    try:
        return (*values, now, picos, int(started_at // DAY_S))
    except (ValueError, OverflowError) as e:
        raise InvalidInput(f"records[{at}].started_at = {started_at!r} is no time", parameter="started_at") from e


def _conflicts(write: Write, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids whose record in the ledger is not the one that was sent."""
    known = {record.id: record for record in find(write.sql, tables.usage.c.id.in_([row["id"] for row in rows]))}
    conflicts = [row["id"] for row in rows if known[row["id"]] != UsageRecord(**row)]
    for record_id in conflicts:
        log.error("event=usage_conflict record=%s", record_id)
    return conflicts


def _checked(row: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    for name, kinds in _TYPES.items():
        value = row.get(name, _DEFAULTS.get(name, _MISSING))
        if type(value) not in kinds:
            what = "is missing" if value is _MISSING else f"= {value!r}: expected {' or '.join(kind.__name__ for kind in kinds)}"
            raise InvalidInput(f"records[{at}].{name} {what}", parameter=name)
    if len(row) > len(_TYPES) or not _TYPES.keys() >= row.keys():
        unknown = min(set(row) - set(_TYPES))
        raise InvalidInput(f"records[{at}]: unknown key {unknown!r}", parameter=unknown)
    return row if len(row) == len(_TYPES) else {**_DEFAULTS, **row}


def find(sql: sa.Connection, *where: sa.ColumnElement[bool]) -> list[UsageRecord]:
    """Records that match, by attempt."""
    columns = [tables.usage.c[name] for name in UsageRecord.__slots__]
    query = sa.select(*columns).where(*where).order_by(tables.usage.c.attempt, tables.usage.c.id)
    return [UsageRecord(**row) for row in sql.execute(query).mappings()]


def attempts(sql: sa.Connection, *, tenant: str, call: str) -> list[UsageRecord]:
    """The attempts of one call."""
    return find(sql, tables.usage.c.tenant == tenant, tables.usage.c.call == call)


def report(sql: sa.Connection, *, tenant: str, by: str, since: float | None, until: float | None, environment: str | None) -> list[Line]:
    """A tenant's bill: one line per group, kind and currency, in the order of the groups; since <= started_at < until."""
    table = tables.usage
    groups = [table.c[name] for name in GROUPS[by]]
    picos, seconds = table.c.cost_picos, table.c.billed_ns * sa.literal(1e-9, sa.Double)
    query = (
        sa.select(
            *groups,
            table.c.kind,
            table.c.currency,
            sa.func.count().label("records"),
            *(sa.func.sum(table.c[name]).label(name) for name in _SUMMED),
            sa.func.sum(table.c.cpu * seconds).label("cpu_core_s"),
            sa.func.sum(table.c.memory_bytes * seconds).label("memory_byte_s"),
            sa.func.sum(picos // _HALF).label("high"),
            sa.func.sum(picos % _HALF).label("low"),
        )
        .where(table.c.tenant == tenant)
        .group_by(*groups, table.c.kind, table.c.currency)
        .order_by(*groups, table.c.kind, table.c.currency)
    )
    if since is not None:
        query = query.where(table.c.started_at >= since)
    if until is not None:
        query = query.where(table.c.started_at < until)
    if environment is not None:
        query = query.where(table.c.environment == environment)
    return [_line(row, GROUPS[by]) for row in sql.execute(query).mappings()]


def _line(row: sa.RowMapping, groups: Sequence[str]) -> Line:
    cost = COST_QUANTUM * (int(row["high"]) * _HALF + int(row["low"]))
    return Line(
        group={name: _day(row[name]) if name == "day" else row[name] for name in groups},
        kind=row["kind"],
        currency=row["currency"],
        records=row["records"],
        sums={name: int(row[name]) for name in _SUMMED},
        cpu_core_s=float(row["cpu_core_s"]),
        memory_gib_s=float(row["memory_byte_s"]) / GIB,
        cost=cost,
    )


def _day(day: int) -> str:
    return dt.datetime.fromtimestamp(day * DAY_S, tz=dt.UTC).date().isoformat()


def _picos(cost: str, at: int) -> int:
    try:
        picos = Decimal(cost) / COST_QUANTUM
    except InvalidOperation as e:
        raise InvalidInput(f"records[{at}].cost = {cost!r} is not a decimal number", parameter="cost") from e
    if not picos.is_finite() or picos != int(picos) or not 0 <= picos < _MAX_PICOS:
        raise InvalidInput(f"records[{at}].cost = {cost!r} is not a whole number of {COST_QUANTUM}", parameter="cost")
    return int(picos)
