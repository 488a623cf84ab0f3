"""Budget alerts: which thresholds were reached in which period, once each, and the state of their
delivery to the webhook.

An alert is a row, written in the same transaction as the records that caused it, so it is neither
lost nor created twice. Its id is the webhook-id of every delivery attempt, so that a receiver can
distinguish a second delivery from a second alert. `next_attempt_at` is the earliest time of the
next attempt. A deliverer moves it forward before it tries (`delivery_retry.claim`), so if the
deliverer dies, another one can claim the alert after CLAIM_S.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.delivery_retry import AT_ONCE_OF_ONE, MAX_ERROR
from pilotlight.controller.database.store import Write

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetAlert:
    """A threshold that was reached. `spent` is a decimal string, as of when the alert was recorded.

    Attributes:
        delivered_at: when the webhook accepted the alert; None: not yet, or there is no webhook.
        next_attempt_at: the time of the next attempt; None: there is no further attempt.
        error: the error of the last attempt, if it failed.
    """

    id: str
    budget: str
    tenant: str
    period: str
    percent: int
    spent: str
    at: float
    delivered_at: float | None
    next_attempt_at: float | None
    attempts: int
    error: str | None


_KEY = tuple(tables.budget_alerts.c[name] for name in ("budget", "period", "percent"))
_COLUMNS = tuple(tables.budget_alerts.c[name] for name in BudgetAlert.__slots__)


def new_signing_secret() -> str:
    """Create a signing secret for messages: `whsec_` and 32 random bytes in base64
    (standardwebhooks.com)."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def record_alerts(
    write: Write,
    *,
    budget_id: str,
    tenant: str,
    period: str,
    percents: Sequence[int],
    spent: str,
    is_sent: bool,
) -> int:
    """Record that these thresholds are reached; return how many are new. `is_sent`: the budget has
    a webhook to notify."""
    rows = [
        {
            "id": f"al-{secrets.token_hex(12)}",
            "budget": budget_id,
            "tenant": tenant,
            "period": period,
            "percent": percent,
            "spent": spent,
            "at": write.now,
            "next_attempt_at": write.now if is_sent else None,
            "attempts": 0,
        }
        for percent in percents
    ]
    new = 0
    for row in rows:
        insert = write.insert(tables.budget_alerts).values(**row)
        new += write.sql.execute(
            insert.on_conflict_do_nothing(index_elements=["budget", "period", "percent"])
        ).rowcount
    if new and is_sent:
        # rings the notifier after the commit, which wakes the deliverer; followers of the feed wake
        # too and find nothing new
        write.fed = True
    return new


def recorded_alerts(
    sql: sa.Connection, *, budgets: Sequence[str], periods: Collection[str]
) -> set[tuple[str, str, int]]:
    """Return (budget, period, percent) of the alerts recorded for these budgets and periods."""
    table, found = tables.budget_alerts, set[tuple[str, str, int]]()
    for part in bulk.parts(budgets):
        matches = table.c.budget.in_(part) & table.c.period.in_(list(periods))
        found |= {
            (row.budget, row.period, row.percent)
            for row in sql.execute(sa.select(*_KEY).where(matches))
        }
    return found


def delete_alerts(write: Write, *, budget_id: str, period: str, percents: Iterable[int]) -> None:
    """Delete alerts of thresholds that are no longer reached because the amount was raised, so that
    they can be sent again."""
    table = tables.budget_alerts
    which = (
        (table.c.budget == budget_id)
        & (table.c.period == period)
        & table.c.percent.in_(list(percents))
    )
    write.sql.execute(sa.delete(table).where(which))


def delete_unsent(write: Write, *, budget_id: str, period: str) -> None:
    """Delete alerts of a period that were never sent: the budget has a webhook now, and thresholds
    that are still reached will be recorded again."""
    table = tables.budget_alerts
    unsent = table.c.delivered_at.is_(None) & table.c.next_attempt_at.is_(None)
    write.sql.execute(
        sa.delete(table).where((table.c.budget == budget_id) & (table.c.period == period) & unsent)
    )


def cancel(write: Write, *, budget_id: str, error: str) -> None:
    """Cancel the delivery of a budget's pending alerts, with this error."""
    table = tables.budget_alerts
    which = (table.c.budget == budget_id) & table.c.next_attempt_at.is_not(None)
    write.sql.execute(
        sa.update(table).where(which).values(next_attempt_at=None, error=error[:MAX_ERROR])
    )


def due(write: Write, *, limit: int) -> list[BudgetAlert]:
    """Return due alerts, at most AT_ONCE_OF_ONE of a tenant, the longest due first."""
    table = tables.budget_alerts
    order = (table.c.next_attempt_at, table.c.id)
    turn = sa.func.row_number().over(partition_by=table.c.tenant, order_by=order).label("turn")
    ready = sa.select(*_COLUMNS, turn).where(table.c.next_attempt_at <= write.now).subquery()
    query = (
        sa.select(*(ready.c[name] for name in BudgetAlert.__slots__))
        .where(ready.c.turn <= AT_ONCE_OF_ONE)
        .order_by(ready.c.next_attempt_at, ready.c.id)
        .limit(limit)
    )
    return [BudgetAlert(**row) for row in write.sql.execute(query).mappings()]


def listing(
    sql: sa.Connection,
    *,
    budgets: Sequence[str],
    periods: Collection[str] | None = None,
    limit: int = 1000,
) -> list[BudgetAlert]:
    """Return the alerts of these budgets (in these periods; None: in all), newest first."""
    table = tables.budget_alerts
    found: list[BudgetAlert] = []
    for part in bulk.parts(budgets):
        query = sa.select(*_COLUMNS).where(table.c.budget.in_(part))
        if periods is not None:
            query = query.where(table.c.period.in_(list(periods)))
        page = query.order_by(table.c.at.desc(), table.c.percent.desc()).limit(limit)
        found += [BudgetAlert(**row) for row in sql.execute(page).mappings()]
    return sorted(found, key=lambda alert: (-alert.at, -alert.percent))[:limit]
