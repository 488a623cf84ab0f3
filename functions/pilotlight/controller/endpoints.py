"""Named webhooks: where an environment's events are told, which of them, and the sealed secret that
messages are signed with.

A call names one in `Pilotlight-Webhook`; every other event goes to each that asks for it. Events
are `call.finished`, `rollout.*`, `slo.*` and `experiment.*`; a pattern is one of them whole, all of
a kind (`slo.*`), or `*`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import alerts, audit, tables
from pilotlight.controller.store import Write
from pilotlight.controller.tenants import demand_environment
from pilotlight.controller.webhooks import host_of
from pilotlight.errors import InvalidInput, NotFound, TooManyRequests
from pilotlight.seal import PlatformKey
from pilotlight.types import check_name

KINDS = ("call", "rollout", "slo", "experiment")
"""First words of events."""
MAX_WEBHOOKS = 100
"""Of one environment, of which a tenant has at most `tenants.MAX_ENVIRONMENTS`: each event is a row
for every webhook that wants it."""
MAX_PATTERNS = 32
_PATTERN = re.compile(rf"\*|(?:{'|'.join(KINDS)})\.(?:\*|[a-z_]+(?:\.[a-z_]+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A named webhook. `events` are patterns; none = only the calls that name it."""

    tenant: str
    environment: str
    name: str
    url: str
    sealed_secret: str
    events: tuple[str, ...]
    created_by: str
    created_at: float

    def wants(self, event: str) -> bool:
        """Whether one of its patterns is this event's."""
        return any(
            pattern in ("*", event) or (pattern.endswith(".*") and event.startswith(pattern[:-1]))
            for pattern in self.events
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A webhook that was set; `secret` is shown this once, None = as it was."""

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
) -> Placed:
    """Make or change a webhook; its secret stays unless a new one is asked for. Raises
    InvalidInput, NotFound, TooManyRequests."""
    _named(name)
    patterns = check_events(events)
    demand_environment(write.sql, tenant=tenant, name=environment)
    known = find(write.sql, tenant=tenant, environment=environment, name=name)
    if (
        known is None
        and len(listing(write.sql, tenant=tenant, environment=environment)) >= MAX_WEBHOOKS
    ):
        raise TooManyRequests(
            f"environment {environment!r} has {MAX_WEBHOOKS} webhooks, the bound: delete one first"
        )
    secret = alerts.new_secret() if known is None or new_secret else None
    row = {"url": url, "events": json.dumps(patterns)}
    if secret is not None:
        row["sealed_secret"] = key.webhooks.seal(secret)
    place = {"tenant": tenant, "environment": environment, "name": name}
    if known is None:
        write.sql.execute(
            sa.insert(tables.webhooks).values(
                **place, **row, created_by=actor, created_at=write.now
            )
        )
    else:
        write.sql.execute(sa.update(tables.webhooks).where(*_is(**place)).values(**row))
    before = _shown(known) if known is not None else None
    after = {
        "environment": environment,
        "url": host_of(url),
        "events": list(patterns),
        "new_secret": secret is not None,
    }
    audit.record(
        write,
        tenant=tenant,
        actor=actor,
        action="webhook.set",
        subject=name,
        before=before,
        after=after,
        request=request,
    )
    return Placed(webhook=get(write.sql, **place), secret=secret)


def delete(
    write: Write, *, tenant: str, environment: str, name: str, actor: str, request: str = ""
) -> None:
    """Remove a webhook; what still waits for it is given up when its turn comes. Raises
    NotFound."""
    before = _shown(get(write.sql, tenant=tenant, environment=environment, name=name))
    write.sql.execute(
        sa.delete(tables.webhooks).where(*_is(tenant=tenant, environment=environment, name=name))
    )
    audit.record(
        write,
        tenant=tenant,
        actor=actor,
        action="webhook.delete",
        subject=name,
        before=before,
        request=request,
    )


def find(sql: sa.Connection, *, tenant: str, environment: str, name: str) -> Webhook | None:
    """A webhook, or None."""
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
    """A webhook. Raises NotFound."""
    found = find(sql, tenant=tenant, environment=environment, name=name)
    if found is None:
        raise NotFound(f"there is no webhook {name!r} in environment {environment!r}", webhook=name)
    return found


def listing(sql: sa.Connection, *, tenant: str, environment: str) -> list[Webhook]:
    """The webhooks of an environment, by name."""
    table = tables.webhooks
    query = (
        sa.select(table)
        .where(table.c.tenant == tenant, table.c.environment == environment)
        .order_by(table.c.name)
    )
    return [_webhook(row) for row in sql.execute(query).mappings()]


def check_events(events: Sequence[str]) -> tuple[str, ...]:
    """Patterns of events, each once. Raises InvalidInput."""
    patterns = tuple(dict.fromkeys(events))
    if len(patterns) > MAX_PATTERNS:
        raise InvalidInput(
            f"events: {len(patterns)} of them, at most {MAX_PATTERNS}", parameter="events"
        )
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            known = ", ".join(f"{kind}.*" for kind in KINDS)
            raise InvalidInput(
                f"events: {pattern!r} is none: write '*', {known}, or one event such as "
                f"'call.finished'",
                parameter="events",
            )
    return patterns


def _named(name: str) -> None:
    try:
        check_name("webhook", name)
    except ValueError as e:
        raise InvalidInput(str(e), parameter="name") from e


def _is(*, tenant: str, environment: str, name: str) -> tuple[sa.ColumnElement[bool], ...]:
    table = tables.webhooks
    return (table.c.tenant == tenant, table.c.environment == environment, table.c.name == name)


def _webhook(row: sa.RowMapping) -> Webhook:
    return Webhook(**{**row, "events": tuple(json.loads(row["events"]))})


def _shown(webhook: Webhook) -> dict[str, Any]:
    return {
        "environment": webhook.environment,
        "url": host_of(webhook.url),
        "events": list(webhook.events),
    }
