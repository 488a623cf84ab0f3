"""The ledger: every usage record, exactly once, and exact sums over them.

A record is immutable and unique by its id, so an activator can resend it until it is acknowledged.
A batch is decoded and checked in C (msgspec); what that refuses is checked again record by record,
to name the record and the key.

The database adds costs as whole picounits, the high and the low half separately, because SQLite's
SUM overflows at 2**63."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from decimal import Decimal, InvalidOperation
from operator import itemgetter
from types import GenericAlias, NoneType
from typing import Any

import msgspec
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
from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import InvalidInput
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import COST_QUANTUM

log = logging.getLogger(__name__)

ADJUSTMENT = "ADJUSTMENT"
_MAX_PICOS = 2**62
UsageValues = tuple[Any, ...]
"""A record's values, in the order of `UsageRecord`'s fields."""
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
_ANNOTATIONS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "str | None": str | None,
}
_Record: Any = msgspec.defstruct(
    "_Record",
    [
        (f.name, _ANNOTATIONS[str(f.type)], *([] if f.default is MISSING else [f.default]))
        for f in fields(UsageRecord)
    ],
    forbid_unknown_fields=True,
    gc=False,
)
_Records: Any = GenericAlias(list, (_Record,))
_Batch = msgspec.defstruct("_Batch", [("records", _Records), ("activator", str, "")])
_decoder = msgspec.json.Decoder(_Batch)
_values = itemgetter(*_TYPES)
_ID, _STARTED_AT, _COST, _KIND, _EXPERIMENT = (
    AT[name] for name in ("id", "started_at", "cost", "kind", "experiment")
)
LedgerRow = tuple[Any, ...]
"""A record as the ledger stores it, in the order of `COLUMNS`."""
_experiment = itemgetter(_EXPERIMENT)
_tenant_and_month = itemgetter(AT["tenant"], AT["month"])
_ISSUED = "SELECT tenant, currency, month FROM invoices WHERE tenant {in} AND month >= {}"
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
        rows, fresh: all records as sent, and the new ones.
    """

    new: int
    conflicts: Sequence[str] = ()
    spent: Mapping[SpendKey, int] = field(default_factory=dict)
    batch: Mapping[SpendKey, int] = field(default_factory=dict)
    in_experiments: Sequence[LedgerRow] = ()
    rows: Sequence[LedgerRow] = ()
    fresh: Sequence[LedgerRow] = ()


def decode_records(body: bytes) -> list[UsageValues]:
    """Decode the body of `POST /internal/usage`. Raises InvalidInput, where it can with the record
    and the key that is missing, unknown or of the wrong type."""
    try:
        batch: Any = _decoder.decode(body)
        return list(map(msgspec.structs.astuple, batch.records))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _check_all(_records(body))


def convert_records(rows: Sequence[Mapping[str, Any]]) -> list[UsageValues]:
    """Check records given as JSON values. Raises InvalidInput as `decode_records` does."""
    try:
        records = msgspec.convert(rows, _Records)
    except msgspec.ValidationError:
        return _check_all(rows)
    return list(map(msgspec.structs.astuple, records))


def add(write: Write, records: Sequence[UsageRecord]) -> LedgerInsert:
    """Insert the records that are new. Raises InvalidInput for a cost that is not a decimal of
    whole picounits."""
    return add_rows(write, [record.to_json() for record in records])


def add_rows(write: Write, rows: Sequence[Mapping[str, Any]]) -> LedgerInsert:
    """Insert the new ones of records given as JSON values.

    Raises InvalidInput with the record and the key that is missing, unknown or of the wrong type.
    """
    return add_values(write, convert_records(rows))


def add_values(write: Write, records: Sequence[UsageValues]) -> LedgerInsert:
    """Insert the new ones of decoded records: the ledger's hot path. Updates the rollups in the
    same transaction.

    Raises InvalidInput for a cost, a time or a size that cannot be stored."""
    if not records:
        return LedgerInsert(new=0)
    values = _in_open_months(write.sql, [_row(r, i, write.now) for i, r in enumerate(records)])
    try:
        fresh, sums = _insert(write, values)
        rollups.add(write, sums)
    except (OverflowError, UnicodeEncodeError, sa.exc.DataError) as e:
        raise InvalidInput(
            f"usage: a number or text in these records is too large for the ledger: {e}"
        ) from e
    spent, new = spend_by_key(sums), len(fresh)
    assigned = [row for row in fresh if row[_EXPERIMENT]] if any(map(_experiment, fresh)) else ()
    if new == len(records):
        return LedgerInsert(
            new=new, spent=spent, batch=spent, in_experiments=assigned, rows=values, fresh=fresh
        )
    return LedgerInsert(
        new=new,
        conflicts=_conflicts(write, records),
        spent=spent,
        batch=spend_by_key(aggregate(values)),
        in_experiments=assigned,
        rows=values,
        fresh=fresh,
    )


def _insert(
    write: Write, values: Sequence[LedgerRow]
) -> tuple[Sequence[LedgerRow], UsageAggregate]:
    """Insert rows and return those that are new. Uses one prepared statement for the whole batch;
    only if some rows existed, a query finds which."""
    write.sql.exec_driver_sql("SAVEPOINT batch")  # as text: a third of what begin_nested costs
    if _insert_all(write.sql, values) == len(values):
        write.sql.exec_driver_sql("RELEASE SAVEPOINT batch")
        return values, aggregate(values)
    write.sql.exec_driver_sql("ROLLBACK TO SAVEPOINT batch")
    write.sql.exec_driver_sql("RELEASE SAVEPOINT batch")
    fresh = _unknown(write.sql, values)
    if fresh:
        _insert_all(write.sql, fresh)
    return fresh, aggregate(fresh)


def _insert_all(sql: sa.Connection, values: Sequence[LedgerRow]) -> int:
    return bulk.insert(sql, tables.usage.name, COLUMNS, values, "ON CONFLICT (id) DO NOTHING")


def _unknown(sql: sa.Connection, values: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Return the first row of each id that the ledger does not have."""
    first: dict[str, LedgerRow] = {}
    for row in values:
        first.setdefault(row[_ID], row)
    known = sa.select(tables.usage.c.id).where(tables.usage.c.id.in_(list(first)))
    for found in sql.execute(known).scalars().all():
        del first[found]
    return list(first.values())


def _in_open_months(sql: sa.Connection, values: list[LedgerRow]) -> list[LedgerRow]:
    """Move records of months whose invoices are issued, and so cannot change, to the first month
    that is not issued."""
    pairs = set(map(_tenant_and_month, values))
    tenants, earliest = {tenant for tenant, _ in pairs}, min(month for _, month in pairs)
    issued = set(bulk.select_in(sql, _ISSUED, tenants, earliest))
    return [_moved(row, issued) for row in values] if issued else values


def _moved(row: LedgerRow, issued: set[tuple[str, ...]]) -> LedgerRow:
    month = row[AT["month"]]
    while (row[AT["tenant"]], row[AT["currency"]], month) in issued:
        month = next_month(month)
    return (*row[: AT["month"]], month)


def _row(values: UsageValues, at: int, now: float) -> LedgerRow:
    """Return a record's values in the order of `COLUMNS`."""
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


def _records(body: bytes) -> list[dict[str, Any]]:
    try:
        records = json.loads(body, parse_constant=_refuse_constant)["records"]
    except (ValueError, KeyError, TypeError) as e:
        raise InvalidInput('usage: expected {"activator": id, "records": [...]}') from e
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InvalidInput("usage: records must be a list of objects", parameter="records")
    return records


def _refuse_constant(name: str) -> Any:
    """Refuse NaN and the infinities: they are not JSON and cannot be billed."""
    raise ValueError(f"{name} is not a number")


def _check_all(rows: Sequence[Mapping[str, Any]]) -> list[UsageValues]:
    return [_values(_check(row, at)) for at, row in enumerate(rows)]


def _check(row: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    for name, kinds in _TYPES.items():
        value = row.get(name, _DEFAULTS.get(name, _MISSING))
        if type(value) not in kinds:
            what = (
                "is missing"
                if value is _MISSING
                else f"= {value!r}: expected {' or '.join(kind.__name__ for kind in kinds)}"
            )
            raise InvalidInput(f"records[{at}].{name} {what}", parameter=name)
    if not _TYPES.keys() >= row.keys():
        unknown = min(set(row) - set(_TYPES))
        raise InvalidInput(f"records[{at}]: unknown key {unknown!r}", parameter=unknown)
    return row if len(row) == len(_TYPES) else {**_DEFAULTS, **row}


def _conflicts(write: Write, records: Sequence[UsageValues]) -> list[str]:
    """Return the ids whose record in the ledger differs from the one that was sent."""
    known = {
        record.id: record
        for record in find(write.sql, tables.usage.c.id.in_([values[_ID] for values in records]))
    }
    names = UsageRecord.__slots__
    sent = [UsageRecord(**dict(zip(names, values, strict=True))) for values in records]
    conflicts = [record.id for record in sent if known[record.id] != record]
    for record_id in conflicts:
        log.error("event=usage_conflict record=%s", record_id)
    return conflicts


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
