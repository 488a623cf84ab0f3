"""Usage and cost reports: one line per group, kind and currency. The sum of the lines equals the
sum of the records."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import sqlalchemy as sa

from pilotlight.controller.billing.ledger_totals import Total, totals
from pilotlight.controller.billing.usage_aggregation import DAY_S, HOUR_S
from pilotlight.controller.database import tables
from pilotlight.errors import InvalidInput
from pilotlight.spec.pricing import GPU_STATES

GROUPS: dict[str, tuple[str, ...]] = {
    "function": ("environment", "app", "function"),
    "app": ("environment", "app"),
    "environment": ("environment",),
    "revision": ("environment", "app", "function", "revision"),
    "key": ("key",),
    "caller": ("caller",),
    "customer": ("customer",),
    "kind": ("kind",),
    "gpu": ("gpu",),
    "day": ("day",),
    "hour": ("hour",),
}
TAG = "tag:"
"""`tag:<name>` groups by the value of that tag of the revision that ran; "" if the revision has no
such tag, or its environment was deleted."""
_OF_REVISIONS = ("function_id", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One line of a report.

    Attributes:
        group: the values of the grouping.
        kind: `UsageRecord.kind` of the records.
        gpu: kind of their granted GPUs; "" without.
        gpu_state: what the GPUs did in this time (`pricing.GpuState`); "" without.
        records, errors: the number of records, and how many of them are calls with status 500 or
        above.
        cpu_core_s, memory_gib_s, gpu_s: for display only; costs are computed per record.
        cost: exact.
    """

    group: dict[str, str]
    kind: str
    gpu: str
    gpu_state: str
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
) -> list[ReportLine]:
    """Report a tenant's usage over since <= started_at < until, ordered by group. Raises
    InvalidInput for an unknown grouping, and for too many customers."""
    tag = by.removeprefix(TAG) if by.startswith(TAG) else None
    groups = _OF_REVISIONS if tag else GROUPS.get(by)
    if groups is None:
        raise InvalidInput(
            f"by = {by!r}: use one of {', '.join(GROUPS)} or {TAG}<name>", parameter="by"
        )
    columns = list(dict.fromkeys((*groups, "kind", "gpu", "currency")))
    found = totals(
        sql,
        tenant=tenant,
        groups=columns,
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
        function_id, revision, *rest = (str(value) for value in total.group.values())
        key = (values.get((function_id, revision), ""), *rest)
        total.group = dict(zip((TAG + tag, "kind", "gpu", "currency"), key, strict=True))
        if key in out:
            out[key].absorb(total)
        else:
            out[key] = total
    return [out[key] for key in sorted(out)]


def _tag_values(
    sql: sa.Connection, function_ids: Sequence[str], tag: str
) -> dict[tuple[str, str], str]:
    """Return the tag's values by (function id, revision). Documents are parsed here because that
    works the same on every database, and there are few revisions."""
    table = tables.revisions
    query = sa.select(table.c.function, table.c.name, table.c.spec).where(
        table.c.function.in_(function_ids)
    )
    return {
        (row.function, row.name): str(json.loads(row.spec).get("tags", {}).get(tag, ""))
        for row in sql.execute(query)
    }


def _line(total: Total, groups: Sequence[str]) -> ReportLine:
    return ReportLine(
        group={name: _format_group(name, total.group[name]) for name in groups},
        kind=str(total.group["kind"]),
        gpu=str(total.group["gpu"]),
        gpu_state=GPU_STATES.get(str(total.group["kind"]), "") if total.group["gpu"] else "",
        currency=str(total.group["currency"]),
        records=total.records,
        errors=total.errors,
        sums=total.sums,
        cpu_core_s=total.cpu_core_s,
        memory_gib_s=total.memory_gib_s,
        gpu_s=total.gpu_s,
        cost=total.cost,
    )


def _format_group(name: str, value: str | int) -> str:
    if name == "day":
        return dt.datetime.fromtimestamp(int(value) * DAY_S, tz=dt.UTC).date().isoformat()
    if name == "hour":
        return dt.datetime.fromtimestamp(int(value) * HOUR_S, tz=dt.UTC).strftime("%Y-%m-%dT%H:00Z")
    return str(value)
