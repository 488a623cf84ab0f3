"""Calls: the states and results of submitted calls, as activators report them, and what the ledger
has on all others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing import ledger
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.scheduling import batch_lines
from pilotlight.controller.webhooks import deliveries, endpoints
from pilotlight.errors import NotFound
from pilotlight.protocol import BATCH_LABEL, CallRecord, UsageRecord
from pilotlight.spec.record_json import canonical_json, to_json

log = logging.getLogger(__name__)

DROPPED_AT_ONCE = 100
FINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})
"""Final states of a call; only a dead letter that is redriven leaves its state."""
DEAD = "DEAD"
"""The state of a dead letter in lists: it FAILED after its last attempt."""
_STATES = {"ok": "SUCCEEDED", "cancelled": "CANCELLED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallQuery:
    """A filter for calls; None matches any value.

    Attributes:
        tenant: the tenant's id.
        state: a CallRecord's state, or DEAD.
        schedule: the id of the schedule that started the call.
        before: only calls submitted before (seconds since the epoch), for the next page.
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
    max_bytes: Callable[[str], int | None] | None = None,
) -> None:
    """Store the newest `sequence` of each call; an older or repeated one changes nothing. Webhooks
    are notified of calls that end. Results of a batch's lines become rows of `batch_lines`. Calls
    of deleted tenants are not stored.

    Args:
        payloads: the journal's documents of dead letters, by call id, so that they can be redriven.
        max_bytes: returns the limit on a tenant's stored calls; beyond it the oldest ended calls
        are dropped.
    """
    table, listeners = tables.calls, _WebhookSubscriptions(write.sql)
    deleted = _deleted_tenants(write.sql, {record.tenant for record in records})
    records = [record for record in records if record.tenant not in deleted]
    for record in records:
        if BATCH_LABEL in record.labels:
            if record.state in FINAL:
                batch_lines.finish(write, record)
            continue
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
        payload = (payloads or {}).get(record.id) if record.is_dead else None
        row["payload"] = None if payload is None else canonical_json(dict(payload)).decode()
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
        if is_new and record.state in FINAL and listeners.is_subscribed(record):
            _enqueue_finished(write, record)
    for tenant in sorted({record.tenant for record in records}):
        if max_bytes is not None and (limit := max_bytes(tenant)) is not None:
            _make_room(write, tenant, limit)


def kept_bytes(sql: sa.Connection, *, tenant: str) -> int:
    """Return the stored bytes of the tenant's submitted calls, with their results and dead
    letters."""
    table = tables.kept_calls
    return int(sql.execute(sa.select(table.c.bytes).where(table.c.tenant == tenant)).scalar() or 0)


def listing(sql: sa.Connection, wanted: CallQuery, *, limit: int) -> list[dict[str, Any]]:
    """Return submitted calls as CallRecord (JSON) without their results, newest first."""
    table = tables.calls
    query = (
        sa.select(table.c.record)
        .where(*_conditions(wanted))
        .order_by(table.c.submitted_at.desc(), table.c.id.desc())
        .limit(limit)
    )
    return [
        {key: value for key, value in json.loads(text).items() if key != "result"}
        for text in sql.execute(query).scalars()
    ]


def dead_letters(
    sql: sa.Connection, wanted: CallQuery, *, limit: int
) -> Iterator[tuple[CallRecord, dict[str, Any]]]:
    """Yield dead letters without their results, with their journal documents, oldest first.

    Each is read only when requested, because they may be large.
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


def known_state(sql: sa.Connection, *, tenant: str, call: str) -> tuple[str, int] | None:
    """Return the last reported state and sequence of a submitted call; None if it was never
    reported."""
    table = tables.calls
    row = sql.execute(
        sa.select(table.c.state, table.c.sequence).where(
            table.c.tenant == tenant, table.c.id == call
        )
    ).first()
    return (row.state, row.sequence) if row is not None else None


def get(sql: sa.Connection, *, tenant: str, call: str) -> dict[str, Any]:
    """Return a call as CallRecord (JSON) with its `attempts` (usage records). Raises NotFound."""
    table = tables.calls
    row = sql.execute(
        sa.select(table.c.record, table.c.result).where(
            table.c.tenant == tenant, table.c.id == call
        )
    ).first()
    attempts = ledger.attempts(sql, tenant=tenant, call=call)
    if row is None and not attempts:
        why = (
            "or its record was dropped: it is older than its result's time to live, or the plan's "
            "result_bytes were needed for newer calls"
        )
        raise NotFound(f"there is no call {call}, {why}")
    record = (
        {**json.loads(row.record), "result": row.result}
        if row is not None
        else to_json(_synchronous(attempts))
    )
    return {**record, "attempts": to_json(attempts)}


def find(
    sql: sa.Connection, *, tenant: str, environment: str, call: str, result_chars: int
) -> dict[str, Any] | None:
    """Return a submitted call of an environment as CallRecord (JSON), or None. A `result` (base64)
    of more than `result_chars` characters is left in the database: it is "" then; `result_length`
    is its length."""
    table = tables.calls
    length = sa.func.length(table.c.result)
    shown = sa.case((length <= result_chars, table.c.result), else_="")
    row = sql.execute(
        sa.select(table.c.record, shown.label("result"), length.label("length")).where(
            table.c.tenant == tenant, table.c.id == call, table.c.environment == environment
        )
    ).first()
    if row is None:
        return None
    return {**json.loads(row.record), "result": row.result, "result_length": row.length}


def expire(write: Write, *, now: float, limit: int) -> int:
    """Delete at most `limit` calls whose results have expired; return how many."""
    table = tables.calls
    old = (
        sa.select(table.c.tenant, table.c.id)
        .where(table.c.expires_at < now)
        .limit(limit)
        .subquery()
    )
    delete = sa.delete(table).where(
        sa.tuple_(table.c.tenant, table.c.id).in_(sa.select(old.c.tenant, old.c.id))
    )
    rows = write.sql.execute(delete.returning(table.c.tenant, table.c.kept_bytes)).all()
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
    """Delete the oldest ended calls, dead letters included, until the tenant's calls take at most
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
        ids: list[str] = []
        for row in rows:
            if excess <= 0:
                break
            ids.append(row.id)
            excess -= row.kept_bytes
            _count(write, tenant, -row.kept_bytes)
        write.sql.execute(sa.delete(table).where(table.c.tenant == tenant, table.c.id.in_(ids)))
        dropped += len(ids)
    if dropped:
        log.info("event=results_dropped tenant=%s calls=%d limit_bytes=%d", tenant, dropped, limit)


def _deleted_tenants(sql: sa.Connection, tenants: set[str]) -> set[str]:
    table = tables.tenants
    query = sa.select(table.c.id).where(table.c.id.in_(tenants), table.c.deleted_at.is_not(None))
    return set(sql.execute(query).scalars())


class _WebhookSubscriptions:
    """Caches, per environment, whether any webhook subscribes to finished calls. Owner: one
    transaction."""

    def __init__(self, sql: sa.Connection) -> None:
        self._sql = sql
        self._known: dict[tuple[str, str], bool] = {}

    def is_subscribed(self, record: CallRecord) -> bool:
        if record.webhook:
            return True
        key = (record.tenant, record.environment)
        if key not in self._known:
            found = endpoints.listing(
                self._sql, tenant=record.tenant, environment=record.environment
            )
            self._known[key] = any(one.subscribes_to(deliveries.CALL_FINISHED) for one in found)
        return self._known[key]


def _enqueue_finished(write: Write, record: CallRecord) -> None:
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


def _conditions(wanted: CallQuery) -> Iterator[sa.ColumnElement[bool]]:
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
    # The attempts determine the outcome; the cost includes their corrections.
    real = [one for one in attempts if one.kind != ledger.ADJUSTMENT] or attempts
    first, last = real[0], real[-1]
    elapsed_ms = last.queued_ms + last.start_ms + last.exec_ms
    return CallRecord(
        id=last.call,
        tenant=last.tenant,
        environment=last.environment,
        app=last.app,
        function=last.function,
        method=last.method,
        state=_STATES.get(last.outcome, "FAILED"),
        sequence=len(real),
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
