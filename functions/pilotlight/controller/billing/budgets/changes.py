"""Changes of budgets: each is audited and published to activators, which enforce it.
`controller.customers.budgets` derives budgets of customers from one for ANY_CUSTOMER."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.billing import budget_alerts
from pilotlight.controller.billing.budget_definition import BudgetDefinition
from pilotlight.controller.billing.budgets import records, spending
from pilotlight.controller.billing.budgets.records import REACH, Budget
from pilotlight.controller.database import audit_trail, feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import Conflict
from pilotlight.spec.identifiers import ANY_CUSTOMER

FEED_KIND = "budget"
_C = tables.budgets.c


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSetResult:
    """The result of `put`. `secret` is the webhook's new secret, if one was created; it cannot be
    shown again."""

    budget: Budget
    secret: str | None
    is_new: bool


def put(
    write: Write,
    *,
    key: PlatformKey,
    tenant: str,
    terms: BudgetDefinition,
    actor: str,
    new_secret: bool = False,
    request: str = "",
) -> BudgetSetResult:
    """Create or update the budget of a scope.

    The secret is kept as long as the webhook is unchanged, unless `new_secret`. Thresholds that are
    already reached send an alert at once, also to a new webhook. Thresholds that a higher amount
    puts out of reach can alert again. Raises Conflict when the tenant has too many budgets."""
    before = records.find_where(
        write.sql,
        tenant,
        *(_C[name] == getattr(terms, name) for name in REACH),
    )
    is_new = before is None or before.parent is not None
    if is_new and _count(write.sql, tenant) >= records.MAX_BUDGETS:
        raise Conflict(f"this tenant has {records.MAX_BUDGETS} budgets: delete one first")
    keeps_secret = (
        before is not None
        and before.sealed_secret is not None
        and before.terms.webhook == terms.webhook
        and not new_secret
    )
    secret = None if keeps_secret or terms.webhook is None else budget_alerts.new_signing_secret()
    sealed = (
        before.sealed_secret
        if before is not None and keeps_secret
        else key.webhooks.seal(secret)
        if secret is not None
        else None
    )
    budget = Budget(
        id=before.id if before else f"b-{secrets.token_hex(8)}",
        tenant=tenant,
        terms=terms,
        sealed_secret=sealed,
        created_at=before.created_at if before else write.now,
        updated_at=write.now,
    )
    _store(write, budget)
    if terms.customer == ANY_CUSTOMER:
        _change_derived(write, budget)
    if terms.webhook is None:
        budget_alerts.cancel(write, budget_id=budget.id, error="the webhook was removed")
    publish(write, budget)
    old_terms = before.terms.to_json() if before else None
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="budget.put",
        subject=budget.id,
        before=old_terms,
        after=terms.to_json(),
        request=request,
    )
    had_webhook = before is None or before.terms.webhook is not None
    _refresh_alerts(write, budget, had_webhook=had_webhook)
    return BudgetSetResult(budget=budget, secret=secret, is_new=is_new)


def delete(write: Write, *, tenant: str, budget_id: str, actor: str, request: str = "") -> None:
    """Remove a budget and its alerts, and those that were derived from it. Raises NotFound, and
    Conflict for one that was derived."""
    budget = records.get(write.sql, tenant=tenant, budget_id=budget_id)
    if budget.parent is not None:
        raise Conflict(
            f"{budget_id} is what customer {budget.terms.customer!r} has of {budget.parent}, which "
            f"is for each customer: set another one for this customer, or delete {budget.parent}"
        )
    remove(write, [*_derived(write.sql, budget_id), budget_id])
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="budget.delete",
        subject=budget_id,
        before=budget.terms.to_json(),
        request=request,
    )


def remove(write: Write, ids: Collection[str]) -> None:
    """Remove budgets and their alerts."""
    alerts = tables.budget_alerts
    for budget_id in ids:
        write.sql.execute(sa.delete(alerts).where(alerts.c.budget == budget_id))
        write.sql.execute(sa.delete(tables.budgets).where(_C.id == budget_id))
        feed.append(write, FEED_KIND, budget_id, None)


def publish(write: Write, budget: Budget) -> None:
    """Send a new or changed budget to activators."""
    value = budget.record().to_json()
    if not budget.terms.customer:
        del value["customer"]  # activators before version 0028 do not know it
    feed.append(write, FEED_KIND, budget.id, value)


def drop_webhook(
    write: Write, *, tenant: str, budget_id: str, url: str, actor: str, why: str
) -> None:
    """Remove the webhook of a budget because its receiver rejects alerts. A budget that was deleted
    or has another webhook by now is unchanged."""
    which = (
        (tables.budgets.c.id == budget_id)
        & (tables.budgets.c.tenant == tenant)
        & (tables.budgets.c.webhook == url)
    )
    removed = {"webhook": None, "sealed_secret": None, "updated_at": write.now}
    if write.sql.execute(sa.update(tables.budgets).where(which).values(**removed)).rowcount:
        budget_alerts.cancel(write, budget_id=budget_id, error=why)
        audit_trail.record(
            write,
            tenant=tenant,
            actor=actor,
            action="budget.webhook_dropped",
            subject=budget_id,
            after={"why": why},
        )


def insert(write: Write, budget: Budget) -> None:
    """Store a new budget, and send it to activators."""
    first = {"id": budget.id, "tenant": budget.tenant, "created_at": budget.created_at}
    write.sql.execute(sa.insert(tables.budgets).values(**first, **records.row_of(budget)))
    publish(write, budget)


def _derived(sql: sa.Connection, budget_id: str) -> Collection[str]:
    return sql.execute(sa.select(_C.id).where(_C.parent == budget_id)).scalars().all()


def _change_derived(write: Write, budget: Budget) -> None:
    """Give the budgets that were derived from this one its terms."""
    row = records.row_of(budget)
    same = ("amount", "hard", "alerts", "webhook", "sealed_secret", "updated_at")
    changed = (
        sa.update(tables.budgets)
        .where(_C.parent == budget.id)
        .values({name: row[name] for name in same})
        .returning(tables.budgets)
    )
    for one in write.sql.execute(changed).mappings().all():
        publish(write, records.budget_of(one))


def _store(write: Write, budget: Budget) -> None:
    row = records.row_of(budget)
    insert = write.insert(tables.budgets).values(
        id=budget.id, tenant=budget.tenant, created_at=budget.created_at, **row
    )
    write.sql.execute(insert.on_conflict_do_update(index_elements=["id"], set_=row))


def _count(sql: sa.Connection, tenant: str) -> int:
    own = (_C.tenant == tenant) & _C.parent.is_(None)
    query = sa.select(sa.func.count()).select_from(tables.budgets).where(own)
    return int(sql.execute(query).scalar_one())


def _refresh_alerts(write: Write, budget: Budget, *, had_webhook: bool) -> None:
    """Bring the alerts of the current period in line with a changed budget."""
    period = budget.period_at(write.now)
    spent = spending.read(write.sql, {budget: [period]}).within(budget.reach, period)
    ahead = [
        percent for percent in budget.terms.alerts if spent * 100 < budget.terms.picos * percent
    ]
    budget_alerts.delete_alerts(write, budget_id=budget.id, period=period.name, percents=ahead)
    if budget.terms.webhook is not None and not had_webhook:
        budget_alerts.delete_unsent(write, budget_id=budget.id, period=period.name)
    spending.record_alerts(write, budget, period, spent)
