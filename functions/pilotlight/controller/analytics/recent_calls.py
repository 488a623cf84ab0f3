"""The newest calls, by index. Days without calls are excluded first, so that the query does not
scan many records of others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.analytics.time_range import DAY_S
from pilotlight.controller.billing import ledger
from pilotlight.controller.database import tables
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import NOT_RUN

DAYS = 31
"""How many days back the list of calls reaches. Older calls are in the billing export."""


MAX_SCANNED = 20_000
"""Calls that a filtered page reads at most; the next page goes on from there."""
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
STATES = ("ok", "failed", "cancelled", "lost", "not_run")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFilter:
    """Which calls are shown; "" and None = all.

    Attributes:
        state: one of STATES: `not_run` are attempts in which nothing ran (`pricing.NOT_RUN`), and
            `failed` is every other outcome but `ok` and `cancelled`.
        status: one of STATUS_CLASSES, or a status such as `429`.
        since, until: began within, wall clock in seconds.
    """

    function_id: str | None = None
    state: str = ""
    status: str = ""
    start_kind: str = ""
    since: float | None = None
    until: float | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether calls must be looked at one by one to find those that match."""
        return bool(self.state or self.status or self.start_kind)

    def conditions(self, columns: Any) -> Iterator[sa.ColumnElement[bool]]:
        """Yield the conditions on `columns` of single calls. An unknown value matches none."""
        if self.state == "failed":
            yield columns.outcome.not_in(("ok", "cancelled", *NOT_RUN))
        elif self.state == "not_run":
            yield columns.outcome.in_(NOT_RUN)
        elif self.state:
            yield columns.outcome == self.state
        if self.status in STATUS_CLASSES:
            first = int(self.status[0]) * 100
            yield columns.status.between(first, first + 99)
        elif self.status:
            yield columns.status == (
                int(self.status) if len(self.status) == 3 and self.status.isdecimal() else -1
            )
        if self.start_kind:
            yield columns.start_kind == self.start_kind


EVERY_CALL = CallFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPage:
    """Calls, newest first, and the cursor of the next page; "": this is the last page.

    Attributes:
        is_cut: MAX_SCANNED calls were looked at, and older ones may match too.
    """

    calls: list[UsageRecord]
    older: str
    is_cut: bool = False


def read(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    now: float,
    limit: int,
    wanted: CallFilter = EVERY_CALL,
    before: str = "",
) -> CallPage:
    """Return at most `limit` calls of an environment, before the cursor `before` if given
    (`<started_at>~<id>`)."""
    table, function_id = tables.usage, wanted.function_id
    until, after_id = _cursor(before)
    if wanted.until is not None and wanted.until < until:
        until, after_id = wanted.until, ""
    since = _since(
        sql,
        tenant=tenant,
        environment=environment,
        function_id=function_id,
        until=min(until, now),
        count=(MAX_SCANNED if wanted.is_narrow else limit) + 1,
    )
    if since is None:
        return CallPage(calls=[], older="")
    if wanted.since is not None:
        since = max(since, wanted.since)
    where = [
        table.c.tenant == tenant,
        table.c.started_at >= since,
        table.c.environment == environment,
        table.c.kind == "CALL",
    ]
    if function_id is not None:
        where.append(table.c.function_id == function_id)
    if until < math.inf:
        same_moment = (table.c.started_at == until) & (table.c.id < after_id)
        where.append((table.c.started_at <= until) & ((table.c.started_at < until) | same_moment))
    newest_first = (table.c.started_at.desc(), table.c.id.desc())
    columns = [table.c[name] for name in UsageRecord.__slots__]
    query = sa.select(*columns)
    if wanted.is_narrow:
        keys = (table.c.id, table.c.started_at, table.c.outcome, table.c.status, table.c.start_kind)
        scanned = sa.select(*keys).where(*where).order_by(*newest_first).limit(MAX_SCANNED)
        seen = scanned.subquery()
        matching = sa.select(seen.c.id).where(*wanted.conditions(seen.c))
        matching = matching.order_by(seen.c.started_at.desc(), seen.c.id.desc()).limit(limit + 1)
        query = query.where(table.c.id.in_(matching))
    else:
        query = query.where(*where)
    query = query.order_by(*newest_first).limit(limit + 1)
    found = [UsageRecord(**row) for row in sql.execute(query).mappings()]
    if len(found) > limit:
        last = found[limit - 1]
        return CallPage(calls=found[:limit], older=f"{last.started_at!r}~{last.id}")
    if wanted.is_narrow:
        rest = sa.select(table.c.started_at, table.c.id).where(*where).order_by(*newest_first)
        end = sql.execute(rest.offset(MAX_SCANNED - 1).limit(2)).all()
        if len(end) > 1:
            older = f"{end[0].started_at!r}~{end[0].id}"
            return CallPage(calls=found, older=older, is_cut=True)
    return CallPage(calls=found, older="")


def attempts(sql: sa.Connection, *, tenant: str, environment: str, call: str) -> list[UsageRecord]:
    """Return the attempts of one call in an environment; empty if the tenant has no such call."""
    return [
        record
        for record in ledger.attempts(sql, tenant=tenant, call=call)
        if record.environment == environment
    ]


def _cursor(before: str) -> tuple[float, str]:
    """Parse a cursor. An invalid cursor starts with the newest call."""
    moment, _, record = before.partition("~")
    try:
        at = float(moment)
    except ValueError:
        return math.inf, ""
    return (at, record) if 0 <= at < math.inf else (math.inf, "")


def _since(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    function_id: str | None,
    until: float,
    count: int,
) -> float | None:
    """Return the start of the day from which there are at least `count` calls, or of the oldest day
    with calls; None without calls."""
    table = tables.usage_days
    last = int(until // DAY_S)
    where = [
        table.c.tenant == tenant,
        table.c.day.between(last - DAYS, last),
        table.c.environment == environment,
        table.c.kind == "CALL",
    ]
    if function_id is not None:
        where.append(table.c.function_id == function_id)
    query = (
        sa.select(table.c.day, sa.func.sum(table.c.records))
        .where(*where)
        .group_by(table.c.day)
        .order_by(table.c.day.desc())
    )
    seen, day = 0, None
    for day, records in sql.execute(query):
        # The cursor's day does not count: how many of its calls precede the cursor is unknown.
        seen += int(records) if day < last else 0
        if seen >= count:
            break
    return None if day is None else day * float(DAY_S)
