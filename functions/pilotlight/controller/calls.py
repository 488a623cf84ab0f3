"""Calls: states and results of submitted ones (as activators report them), and what the ledger knows of all others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import ledger, tables
from pilotlight.controller.store import Write
from pilotlight.errors import NotFound
from pilotlight.protocol import CallRecord, UsageRecord
from pilotlight.spec import canonical_json, to_json

_STATES = {"ok": "SUCCEEDED", "cancelled": "CANCELLED"}


def put(write: Write, records: Sequence[CallRecord]) -> None:
    """Keep the newest `sequence` of each call; an older one, or the same again, changes nothing."""
    table = tables.calls
    for record in records:
        keys = {"tenant": record.tenant, "id": record.id}
        row = {
            name: getattr(record, name) for name in ("environment", "app", "function", "state", "sequence", "submitted_at", "expires_at")
        }
        row["record"] = canonical_json(to_json(record)).decode()
        insert = write.insert(table).values(**keys, **row)
        newer = insert.excluded.sequence > table.c.sequence
        write.sql.execute(insert.on_conflict_do_update(index_elements=["tenant", "id"], set_=row, where=newer))


def get(sql: sa.Connection, *, tenant: str, call: str) -> dict[str, Any]:
    """A call as CallRecord (JSON) with its `attempts` (usage records). Raises NotFound."""
    table = tables.calls
    text = sql.execute(sa.select(table.c.record).where(table.c.tenant == tenant, table.c.id == call)).scalar()
    attempts = ledger.attempts(sql, tenant=tenant, call=call)
    if text is None and not attempts:
        raise NotFound(f"there is no call {call}, or its record is older than its result's time to live")
    record = json.loads(text) if text is not None else to_json(_synchronous(attempts))
    return {**record, "attempts": to_json(attempts)}


def expire(write: Write, *, now: float, limit: int) -> int:
    """Drop at most `limit` calls whose result may go; returns how many went."""
    table = tables.calls
    old = sa.select(table.c.tenant, table.c.id).where(table.c.expires_at < now).limit(limit).subquery()
    gone = sa.delete(table).where(sa.tuple_(table.c.tenant, table.c.id).in_(sa.select(old.c.tenant, old.c.id)))
    return len(write.sql.execute(gone.returning(table.c.id)).all())


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
