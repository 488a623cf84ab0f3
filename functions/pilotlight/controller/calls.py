"""Calls: states and results of submitted ones (as activators report them), and what the ledger
knows of all others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import deliveries, endpoints, ledger, tables
from pilotlight.controller.store import Write
from pilotlight.errors import NotFound
from pilotlight.protocol import CallRecord, UsageRecord
from pilotlight.spec import canonical_json, to_json

log = logging.getLogger(__name__)

DROPPED_AT_ONCE = 100
FINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})
"""States that a call does not leave, but for a dead letter that is sent again."""
DEAD = "DEAD"
"""What lists call the state of a dead letter: it FAILED after its last attempt."""
_STATES = {"ok": "SUCCEEDED", "cancelled": "CANCELLED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which calls are asked for; None = whatever it is.

    Attributes:
        tenant: id.
        state: one of a CallRecord's, or DEAD.
        schedule: id of the schedule that began it.
        before: submitted before then (seconds since the epoch), for the next page.
    """

    tenant: str
    environment: str | None = None
    app: str | None = None
    function: str | None = None
    call: str | None = None
    state: str | None = None
    schedule: str | None = None
    before: float | None = None


def put(
    write: Write,
    records: Sequence[CallRecord],
    *,
    payloads: Mapping[str, Mapping[str, Any]] | None = None,
    most_bytes: Callable[[str], int | None] | None = None,
) -> None:
    """Keep the newest `sequence` of each call; an older one, or the same again, changes nothing. A
    call that ends is told to webhooks.

    Args:
        payloads: of those that are dead letters, by call id: what journals hold of them, so that
        they can be sent again. most_bytes: of a tenant's kept calls; above it the oldest that ended
        go.
    """
    table, listeners = tables.calls, _Listeners(write.sql)
    for record in records:
        keys = {"tenant": record.tenant, "id": record.id}
        row = {
            name: getattr(record, name)
            for name in (
                "environment",
                "app",
                "function",
                "state",
                "sequence",
                "submitted_at",
                "expires_at",
            )
        }
        row["record"] = canonical_json(to_json(replace(record, result=""))).decode()
        row["result"] = record.result
        held = (payloads or {}).get(record.id) if record.is_dead else None
        row["payload"] = None if held is None else canonical_json(dict(held)).decode()
        row["kept_bytes"] = len(row["record"]) + len(row["result"]) + len(row["payload"] or "")
        same = (table.c.tenant == record.tenant, table.c.id == record.id)
        before = write.sql.execute(sa.select(table.c.kept_bytes).where(*same)).scalar() or 0
        insert = write.insert(table).values(**keys, **row)
        newer = insert.excluded.sequence > table.c.sequence
        upsert = insert.on_conflict_do_update(
            index_elements=["tenant", "id"], set_=row, where=newer
        ).returning(table.c.id)
        is_new = write.sql.execute(upsert).first() is not None
        if is_new:
            _count(write, record.tenant, row["kept_bytes"] - before)
        if is_new and record.state in FINAL and listeners.hear_of(record):
            _tell(write, record)
    for tenant in sorted({record.tenant for record in records}):
        if most_bytes is not None and (limit := most_bytes(tenant)) is not None:
            _make_room(write, tenant, limit)


def kept_bytes(sql: sa.Connection, *, tenant: str) -> int:
    """What the tenant's submitted calls take, with their results and dead letters."""
    table = tables.kept_calls
    return int(sql.execute(sa.select(table.c.bytes).where(table.c.tenant == tenant)).scalar() or 0)


def listing(sql: sa.Connection, wanted: Wanted, *, limit: int) -> list[dict[str, Any]]:
    """Submitted calls as CallRecord (JSON) without their results, newest first."""
    table = tables.calls
    query = (
        sa.select(table.c.record)
        .where(*_conditions(wanted))
        .order_by(table.c.submitted_at.desc(), table.c.id.desc())
        .limit(limit)
    )
    return [json.loads(text) for text in sql.execute(query).scalars()]


def dead(
    sql: sa.Connection, wanted: Wanted, *, limit: int
) -> Iterator[tuple[CallRecord, dict[str, Any]]]:
    """Dead letters, without their results, with what journals held of them, the oldest first.

    Each is read when it is asked for: they may be large.
    """
    table = tables.calls
    query = sa.select(table.c.tenant, table.c.id).where(
        *_conditions(wanted), table.c.payload.is_not(None)
    )
    for name in sql.execute(query.order_by(table.c.submitted_at, table.c.id).limit(limit)).all():
        one = sa.select(table.c.record, table.c.payload).where(
            table.c.tenant == name.tenant, table.c.id == name.id
        )
        row = sql.execute(one).one()
        yield CallRecord.from_json(json.loads(row.record)), json.loads(row.payload)


def known(sql: sa.Connection, *, tenant: str, call: str) -> tuple[str, int] | None:
    """State and sequence of a submitted call, as far as they were told; None = nothing was."""
    table = tables.calls
    row = sql.execute(
        sa.select(table.c.state, table.c.sequence).where(
            table.c.tenant == tenant, table.c.id == call
        )
    ).first()
    return (row.state, row.sequence) if row is not None else None


def get(sql: sa.Connection, *, tenant: str, call: str) -> dict[str, Any]:
    """A call as CallRecord (JSON) with its `attempts` (usage records). Raises NotFound."""
    table = tables.calls
    row = sql.execute(
        sa.select(table.c.record, table.c.result).where(
            table.c.tenant == tenant, table.c.id == call
        )
    ).first()
    attempts = ledger.attempts(sql, tenant=tenant, call=call)
    if row is None and not attempts:
        why = (
            "or its record is older than its result's time to live, or went for newer ones "
            "(result_bytes of the plan)"
        )
        raise NotFound(f"there is no call {call}, {why}")
    record = (
        {**json.loads(row.record), "result": row.result}
        if row is not None
        else to_json(_synchronous(attempts))
    )
    return {**record, "attempts": to_json(attempts)}


def expire(write: Write, *, now: float, limit: int) -> int:
    """Drop at most `limit` calls whose result may go; returns how many went."""
    table = tables.calls
    old = (
        sa.select(table.c.tenant, table.c.id)
        .where(table.c.expires_at < now)
        .limit(limit)
        .subquery()
    )
    gone = sa.delete(table).where(
        sa.tuple_(table.c.tenant, table.c.id).in_(sa.select(old.c.tenant, old.c.id))
    )
    rows = write.sql.execute(gone.returning(table.c.tenant, table.c.kept_bytes)).all()
    for row in rows:
        _count(write, row.tenant, -row.kept_bytes)
    return len(rows)


def _count(write: Write, tenant: str, more_bytes: int) -> None:
    table = tables.kept_calls
    insert = write.insert(table).values(tenant=tenant, bytes=more_bytes)
    write.sql.execute(
        insert.on_conflict_do_update(
            index_elements=["tenant"], set_={"bytes": table.c.bytes + insert.excluded.bytes}
        )
    )


def _make_room(write: Write, tenant: str, limit: int) -> None:
    """Drop the oldest calls that ended, dead letters among them, until the tenant's take at most
    `limit` bytes."""
    table = tables.calls
    excess, dropped = kept_bytes(write.sql, tenant=tenant) - limit, 0
    while excess > 0:
        ended = sa.select(table.c.id, table.c.kept_bytes).where(
            table.c.tenant == tenant, table.c.state.in_(FINAL)
        )
        rows = write.sql.execute(
            ended.order_by(table.c.submitted_at, table.c.id).limit(DROPPED_AT_ONCE)
        ).all()
        if not rows:
            break
        gone: list[str] = []
        for row in rows:
            if excess <= 0:
                break
            gone.append(row.id)
            excess -= row.kept_bytes
            _count(write, tenant, -row.kept_bytes)
        write.sql.execute(sa.delete(table).where(table.c.tenant == tenant, table.c.id.in_(gone)))
        dropped += len(gone)
    if dropped:
        log.info("event=results_dropped tenant=%s calls=%d limit_bytes=%d", tenant, dropped, limit)


class _Listeners:
    """Whether anybody listens to calls that end, asked once for each environment. Owner: one
    transaction."""

    def __init__(self, sql: sa.Connection) -> None:
        self._sql = sql
        self._known: dict[tuple[str, str], bool] = {}

    def hear_of(self, record: CallRecord) -> bool:
        if record.webhook:
            return True
        place = (record.tenant, record.environment)
        if place not in self._known:
            found = endpoints.listing(
                self._sql, tenant=record.tenant, environment=record.environment
            )
            self._known[place] = any(one.wants(deliveries.CALL_FINISHED) for one in found)
        return self._known[place]


def _tell(write: Write, record: CallRecord) -> None:
    named = (
        "id",
        "state",
        "status",
        "outcome",
        "environment",
        "app",
        "function",
        "method",
        "revision",
        "submitted_at",
        "finished_at",
    )
    facts = {
        name: getattr(record, name)
        for name in (*named, "attempt", "is_dead", "schedule", "cost", "arm")
    }
    deliveries.enqueue(
        write,
        tenant=record.tenant,
        environment=record.environment,
        event=deliveries.CALL_FINISHED,
        body={**facts, "url": f"/v1/calls/{record.id}"},
        webhook=record.webhook or None,
        once=f"{record.id}/{record.sequence}",
    )


def _conditions(wanted: Wanted) -> Iterator[sa.ColumnElement[bool]]:
    table = tables.calls
    yield table.c.tenant == wanted.tenant
    for name in ("environment", "app", "function"):
        if (value := getattr(wanted, name)) is not None:
            yield table.c[name] == value
    if wanted.call is not None:
        yield table.c.id == wanted.call
    if wanted.state is not None:
        yield (
            table.c.payload.is_not(None) if wanted.state == DEAD else table.c.state == wanted.state
        )
    if wanted.schedule is not None:
        yield table.c.record.contains(f'"schedule":"{wanted.schedule}"', autoescape=True)
    if wanted.before is not None:
        yield table.c.submitted_at < wanted.before


def _synchronous(attempts: Sequence[UsageRecord]) -> CallRecord:
    # What it was its attempts say; what it costs, their corrections too.
    made = [one for one in attempts if one.kind != ledger.ADJUSTMENT] or attempts
    first, last = made[0], made[-1]
    elapsed_ms = last.queued_ms + last.start_ms + last.exec_ms
    return CallRecord(
        id=last.call,
        tenant=last.tenant,
        environment=last.environment,
        app=last.app,
        function=last.function,
        method=last.method,
        state=_STATES.get(last.outcome, "FAILED"),
        sequence=len(made),
        submitted_at=first.started_at,
        finished_at=last.started_at + elapsed_ms / 1000,
        status=last.status,
        outcome=last.outcome,
        revision=last.revision,
        start_kind=last.start_kind,
        queued_ms=last.queued_ms,
        start_ms=last.start_ms,
        exec_ms=last.exec_ms,
        cost=format(sum((Decimal(a.cost) for a in attempts), Decimal(0)), "f"),
    )
