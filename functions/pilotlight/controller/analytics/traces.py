"""Traces that activators kept, the newest of each tenant. A trace has a row for each call in it: a
caller may make several in one.

They are what a person looks at, no record of account: the oldest go when there are more than
`controller.traces_per_tenant`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.errors import InvalidInput, NotFound

Json = dict[str, Any]
MAX_SPANS = 512
"""Of one call: what an activator sends is bounded far below."""
_TEXTS = ("environment", "app", "function", "revision", "start_kind", "kept_for")
_SHOWN = (
    "id",
    "call",
    "environment",
    "app",
    "function",
    "revision",
    "arm",
    "start_kind",
    "kept_for",
    "status",
    "duration_ms",
    "at",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceQuery:
    """Which traces are asked for; None = any. Times are wall clock, seconds.

    Attributes:
        failed: those with a status of 500 or more (True), or below (False).
        before: began before this, and `before_call` breaks ties: where the last page ended.
    """

    tenant: str
    environment: str | None = None
    app: str | None = None
    function: str | None = None
    revision: str | None = None
    arm: str | None = None
    call: str | None = None
    kept_for: str | None = None
    start_kind: str | None = None
    failed: bool | None = None
    min_ms: float | None = None
    since: float | None = None
    until: float | None = None
    before: float | None = None
    before_call: str = ""


# -- in --------------------------------------------------------------------------------------------
def put(write: Write, traces: Sequence[Mapping[str, Any]], *, keep: int) -> int:
    """Take traces in (`activator.tracing.trace_builder`), newest last word; returns how many.
    `keep`: of each tenant. Raises InvalidInput.

    What another clock says is in the future is of now: it would outlive everything that comes after
    it."""
    try:
        rows = [_row(one, now=write.now) for one in traces]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
        raise InvalidInput(f"traces: this is not what an activator sends: {e!r}") from e
    if not keep:
        return 0
    if rows:
        insert = write.insert(tables.traces)
        newest = {name: insert.excluded[name] for name in rows[0]}
        write.sql.execute(
            insert.on_conflict_do_update(index_elements=["tenant", "id", "call"], set_=newest), rows
        )
    for tenant in {row["tenant"] for row in rows}:
        _prune(write, tenant, keep)
    return len(rows)


def _row(trace: Mapping[str, Any], *, now: float) -> Json:
    spans, at, duration_ms = (
        trace["spans"][:MAX_SPANS],
        float(trace["at"]),
        float(trace["duration_ms"]),
    )
    if not math.isfinite(at) or not math.isfinite(duration_ms):
        raise ValueError("a time is no number")
    return {
        "tenant": str(trace["tenant"]),
        "id": str(trace["id"]),
        "call": str(trace["call"]),
        **{name: str(trace[name]) for name in _TEXTS},
        "arm": str(spans[0]["attributes"].get("pilotlight.arm", "")),
        "status": int(trace["status"]),
        "duration_ms": duration_ms,
        "at": min(at, now),
        "document": json.dumps(spans, separators=(",", ":")),
    }


def _prune(write: Write, tenant: str, keep: int) -> None:
    table = tables.traces
    mine = table.c.tenant == tenant
    last = sa.select(table.c.at).where(mine).order_by(table.c.at.desc()).offset(keep - 1).limit(1)
    oldest = write.sql.execute(last).scalar()
    if oldest is not None:
        write.sql.execute(sa.delete(table).where(mine, table.c.at < oldest))


# -- out -------------------------------------------------------------------------------------------
def listing(sql: sa.Connection, wanted: TraceQuery, *, limit: int) -> list[Json]:
    """What traces there are, newest first, without their spans."""
    table = tables.traces
    columns = [table.c[name] for name in _SHOWN]
    rows = sql.execute(
        sa.select(*columns)
        .where(*_conditions(wanted))
        .order_by(table.c.at.desc(), table.c.call.desc())
        .limit(limit)
    )
    return [dict(row._mapping) for row in rows]


def _conditions(wanted: TraceQuery) -> list[sa.ColumnElement[bool]]:
    table = tables.traces
    names = ("environment", "app", "function", "revision", "arm", "call", "kept_for", "start_kind")
    found = [table.c.tenant == wanted.tenant]
    found += [
        table.c[name] == value for name in names if (value := getattr(wanted, name)) is not None
    ]
    if wanted.failed is not None:
        found.append(table.c.status >= 500 if wanted.failed else table.c.status < 500)
    if wanted.min_ms is not None:
        found.append(table.c.duration_ms >= wanted.min_ms)
    if wanted.since is not None:
        found.append(table.c.at >= wanted.since)
    if wanted.until is not None:
        found.append(table.c.at < wanted.until)
    if wanted.before is not None:
        same = (table.c.at == wanted.before) & (table.c.call < wanted.before_call)
        found.append((table.c.at < wanted.before) | same)
    return found


def functions(sql: sa.Connection, *, tenant: str, environment: str) -> list[str]:
    """`app/function` of those that have traces."""
    table = tables.traces
    where = (table.c.tenant == tenant, table.c.environment == environment)
    rows = sql.execute(
        sa.select(table.c.app, table.c.function)
        .where(*where)
        .distinct()
        .order_by(table.c.app, table.c.function)
    )
    return [f"{row.app}/{row.function}" for row in rows]


def is_kept(sql: sa.Connection, *, tenant: str, call: str) -> bool:
    """Whether there is a trace of this call."""
    table = tables.traces
    return (
        sql.execute(
            sa.select(table.c.id).where(table.c.tenant == tenant, table.c.call == call).limit(1)
        ).first()
        is not None
    )


def get(sql: sa.Connection, caller: Principal, name: str) -> Json:
    """A trace by its id, or by that of a call in it, as far as `caller` may see it. Raises
    NotFound.

    `calls` are what `listing` tells of each call, first to last; `spans` all their spans, with
    times in ms from `at` of the first."""
    table = tables.traces
    mine = table.c.tenant == caller.tenant
    called = sa.select(table.c.id).where(mine, table.c.call == name)
    rows = (
        sql.execute(
            sa.select(table)
            .where(mine, (table.c.id == name) | table.c.id.in_(called))
            .order_by(table.c.at)
        )
        .mappings()
        .all()
    )
    seen = [
        row
        for row in rows
        if caller.bound_environment in (None, row["environment"])
        and caller.may_see(row["app"], row["function"])
    ]
    if not seen:
        raise NotFound(
            f"there is no trace {name}: it was not kept, or has made room for newer ones (GET "
            f"/v1/traces lists those there are)"
        )
    begin = seen[0]["at"]
    spans: list[Json] = []
    for row in seen:
        shift_ms = round((row["at"] - begin) * 1000, 3)
        spans += [
            {**span, "call": row["call"], "begin_ms": round(span["begin_ms"] + shift_ms, 3)}
            for span in json.loads(row["document"])
        ]
    return {
        "id": seen[0]["id"],
        "at": begin,
        "duration_ms": round(max(span["begin_ms"] + span["ms"] for span in spans), 3),
        "calls": [{shown: row[shown] for shown in _SHOWN} for row in seen],
        "spans": spans,
    }
