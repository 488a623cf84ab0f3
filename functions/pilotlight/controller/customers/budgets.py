"""Budgets of customers that have none of their own: with its first call a customer gets one from
each budget of its tenant for ANY_CUSTOMER. It is a budget like any other, so activators enforce it
as exactly.

A caller may name any number of customers. A tenant has at most MAX_DERIVED such budgets; beyond
that, those go whose customers used nothing this month, and without one of these no further customer
is admitted."""

from __future__ import annotations

import secrets
from dataclasses import replace

import sqlalchemy as sa

from pilotlight.controller.billing.budget_periods import MONTH, day_of, period_of
from pilotlight.controller.billing.budgets import changes, records
from pilotlight.controller.billing.budgets.records import REACH, Budget
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import TooManyRequests
from pilotlight.spec.identifiers import ANY_CUSTOMER

MAX_DERIVED = 10_000
"""Of a tenant: every activator has all of them."""
REMOVED_AT_ONCE = 500
LEAST_AGE_S = 3600.0
"""A younger one is kept: the records of its customer's first call may be on their way."""
RETRY_S = 3600.0
_C = tables.budgets.c


def derive(write: Write, *, tenant: str, customer: str) -> int:
    """Make the budgets that a customer gets and does not have; return their number. Raises
    TooManyRequests when the tenant has too many."""
    defaults = records.of_customer(write.sql, tenant=tenant, customer=ANY_CUSTOMER)
    own = records.of_customer(write.sql, tenant=tenant, customer=customer)
    known = {_reach_of(budget) for budget in own}
    missing = [one for one in defaults if _reach_of(one) not in known]
    if missing:
        _require_room(write, tenant, customer, len(missing))
    for one in missing:
        changes.insert(
            write,
            replace(
                one,
                id=f"b-{secrets.token_hex(8)}",
                terms=replace(one.terms, customer=customer),
                parent=one.id,
                created_at=write.now,
                updated_at=write.now,
            ),
        )
    return len(missing)


def _reach_of(budget: Budget) -> tuple[str, ...]:
    return tuple(getattr(budget.terms, name) for name in REACH if name != "customer")


def _require_room(write: Write, tenant: str, customer: str, wanted: int) -> None:
    derived = (_C.tenant == tenant) & _C.parent.is_not(None)
    count = sa.select(sa.func.count()).select_from(tables.budgets).where(derived)
    if int(write.sql.execute(count).scalar_one()) + wanted <= MAX_DERIVED:
        return
    days = tables.customer_days.c
    first_day = period_of(MONTH, day_of(write.now)).first_day
    used = sa.exists().where(
        days.tenant == _C.tenant, days.customer == _C.customer, days.day >= first_day
    )
    idle = sa.select(_C.id).where(derived, _C.created_at < write.now - LEAST_AGE_S, ~used)
    found = write.sql.execute(idle.limit(REMOVED_AT_ONCE)).scalars().all()
    if len(found) < wanted:
        raise TooManyRequests(
            f"this tenant has budgets of {MAX_DERIVED} customers that used something this month, "
            f"which is the maximum: others are not admitted",
            retry_after_s=RETRY_S,
            customer=customer,
        )
    changes.remove(write, found)
