"""Due calls: submitted calls that the control plane starts, until exactly one activator has them in
its journal.

An activator claims a call (`claim`), writes it to its journal, and *takes* it (`acknowledge`)
before it runs. If it does not take the call within CLAIM_S, the next activator that asks may claim
it. Once taken, the call stays with its activator, however often that one repeats the request. So
wherever a process is killed, one activator runs the call: an activator that has the call in its
journal but has not taken it repeats the request, and learns if the call belongs to another.

Rows of taken calls are kept for a while to answer such requests.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.scheduling import batch_lines, submitted_calls
from pilotlight.controller.scheduling.submitted_calls import CallQuery
from pilotlight.protocol import BATCH_LABEL, CONTENT_JSON, CallRecord
from pilotlight.spec.record_json import canonical_json

CLAIM_S = 30.0
"""Long enough for a journal's group commit and one request; a restarted process requests its own
calls at once."""
MAX_HANDED_OUT = 100
PAGE_BYTES = 8 * 1024 * 1024
"""A response ends early at this size, because dead letters may have bodies of megabytes. A single
call may be larger."""
SCHEDULER = "scheduler"
"""The key id of due calls that no key makes, but the function's own tenant."""
KEPT_S = 8 * 86_400.0
"""Longer than any call waits in a journal (the clocks of a function are bounded by 7 days)."""


def payload(
    record: CallRecord,
    *,
    body: bytes,
    content_type: str = CONTENT_JSON,
    accept: str = CONTENT_JSON,
    key: str = SCHEDULER,
    customer: str = "",
) -> dict[str, Any]:
    """Return a call's journal document: its record, owner, key, customer and body.

    `key`: id of the key that makes the call: the activator applies its rights and quotas when it
    runs the call."""
    encoded = base64.b64encode(body).decode()
    caller = {"record": record.to_json(), "owner": record.tenant, "key": key}
    named = {"customer": customer} if customer else {}
    return {**caller, **named, "content_type": content_type, "accept": accept, "body": encoded}


def enqueue_call(
    write: Write, document: Mapping[str, Any], *, due_at: float, name: str = ""
) -> int:
    """Make a call available to the next activator that claims one. Returns 0 if it was added
    before.

    `name`: identifies the call, to detect repeats; "" = its id and sequence.
    """
    record = CallRecord.from_json(document["record"])
    name = name or f"{record.id}/{record.sequence}"
    row = {
        "id": name,
        "tenant": record.tenant,
        "document": canonical_json({**document, "due": name}).decode(),
        "due_at": due_at,
    }
    insert = (
        write.insert(tables.due_calls).values(**row).on_conflict_do_nothing(index_elements=["id"])
    )
    if not write.sql.execute(insert).rowcount:
        return 0
    submitted_calls.put(write, [record])
    # rings the notifier after the commit, which wakes activators that wait for due calls
    write.fed = True
    return 1


def claim(
    write: Write, *, activator: str, limit: int = MAX_HANDED_OUT, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the documents that this activator must write to its journal, per tenant the longest
    due first. They include those that it claimed before and did not take.

    Tenants take turns, so that many or large calls of one do not delay those of others. `without`:
    tenants whose calls the activator has no room for now."""
    table = tables.due_calls
    turn = (
        sa.func.row_number()
        .over(partition_by=table.c.tenant, order_by=(table.c.due_at, table.c.id))
        .label("turn")
    )
    turns = (
        sa.select(table.c.id, table.c.due_at, turn)
        .where(*_is_free(activator, write.now, without=without))
        .subquery()
    )
    names = (
        write.sql.execute(
            sa.select(turns.c.id).order_by(turns.c.turn, turns.c.due_at, turns.c.id).limit(limit)
        )
        .scalars()
        .all()
    )
    documents: list[str] = []
    for name in names:
        if sum(map(len, documents)) >= PAGE_BYTES:
            break
        documents.append(
            write.sql.execute(sa.select(table.c.document).where(table.c.id == name)).scalar_one()
        )
        if len(documents) > 1 and sum(map(len, documents)) > PAGE_BYTES:
            documents.pop()
            break
    mine = table.c.id.in_(names[: len(documents)])
    if documents:
        write.sql.execute(
            sa.update(table)
            .where(mine)
            .values(claimed_by=activator, claimed_until=write.now + CLAIM_S)
        )
    return [json.loads(document) for document in documents]


def has_claimable(
    sql: sa.Connection, *, activator: str, now: float, without: Collection[str] = ()
) -> bool:
    """Whether `claim` would find a call. Takes no lock."""
    table = tables.due_calls
    return (
        sql.execute(
            sa.select(table.c.id).where(*_is_free(activator, now, without=without)).limit(1)
        ).first()
        is not None
    )


def waiting(sql: sa.Connection, *, tenant: str) -> int:
    """Return the number of a tenant's due calls that no activator has taken."""
    table = tables.due_calls
    is_untaken = table.c.claimed_by.is_(None) | table.c.claimed_until.is_not(None)
    query = sa.select(sa.func.count()).select_from(table)
    return int(sql.execute(query.where(is_untaken, table.c.tenant == tenant)).scalar_one())


def acknowledge(write: Write, *, activator: str, ids: Collection[str]) -> list[str]:
    """Record that these calls are in this activator's journal. Returns those that it must run, and
    deletes their documents here."""
    table = tables.due_calls
    query = sa.select(table.c.id, table.c.claimed_by).where(table.c.id.in_(list(ids)))
    known = {row.id: row.claimed_by for row in write.sql.execute(query)}
    mine = [
        one
        for one in ids
        if known.get(one) == activator or (one not in known and _is_open(write.sql, one))
    ]
    write.sql.execute(
        sa.update(table).where(table.c.id.in_(mine)).values(claimed_until=None, document="{}")
    )
    return mine


def purge(write: Write, *, now: float) -> int:
    """Delete the rows of calls that were taken long ago; return how many."""
    table = tables.due_calls
    taken = (
        table.c.claimed_by.is_not(None)
        & table.c.claimed_until.is_(None)
        & (table.c.due_at < now - KEPT_S)
    )
    return write.sql.execute(sa.delete(table).where(taken)).rowcount


def cancel(write: Write, calls: Collection[str]) -> list[str]:
    """Cancel calls: delete those that no activator has taken, and have the activators of the others
    cancel them (`cancelled`). Returns those that no activator has."""
    table = tables.due_calls
    free: list[str] = []
    for call in calls:
        rows = _of_call(table, call)
        is_taken = table.c.claimed_by.is_not(None) & table.c.claimed_until.is_(None)
        write.sql.execute(sa.delete(table).where(rows, ~is_taken))
        if not write.sql.execute(sa.update(table).where(rows).values(cancel_at=0.0)).rowcount:
            free.append(call)
    write.fed = write.fed or bool(calls)
    return free


def has_cancelled(sql: sa.Connection, *, activator: str, now: float) -> bool:
    """Whether `cancelled` would find a call. Takes no lock."""
    query = sa.select(tables.due_calls.c.id).where(*_is_cancelled(activator, now)).limit(1)
    return sql.execute(query).first() is not None


def cancelled(write: Write, *, activator: str) -> list[str]:
    """Return the calls that this activator has and must cancel; again after CLAIM_S, until their
    rows are deleted."""
    table = tables.due_calls
    mine = sa.select(table.c.id).where(*_is_cancelled(activator, write.now)).limit(MAX_HANDED_OUT)
    names = write.sql.execute(mine).scalars().all()
    write.sql.execute(
        sa.update(table).where(table.c.id.in_(names)).values(cancel_at=write.now + CLAIM_S)
    )
    return [name.partition("/")[0] for name in names]


def forget(write: Write, calls: Collection[str]) -> None:
    """Delete the rows of calls that have ended."""
    for call in calls:
        write.sql.execute(sa.delete(tables.due_calls).where(_of_call(tables.due_calls, call)))


def _of_call(table: sa.Table, call: str) -> sa.ColumnElement[bool]:
    """Condition: a row of this call; its id begins with that of the call and a slash."""
    return (table.c.id >= f"{call}/") & (table.c.id < f"{call}0")


def _is_cancelled(activator: str, now: float) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions of `cancelled`. The first must equal that of the index `ix_due_calls_cancel`."""
    c = tables.due_calls.c
    return (
        c.cancel_at.is_not(None),
        c.cancel_at <= now,
        c.claimed_by == activator,
        c.claimed_until.is_(None),
    )


def redrive(write: Write, wanted: CallQuery, *, limit: int) -> tuple[list[str], bool]:
    """Resubmit dead letters, oldest first, with their attempt numbers continuing. Returns their
    ids, and whether others may remain.

    At most `limit`, and fewer if they are large, because this holds the write lock.
    """
    sent: list[str] = []
    size_bytes = 0
    for record, document in submitted_calls.dead_letters(write.sql, wanted, limit=limit):
        resubmitted = {**document, "record": _requeued(record, now=write.now).to_json()}
        enqueue_call(write, resubmitted, due_at=write.now)
        sent.append(record.id)
        size_bytes += len(document.get("body", ""))
        if size_bytes >= PAGE_BYTES:
            return sent, True
    return sent, len(sent) == limit


def take_over(write: Write, document: Mapping[str, Any], *, activator: str) -> int:
    """Requeue, once, an unfinished call of an activator that is gone for good. Returns 0 if there
    is no need."""
    record = CallRecord.from_json(document["record"])
    if BATCH_LABEL in record.labels and not batch_lines.is_open(write.sql, record.id):
        return 0
    state, sequence = submitted_calls.known_state(
        write.sql, tenant=record.tenant, call=record.id
    ) or ("QUEUED", 0)
    if state in submitted_calls.FINAL:
        return 0
    fresh = _requeued(replace(record, sequence=max(record.sequence, sequence)), now=write.now)
    with_arm = replace(
        fresh,
        revision=record.revision,
        arm=record.arm,
        unit=record.unit,
        experiment=record.experiment,
    )
    name = f"{record.id}/{activator}/{record.sequence}"
    return enqueue_call(
        write, {**document, "record": with_arm.to_json()}, due_at=write.now, name=name
    )


def _requeued(record: CallRecord, *, now: float) -> CallRecord:
    """Return a call's record as that of a queued call, with the next sequence."""
    fresh = CallRecord(
        id=record.id,
        tenant=record.tenant,
        environment=record.environment,
        app=record.app,
        function=record.function,
        method=record.method,
        state="QUEUED",
        sequence=record.sequence + 1,
        submitted_at=record.submitted_at,
        expires_at=max(record.expires_at, now + KEPT_S),
        labels=record.labels,
    )
    return replace(fresh, attempt=record.attempt, schedule=record.schedule, webhook=record.webhook)


def _is_free(
    activator: str, now: float, *, without: Collection[str] = ()
) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions: not taken, and not claimed by another activator. The first must equal the
    condition of the partial index `ix_due_calls_free`."""
    table = tables.due_calls
    is_untaken = table.c.claimed_by.is_(None) | table.c.claimed_until.is_not(None)
    free = (
        table.c.claimed_by.is_(None)
        | (table.c.claimed_by == activator)
        | (table.c.claimed_until < now)
    )
    conditions = (is_untaken, free)
    return (*conditions, table.c.tenant.not_in(list(without))) if without else conditions


def _is_open(sql: sa.Connection, name: str) -> bool:
    """Whether a call whose row was deleted has not ended: then it was taken by an activator that
    still has it."""
    table = tables.calls
    state = sql.execute(
        sa.select(table.c.state).where(table.c.id == name.partition("/")[0])
    ).scalar_one_or_none()
    if state is None:
        return batch_lines.is_open(sql, name.partition("/")[0])
    return state not in submitted_calls.FINAL
