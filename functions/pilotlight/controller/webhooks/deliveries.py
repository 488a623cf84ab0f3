"""Deliveries of events to named webhooks. Each is a row, written in the transaction of its event,
and pending until the receiver accepts it or the deliverer gives up.

So an event is neither lost nor sent before it happened. The id of a delivery is the webhook-id of
every attempt, so that a receiver can distinguish a second delivery from a second event.
`next_attempt_at` is the earliest time of the next attempt; a deliverer moves it forward before it
tries (`delivery_retry.claim`)."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.delivery_retry import AT_ONCE_OF_ONE
from pilotlight.controller.database.store import Write
from pilotlight.controller.webhooks import endpoints
from pilotlight.controller.webhooks.webhook_sender import WebhookMessage
from pilotlight.spec.record_json import canonical_json

KEPT_S = 7 * 86_400.0
"""How long a finished delivery is listed, in seconds."""
CALL_FINISHED = "call.finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One event for one webhook. Times are seconds since the epoch.

    Attributes:
        body: the event's data, JSON text.
        delivered_at: when the receiver accepted it; None: not yet, or never.
        next_attempt_at: the time of the next attempt; None: there is no further attempt.
        error: the error of the last attempt, if it failed.
    """

    id: str
    tenant: str
    environment: str
    webhook: str
    event: str
    body: str
    at: float
    delivered_at: float | None
    next_attempt_at: float | None
    attempts: int
    error: str | None

    def message(self) -> WebhookMessage:
        """Return the message to post."""
        return WebhookMessage(id=self.id, type=self.event, at=self.at, data=json.loads(self.body))


_COLUMNS = tuple(tables.deliveries.c[name] for name in Delivery.__slots__)


def enqueue(
    write: Write,
    *,
    tenant: str,
    environment: str,
    event: str,
    body: Mapping[str, Any],
    webhook: str | None = None,
    once: str = "",
) -> int:
    """Enqueue an event for every webhook of the environment that subscribes to it, and for
    `webhook` by name. Returns the number of new deliveries.

    Does nothing if there is no such webhook: the sources of events need not know the subscribers.
    The event is posted after the transaction, signed, and retried until it is accepted (at least
    once).

    Args:
        body: JSON values, without anything that the environment's administrators may not see.
        once: identifies the event, so that enqueuing it again changes nothing; "" = each call is a
        separate event.
    """
    names = {
        one.name
        for one in endpoints.listing(write.sql, tenant=tenant, environment=environment)
        if one.subscribes_to(event)
    }
    if webhook:
        names.add(webhook)
    text = canonical_json(dict(body)).decode()
    new = 0
    for name in sorted(names):
        row = {
            "id": _id(tenant, environment, name, event, once),
            "tenant": tenant,
            "environment": environment,
            "webhook": name,
        }
        insert = write.insert(tables.deliveries).values(
            **row, event=event, body=text, at=write.now, next_attempt_at=write.now, attempts=0
        )
        new += write.sql.execute(insert.on_conflict_do_nothing(index_elements=["id"])).rowcount
    if new:
        # rings the notifier after the commit, which wakes the deliverer; followers of the feed wake
        # too and find nothing new
        write.fed = True
    return new


def due(write: Write, *, limit: int) -> list[Delivery]:
    """Return due deliveries, at most AT_ONCE_OF_ONE of a tenant, the longest due first."""
    table = tables.deliveries
    query = (
        sa.select(*_COLUMNS)
        .where(table.c.next_attempt_at <= write.now)
        .order_by(table.c.next_attempt_at, table.c.id)
    )
    found = [
        (row["next_attempt_at"], row["id"], row)
        for tenant in _pending_tenants(write.sql)
        for row in write.sql.execute(
            query.where(table.c.tenant == tenant).limit(AT_ONCE_OF_ONE)
        ).mappings()
    ]
    found.sort(key=lambda one: one[:2])
    return [Delivery(**row) for *_, row in found[:limit]]


def _pending_tenants(sql: sa.Connection) -> Iterator[str]:
    """Yield the tenants with pending deliveries, with one index lookup each: the number of one
    tenant's deliveries does not slow down others."""
    table, last = tables.deliveries, ""
    following = sa.select(sa.func.min(table.c.tenant)).where(table.c.next_attempt_at.is_not(None))
    while (found := sql.execute(following.where(table.c.tenant > last)).scalar_one()) is not None:
        yield (last := str(found))


def listing(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    webhook: str | None = None,
    is_failed: bool | None = None,
    limit: int = 100,
) -> list[Delivery]:
    """Return the deliveries of an environment, newest first. `is_failed` True: only those that were
    given up; False: only the others."""
    table = tables.deliveries
    query = sa.select(*_COLUMNS).where(table.c.tenant == tenant, table.c.environment == environment)
    if webhook is not None:
        query = query.where(table.c.webhook == webhook)
    if is_failed is not None:
        failed = table.c.delivered_at.is_(None) & table.c.next_attempt_at.is_(None)
        query = query.where(failed if is_failed else sa.not_(failed))
    rows = sql.execute(query.order_by(table.c.at.desc(), table.c.id).limit(limit)).mappings()
    return [Delivery(**row) for row in rows]


def purge(write: Write, *, now: float) -> int:
    """Delete finished deliveries that were created more than KEPT_S ago; return how many."""
    table = tables.deliveries
    finished = table.c.next_attempt_at.is_(None) & (table.c.at < now - KEPT_S)
    return write.sql.execute(sa.delete(table).where(finished)).rowcount


def _id(tenant: str, environment: str, webhook: str, event: str, once: str) -> str:
    if not once:
        return f"dl-{secrets.token_hex(12)}"
    return (
        "dl-"
        + hashlib.sha256(
            f"{tenant}\0{environment}\0{webhook}\0{event}\0{once}".encode()
        ).hexdigest()[:24]
    )
