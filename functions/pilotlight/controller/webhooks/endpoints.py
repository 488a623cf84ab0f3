"""Named webhooks: the URL that receives an environment's events, the patterns of events that it
subscribes to, and the sealed secret that signs the messages.

A call names a webhook in `Pilotlight-Webhook`; every other event goes to each webhook that
subscribes to it. Events are `call.finished`, `rollout.*`, `slo.*`, `experiment.*` and `drift.*`; a
pattern is a single event, all of a kind (`slo.*`), or `*`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing import budget_alerts
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.tenants import require_environment
from pilotlight.controller.webhooks.webhook_sender import host_of
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import InvalidInput, NotFound, TooManyRequests
from pilotlight.spec.identifiers import require_name

KINDS = ("call", "rollout", "slo", "experiment", "drift")
"""The first component of event names."""
MAX_WEBHOOKS = 100
"""Webhooks per environment, of which a tenant has at most `tenants.MAX_ENVIRONMENTS`: each event is
a row for every webhook that subscribes to it."""
MAX_PATTERNS = 32
_PATTERN = re.compile(rf"\*|(?:{'|'.join(KINDS)})\.(?:\*|[a-z_]+(?:\.[a-z_]+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A named webhook. `events` are patterns; if empty, it receives only the calls that name it."""

    tenant: str
    environment: str
    name: str
    url: str
    sealed_secret: str
    events: tuple[str, ...]
    created_by: str
    created_at: float

    def subscribes_to(self, event: str) -> bool:
        """Whether one of the patterns matches the event."""
        return any(
            pattern in ("*", event) or (pattern.endswith(".*") and event.startswith(pattern[:-1]))
            for pattern in self.events
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSetResult:
    """The result of `put`; `secret` is shown only here, None = unchanged."""

    webhook: Webhook
    secret: str | None


def put(
    write: Write,
    *,
    key: PlatformKey,
    tenant: str,
    environment: str,
    name: str,
    url: str,
    events: Sequence[str],
    actor: str,
    new_secret: bool = False,
    request: str = "",
) -> WebhookSetResult:
    """Create or update a webhook; its secret is kept unless `new_secret`. Raises InvalidInput,
    NotFound, TooManyRequests."""
    require_name("webhook", name, parameter="name")
    patterns = check_events(events)
    require_environment(write.sql, tenant=tenant, name=environment)
    known = find(write.sql, tenant=tenant, environment=environment, name=name)
    if (
        known is None
        and len(listing(write.sql, tenant=tenant, environment=environment)) >= MAX_WEBHOOKS
    ):
        raise TooManyRequests(
            f"environment {environment!r} has {MAX_WEBHOOKS} webhooks, the maximum: delete one "
            f"first"
        )
    secret = budget_alerts.new_signing_secret() if known is None or new_secret else None
    row = {"url": url, "events": json.dumps(patterns)}
    if secret is not None:
        row["sealed_secret"] = key.webhooks.seal(secret)
    key_columns = {"tenant": tenant, "environment": environment, "name": name}
    if known is None:
        write.sql.execute(
            sa.insert(tables.webhooks).values(
                **key_columns, **row, created_by=actor, created_at=write.now
            )
        )
    else:
        write.sql.execute(sa.update(tables.webhooks).where(*_is(**key_columns)).values(**row))
    before = _audit_entry(known) if known is not None else None
    after = {
        "environment": environment,
        "url": host_of(url),
        "events": list(patterns),
        "new_secret": secret is not None,
    }
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="webhook.set",
        subject=name,
        before=before,
        after=after,
        request=request,
    )
    return WebhookSetResult(webhook=get(write.sql, **key_columns), secret=secret)


def delete(
    write: Write, *, tenant: str, environment: str, name: str, actor: str, request: str = ""
) -> None:
    """Delete a webhook. Its pending deliveries are given up when they become due. Raises
    NotFound."""
    before = _audit_entry(get(write.sql, tenant=tenant, environment=environment, name=name))
    write.sql.execute(
        sa.delete(tables.webhooks).where(*_is(tenant=tenant, environment=environment, name=name))
    )
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="webhook.delete",
        subject=name,
        before=before,
        request=request,
    )


def find(sql: sa.Connection, *, tenant: str, environment: str, name: str) -> Webhook | None:
    """Return a webhook, or None."""
    row = (
        sql.execute(
            sa.select(tables.webhooks).where(
                *_is(tenant=tenant, environment=environment, name=name)
            )
        )
        .mappings()
        .first()
    )
    return None if row is None else _webhook(row)


def get(sql: sa.Connection, *, tenant: str, environment: str, name: str) -> Webhook:
    """Return a webhook. Raises NotFound."""
    found = find(sql, tenant=tenant, environment=environment, name=name)
    if found is None:
        raise NotFound(f"there is no webhook {name!r} in environment {environment!r}", webhook=name)
    return found


def listing(sql: sa.Connection, *, tenant: str, environment: str) -> list[Webhook]:
    """Return the webhooks of an environment, by name."""
    table = tables.webhooks
    query = (
        sa.select(table)
        .where(table.c.tenant == tenant, table.c.environment == environment)
        .order_by(table.c.name)
    )
    return [_webhook(row) for row in sql.execute(query).mappings()]


def check_events(events: Sequence[str]) -> tuple[str, ...]:
    """Validate event patterns and return them without duplicates. Raises InvalidInput."""
    patterns = tuple(dict.fromkeys(events))
    if len(patterns) > MAX_PATTERNS:
        raise InvalidInput(
            f"events has {len(patterns)} patterns; the maximum is {MAX_PATTERNS}",
            parameter="events",
        )
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            known = ", ".join(f"{kind}.*" for kind in KINDS)
            raise InvalidInput(
                f"events: {pattern!r} is not a pattern: use '*', {known}, or one event such as "
                f"'call.finished'",
                parameter="events",
            )
    return patterns


def _is(*, tenant: str, environment: str, name: str) -> tuple[sa.ColumnElement[bool], ...]:
    table = tables.webhooks
    return (table.c.tenant == tenant, table.c.environment == environment, table.c.name == name)


def _webhook(row: sa.RowMapping) -> Webhook:
    return Webhook(**{**row, "events": tuple(json.loads(row["events"]))})


def _audit_entry(webhook: Webhook) -> dict[str, Any]:
    return {
        "environment": webhook.environment,
        "url": host_of(webhook.url),
        "events": list(webhook.events),
    }
