"""Budgets as they are stored: limits on the spending of a tenant, environment, app, function or
customer per day or month.

A budget covers the records of its scope, in its currency, by the day on which they began (UTC); ""
as environment, app, function or customer covers all of them. A scope has at most one budget per
period and currency; use alerts for a soft limit below a hard one."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing.budget_definition import BudgetDefinition
from pilotlight.controller.billing.budget_periods import Period, day_of, period_of
from pilotlight.controller.billing.spend import SpendScope
from pilotlight.controller.billing.usage_aggregation import SpendKey
from pilotlight.controller.database import bulk, tables
from pilotlight.errors import NotFound
from pilotlight.protocol import BudgetRecord

MAX_BUDGETS = 1000
"""Budgets per tenant, without those that were derived: every usage batch checks all of them."""
_LIMITED = "SELECT DISTINCT tenant FROM budgets WHERE tenant {in}"


_RECORD = ("environment", "app", "function", "period", "amount", "currency", "hard", "customer")


REACH = ("environment", "app", "function", "period", "currency", "customer")


_C = tables.budgets.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A stored budget. `sealed_secret` is its webhook's signing secret, sealed with the platform's
    key; `parent` is the budget for ANY_CUSTOMER from which it was derived, None for others."""

    id: str
    tenant: str
    terms: BudgetDefinition
    sealed_secret: str | None
    created_at: float
    updated_at: float
    parent: str | None = None

    @property
    def reach(self) -> SpendScope:
        """The scope that the budget covers."""
        terms = self.terms
        inside = (terms.environment, terms.app, terms.function)
        return (self.tenant, *inside, terms.currency, terms.customer)

    def period_at(self, now: float) -> Period:
        """Return the period that contains `now`."""
        return period_of(self.terms.period, day_of(now))

    def record(self) -> BudgetRecord:
        """Return the budget in the form that activators use."""
        return BudgetRecord(
            id=self.id, tenant=self.tenant, **{name: getattr(self.terms, name) for name in _RECORD}
        )


def get(sql: sa.Connection, *, tenant: str, budget_id: str) -> Budget:
    """Return a tenant's budget. Raises NotFound."""
    found = find(sql, tenant=tenant, budget_id=budget_id)
    if found is None:
        raise NotFound(
            f"there is no budget {budget_id}", hint="`pilotlight budget list` shows all budgets."
        )
    return found


def find(sql: sa.Connection, *, tenant: str, budget_id: str) -> Budget | None:
    """Return a tenant's budget, or None if there is none."""
    return find_where(sql, tenant, tables.budgets.c.id == budget_id)


def listing(
    sql: sa.Connection, tenants: Collection[str] | None = None, *, is_whole: bool = True
) -> list[Budget]:
    """Return the budgets of these tenants (None: of all), the widest scope first. Without
    `is_whole` those that were derived are left out."""
    return select(
        sql,
        *([] if tenants is None else [_C.tenant.in_(tenants)]),
        *([] if is_whole else [_C.parent.is_(None)]),
    )


def of_customer(sql: sa.Connection, *, tenant: str, customer: str) -> list[Budget]:
    """Return the budgets of a customer, those that were derived included."""
    return select(sql, _C.tenant == tenant, _C.customer == customer)


def of_batch(sql: sa.Connection, batch: Collection[SpendKey]) -> list[Budget]:
    """Return the budgets that may cover records of a batch. Of a tenant's customers there may be
    many more than it names."""
    tenants = {tenant for (tenant,) in bulk.select_in(sql, _LIMITED, {key[0] for key in batch})}
    if not tenants:
        return []
    found = select(sql, _C.tenant.in_(tenants), _C.customer == "")
    named = sorted({key.customer for key in batch if key.customer and key.tenant in tenants})
    for customers in bulk.parts(named):
        found += select(sql, _C.tenant.in_(tenants), _C.customer.in_(customers))
    return found


def select(sql: sa.Connection, *where: sa.ColumnElement[bool]) -> list[Budget]:
    """Return the budgets that match, the widest scope first."""
    order = (_C[name] for name in ("tenant", "customer", *REACH))
    query = sa.select(tables.budgets).where(*where).order_by(*order)
    return [budget_of(row) for row in sql.execute(query).mappings()]


def find_where(sql: sa.Connection, tenant: str, *where: sa.ColumnElement[bool]) -> Budget | None:
    """Return the tenant's budget that matches, or None."""
    row = (
        sql.execute(sa.select(tables.budgets).where(tables.budgets.c.tenant == tenant, *where))
        .mappings()
        .first()
    )
    return None if row is None else budget_of(row)


def row_of(budget: Budget) -> dict[str, Any]:
    """Return the columns of a budget that may change."""
    terms = budget.terms.to_json()
    return {
        **terms,
        "alerts": json.dumps(terms["alerts"]),
        "sealed_secret": budget.sealed_secret,
        "updated_at": budget.updated_at,
        "parent": budget.parent,
    }


def budget_of(row: sa.RowMapping) -> Budget:
    """Return the budget that a row stores."""
    values: dict[str, Any] = {name: row[name] for name in (*_RECORD, "webhook")}
    terms = BudgetDefinition(**{**values, "alerts": tuple(json.loads(row["alerts"]))})
    same = ("id", "tenant", "sealed_secret", "created_at", "updated_at", "parent")
    return Budget(terms=terms, **{name: row[name] for name in same})
