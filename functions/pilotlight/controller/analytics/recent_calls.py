"""The newest calls, by index. Days without calls are excluded first, so that the query does not
scan many records of others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.analytics.time_range import DAY_S
from pilotlight.controller.billing import ledger
from pilotlight.controller.database import tables
from pilotlight.protocol import UsageRecord

DAYS = 31
"""How many days back the list of calls reaches. Older calls are in the billing export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPage:
    """Calls, newest first, and the cursor of the next page; "": this is the last page."""

    calls: list[UsageRecord]
    older: str


def read(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    now: float,
    limit: int,
    function_id: str | None = None,
    before: str = "",
) -> CallPage:
    """Return at most `limit` calls of an environment, before the cursor `before` if given
    (`<started_at>~<id>`)."""
    table = tables.usage
    until, after_id = _cursor(before)
    since = _since(
        sql,
        tenant=tenant,
        environment=environment,
        function_id=function_id,
        until=min(until, now),
        count=limit + 1,
    )
    if since is None:
        return CallPage(calls=[], older="")
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
    columns = [table.c[name] for name in UsageRecord.__slots__]
    query = (
        sa.select(*columns)
        .where(*where)
        .order_by(table.c.started_at.desc(), table.c.id.desc())
        .limit(limit + 1)
    )
    found = [UsageRecord(**row) for row in sql.execute(query).mappings()]
    more = len(found) > limit
    return CallPage(
        calls=found[:limit],
        older=f"{found[limit - 1].started_at!r}~{found[limit - 1].id}" if more else "",
    )


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
