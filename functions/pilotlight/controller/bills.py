"""Reports: what was used and what it cost, one line per group, kind and currency; the sum of the
lines is the sum of the records."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.aggregation import DAY_S, HOUR_S
from pilotlight.controller.totals import Total, totals
from pilotlight.errors import InvalidInput

GROUPS: dict[str, tuple[str, ...]] = {
    "function": ("environment", "app", "function"),
    "app": ("environment", "app"),
    "environment": ("environment",),
    "revision": ("environment", "app", "function", "revision"),
    "key": ("key",),
    "caller": ("caller",),
    "kind": ("kind",),
    "day": ("day",),
    "hour": ("hour",),
}
TAG = "tag:"
"""`tag:<name>`: by the value of that tag of the revision that ran; "" where it has none, or its
environment was deleted."""
_OF_REVISIONS = ("function_id", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a report.

    Attributes:
        group: the values that it is grouped by.
        kind: of the records, as `UsageRecord.kind`.
        records, errors: how many it sums, and how many of them are calls answered 500 or above.
        cpu_core_s, memory_gib_s, gpu_s: for people; the money was computed per record.
        cost: exact.
    """

    group: dict[str, str]
    kind: str
    currency: str
    records: int
    errors: int
    sums: dict[str, int]
    cpu_core_s: float
    memory_gib_s: float
    gpu_s: float
    cost: Decimal


def report(
    sql: sa.Connection,
    *,
    tenant: str,
    by: str,
    since: float | None,
    until: float | None,
    environment: str | None,
    where: Mapping[str, str] | None = None,
) -> list[Line]:
    """A tenant's use over since <= started_at < until, in the order of the groups. Raises
    InvalidInput for a grouping that there is not."""
    tag = by.removeprefix(TAG) if by.startswith(TAG) else None
    groups = _OF_REVISIONS if tag else GROUPS.get(by)
    if groups is None:
        raise InvalidInput(
            f"by = {by!r}: there are {', '.join(GROUPS)} and {TAG}<name>", parameter="by"
        )
    asked = list(dict.fromkeys((*groups, "kind", "currency")))
    found = totals(
        sql,
        tenant=tenant,
        groups=asked,
        since=since,
        until=until,
        environment=environment,
        where=where,
    )
    if tag:
        found = _by_tag(sql, found, tag)
        groups = (by,)
    return [_line(total, groups) for total in found]


def _by_tag(sql: sa.Connection, found: Sequence[Total], tag: str) -> list[Total]:
    values = _tag_values(sql, sorted({str(total.group["function_id"]) for total in found}), tag)
    out: dict[tuple[str, ...], Total] = {}
    for total in found:
        function_id, revision, kind, currency = (str(value) for value in total.group.values())
        key = (values.get((function_id, revision), ""), kind, currency)
        total.group = {TAG + tag: key[0], "kind": kind, "currency": currency}
        if key in out:
            out[key].absorb(total)
        else:
            out[key] = total
    return [out[key] for key in sorted(out)]


def _tag_values(
    sql: sa.Connection, function_ids: Sequence[str], tag: str
) -> dict[tuple[str, str], str]:
    """By (function id, revision). Reading the documents here is the same on every database; there
    are few revisions."""
    table = tables.revisions
    query = sa.select(table.c.function, table.c.name, table.c.spec).where(
        table.c.function.in_(function_ids)
    )
    return {
        (row.function, row.name): str(json.loads(row.spec).get("tags", {}).get(tag, ""))
        for row in sql.execute(query)
    }


def _line(total: Total, groups: Sequence[str]) -> Line:
    return Line(
        group={name: _shown(name, total.group[name]) for name in groups},
        kind=str(total.group["kind"]),
        currency=str(total.group["currency"]),
        records=total.records,
        errors=total.errors,
        sums=total.sums,
        cpu_core_s=total.cpu_core_s,
        memory_gib_s=total.memory_gib_s,
        gpu_s=total.gpu_s,
        cost=total.cost,
    )


def _shown(name: str, value: str | int) -> str:
    if name == "day":
        return dt.datetime.fromtimestamp(int(value) * DAY_S, tz=dt.UTC).date().isoformat()
    if name == "hour":
        return dt.datetime.fromtimestamp(int(value) * HOUR_S, tz=dt.UTC).strftime("%Y-%m-%dT%H:00Z")
    return str(value)
