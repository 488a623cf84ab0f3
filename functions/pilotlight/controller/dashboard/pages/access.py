"""The page of keys and secrets: names, owners and times; never a key's text or a secret's value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from fastapi.responses import Response

from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.pages.functions.apps import key_names
from pilotlight.controller.database import tables
from pilotlight.controller.identity import api_keys
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry import secret_store
from pilotlight.spec.identifiers import Scope

MAX_ROWS = 200
RECENT = 10_000
"""Newest calls, and newest changes, among which a key's last use is looked for: no use is written
down per key."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AccessData:
    """`keys`: None for a key that may not list them. `used`: by key id, its last use among RECENT
    records."""

    keys: list[dict[str, Any]] | None
    secrets: list[dict[str, Any]]
    used: Mapping[str, float]
    people: Mapping[str, str]


@router.get("/dashboard/access")
async def page(visit: Visitor) -> Response:
    """Render the tenant's keys, as far as this key covers them, and the environment's secrets."""
    visit.require_deploy("keys and secrets require")
    found = await visit.read(lambda sql: _load(sql, visit))
    return render("access.html", visit=visit, found=found, max_rows=MAX_ROWS, recent=RECENT)


def _load(sql: sa.Connection, visit: PageContext) -> _AccessData:
    tenant, caller = visit.caller.tenant, visit.caller
    secrets = secret_store.listing(sql, tenant=tenant, environment=visit.environment)
    if not caller.scope.reaches(Scope.ADMIN):
        return _AccessData(keys=None, secrets=secrets[:MAX_ROWS], used={}, people={})
    keys = [
        key
        for key in api_keys.listing(sql, tenant=tenant)
        if caller.covers(environment=key["environment"], app=key["app"], function=key["function"])
    ]
    keys.sort(key=lambda key: not _is_active(key, visit.now))
    shown = keys[:MAX_ROWS]
    return _AccessData(
        keys=[{**key, "is_active": _is_active(key, visit.now)} for key in shown],
        secrets=secrets[:MAX_ROWS],
        used=_last_used(sql, tenant),
        people=key_names(sql, visit, (key["created_by"] for key in shown)),
    )


def _is_active(key: Mapping[str, Any], now: float) -> bool:
    return key["revoked_at"] is None and (key["expires_at"] is None or key["expires_at"] > now)


def _last_used(sql: sa.Connection, tenant: str) -> dict[str, float]:
    """Return when each key was last used, among the newest RECENT calls and changes."""
    used: dict[str, float] = {}
    calls, changes = tables.usage.c, tables.audit.c
    for table, key, at, order in (
        (tables.usage, calls.key, calls.started_at, calls.started_at),
        (tables.audit, changes.actor, changes.at, changes.id),
    ):
        newest = sa.select(key.label("key"), at.label("at")).where(table.c.tenant == tenant)
        recent = newest.order_by(order.desc()).limit(RECENT).subquery()
        query = sa.select(recent.c.key, sa.func.max(recent.c.at)).group_by(recent.c.key)
        for name, moment in sql.execute(query):
            used[name] = max(moment, used.get(name, 0.0))
    return used
