"""What a tenant was promised: its plan with its overrides, and the price list that follows from it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.pricing import PriceSettings, Rates
from pilotlight.quotas import UNLIMITED, Plan


def plan_of(sql: sa.Connection, *, tenant: str, plans: Mapping[str, Plan]) -> Plan:
    """A tenant's plan; without bounds where platform.yaml does not know it any more."""
    table = tables.tenants
    row = sql.execute(sa.select(table.c.plan, table.c.overrides).where(table.c.id == tenant)).one()
    return plan_from(row.plan, row.overrides, plans)


def plan_from(name: str, overrides: str, plans: Mapping[str, Plan]) -> Plan:
    """The plan of that name with overrides (JSON)."""
    return plans.get(name, UNLIMITED).with_overrides(json.loads(overrides))


def rates_of(plan: Plan, prices: PriceSettings) -> Rates:
    """The list that a plan's calls are priced by; the platform's own where it names none."""
    lists = prices.lists()
    return lists[plan.prices if plan.prices in lists else prices.version]
