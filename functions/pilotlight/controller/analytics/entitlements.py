"""A tenant's entitlements: its plan with overrides, and the resulting price list."""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.spec.pricing import PriceSettings, Rates
from pilotlight.spec.quotas import UNLIMITED, Plan

MAX_KEYS = 200
"""Keys with their own quotas that a page shows at most."""


def plan_of(sql: sa.Connection, *, tenant: str, plans: Mapping[str, Plan]) -> Plan:
    """Return a tenant's plan; an unlimited one if platform.yaml no longer defines it."""
    table = tables.tenants
    row = sql.execute(sa.select(table.c.plan, table.c.overrides).where(table.c.id == tenant)).one()
    return plan_from(row.plan, row.overrides, plans)


def plan_from(name: str, overrides: str, plans: Mapping[str, Plan]) -> Plan:
    """Return the named plan with overrides (JSON)."""
    return plans.get(name, UNLIMITED).with_overrides(json.loads(overrides))


def own_quotas(
    sql: sa.Connection, *, tenant: str, environment: str
) -> list[tuple[str, dict[str, float]]]:
    """Return (owner, bounds) of the quotas that a tenant set for functions of an environment, and
    for keys that may access it."""
    table, keys = tables.function_quotas, tables.api_keys
    functions = sa.select(table.c.app, table.c.function, table.c.quotas).where(
        table.c.tenant == tenant, table.c.environment == environment
    )
    found = [
        (f"{row.app}/{row.function}", json.loads(row.quotas))
        for row in sql.execute(functions.order_by(table.c.app, table.c.function))
    ]
    in_scope = keys.c.environment.is_(None) | (keys.c.environment == environment)
    where = (keys.c.tenant == tenant, in_scope, keys.c.revoked_at.is_(None), keys.c.quotas != "{}")
    named = (
        sa.select(keys.c.id, keys.c.name, keys.c.quotas)
        .where(*where)
        .order_by(keys.c.created_at)
        .limit(MAX_KEYS)
    )
    return found + [
        (f"key {row.name or row.id}", json.loads(row.quotas)) for row in sql.execute(named)
    ]


def rates_of(plan: Plan, prices: PriceSettings) -> Rates:
    """Return the price list of a plan; the platform's own if the plan names none."""
    lists = prices.lists()
    return lists[plan.prices if plan.prices in lists else prices.version]
