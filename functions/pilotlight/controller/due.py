"""Due calls: submitted calls that the control plane began, until exactly one activator has them in
its journal.

A call is handed out on a claim (`claim`), written into that activator's journal, and *taken*
(`take`) before it runs. Who does not take in CLAIM_S loses the claim to whoever asks next; who was
taken as its keeper stays that, however often it asks again. So wherever a process is killed, a call
is run by one activator: one that has it in its journal but did not take it asks again, and is told
that it is another's.

Rows that were taken stay for a while: they are the answer to that question.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import calls, tables
from pilotlight.controller.calls import Wanted
from pilotlight.controller.store import Write
from pilotlight.protocol import CONTENT_JSON, CallRecord
from pilotlight.spec import canonical_json

CLAIM_S = 30.0
"""Long enough for a journal's group commit and one request; a process that starts again asks for
its own at once."""
MAX_HANDED_OUT = 100
PAGE_BYTES = 8 * 1024 * 1024
"""An answer ends early at this size: dead letters have bodies of megabytes. One call alone may be
larger."""
SCHEDULER = "scheduler"
"""Stands for the key that a due call is made with: the function's own tenant calls."""
KEPT_S = 8 * 86_400.0
"""Longer than any call waits in a journal (the clocks of a function are bounded by 7 days)."""


def payload(
    record: CallRecord, *, body: bytes, content_type: str = CONTENT_JSON, accept: str = CONTENT_JSON
) -> dict[str, Any]:
    """A call as journals hold it: what its function gets, in whose name."""
    encoded = base64.b64encode(body).decode()
    who = {"record": record.to_json(), "owner": record.tenant, "key": SCHEDULER}
    return {**who, "content_type": content_type, "accept": accept, "body": encoded}


def add(write: Write, held: Mapping[str, Any], *, due_at: float, name: str = "") -> int:
    """Hand a call out to whichever activator asks next, once; returns 0 if it was made before. It
    can be asked for at once, too.

    `name`: by which it is known whether it was; "" = its id and sequence.
    """
    record = CallRecord.from_json(held["record"])
    name = name or f"{record.id}/{record.sequence}"
    row = {
        "id": name,
        "tenant": record.tenant,
        "document": canonical_json({**held, "due": name}).decode(),
        "due_at": due_at,
    }
    insert = (
        write.insert(tables.due_calls).values(**row).on_conflict_do_nothing(index_elements=["id"])
    )
    if not write.sql.execute(insert).rowcount:
        return 0
    calls.put(write, [record])
    # rings the bell after the commit: activators that ask for due calls wait for it
    write.fed = True
    return 1


def claim(
    write: Write, *, activator: str, limit: int = MAX_HANDED_OUT, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """What this activator shall write down, of each tenant the longest due first: also what it was
    given before and did not take.

    Tenants have turns, so that many or large calls of one do not keep others' back. `without`:
    tenants that it has no room for now."""
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


def has_any(
    sql: sa.Connection, *, activator: str, now: float, without: Collection[str] = ()
) -> bool:
    """Whether `claim` would find something: a look that takes no lock."""
    table = tables.due_calls
    return (
        sql.execute(
            sa.select(table.c.id).where(*_is_free(activator, now, without=without)).limit(1)
        ).first()
        is not None
    )


def take(write: Write, *, activator: str, ids: Collection[str]) -> list[str]:
    """Note that they are in this activator's journal; returns which of them are its own to run.
    What they are is forgotten here."""
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
    """Forget what was taken long ago; returns how many."""
    table = tables.due_calls
    taken = (
        table.c.claimed_by.is_not(None)
        & table.c.claimed_until.is_(None)
        & (table.c.due_at < now - KEPT_S)
    )
    return write.sql.execute(sa.delete(table).where(taken)).rowcount


def redrive(write: Write, wanted: Wanted, *, limit: int) -> tuple[list[str], bool]:
    """Send dead letters again, the oldest first, with their attempts counting on; returns their
    ids, and whether others may be left.

    At most `limit`, and fewer where they are large: nobody else writes meanwhile.
    """
    sent: list[str] = []
    size_bytes = 0
    for record, held in calls.dead(write.sql, wanted, limit=limit):
        add(write, {**held, "record": _again(record, now=write.now).to_json()}, due_at=write.now)
        sent.append(record.id)
        size_bytes += len(held.get("body", ""))
        if size_bytes >= PAGE_BYTES:
            return sent, True
    return sent, len(sent) == limit


def inherit(write: Write, held: Mapping[str, Any], *, activator: str) -> int:
    """A call that an activator had, and did not finish before it went for good: handed out again,
    once. Returns 0 if there is no need."""
    record = CallRecord.from_json(held["record"])
    state, sequence = calls.known(write.sql, tenant=record.tenant, call=record.id) or ("QUEUED", 0)
    if state in calls.FINAL:
        return 0
    fresh = _again(replace(record, sequence=max(record.sequence, sequence)), now=write.now)
    arm = replace(
        fresh,
        revision=record.revision,
        arm=record.arm,
        unit=record.unit,
        experiment=record.experiment,
    )
    name = f"{record.id}/{activator}/{record.sequence}"
    return add(write, {**held, "record": arm.to_json()}, due_at=write.now, name=name)


def _again(record: CallRecord, *, now: float) -> CallRecord:
    """A dead letter's record as that of a call that waits again."""
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
    """Not taken, and nobody else's claim. The first of both is word for word what
    `ix_due_calls_free` is of."""
    table = tables.due_calls
    waits = table.c.claimed_by.is_(None) | table.c.claimed_until.is_not(None)
    free = (
        table.c.claimed_by.is_(None)
        | (table.c.claimed_by == activator)
        | (table.c.claimed_until < now)
    )
    return (waits, free, table.c.tenant.not_in(list(without))) if without else (waits, free)


def _is_open(sql: sa.Connection, name: str) -> bool:
    """Whether a call whose row is gone has not ended: then it was taken, by whoever still has
    it."""
    table = tables.calls
    state = sql.execute(
        sa.select(table.c.state).where(table.c.id == name.partition("/")[0])
    ).scalar_one_or_none()
    return state is not None and state not in calls.FINAL
