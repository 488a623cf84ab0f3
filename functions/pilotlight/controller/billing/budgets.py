"""Budgets: limits on the spending of a tenant, environment, app, function or customer per day or
month.

A budget covers the records of its scope, in its currency, by the day on which they began (UTC); ""
as environment, app, function or customer covers all of them. A scope has at most one budget per
period and currency; use alerts for a soft limit below a hard one. Activators receive budgets
through the feed and enforce them; the ledger's response to each batch reports what was spent.
`controller.customers.budgets` derives those of customers from one for ANY_CUSTOMER."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing import budget_alerts, spend
from pilotlight.controller.billing.budget_alerts import BudgetAlert
from pilotlight.controller.billing.budget_definition import MAX_ALERTS, BudgetDefinition
from pilotlight.controller.billing.budget_periods import Period, day_of, period_of
from pilotlight.controller.billing.forecast import FULL_DAYS, Forecast, forecast
from pilotlight.controller.billing.spend import SpendByScope, SpendScope
from pilotlight.controller.billing.usage_aggregation import SpendKey
from pilotlight.controller.database import audit_trail, bulk, feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import Conflict, NotFound
from pilotlight.protocol import BudgetRecord, BudgetState
from pilotlight.spec.identifiers import ANY_CUSTOMER
from pilotlight.spec.pricing import COST_QUANTUM

FEED_KIND = "budget"
MAX_BUDGETS = 1000
"""Budgets per tenant, without those that were derived: every usage batch checks all of them."""
_CUSTOMERS_AT_ONCE = 500
"""Databases limit the number of parameters per statement."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOverview:
    """A budget with its state in the current period. `spent` is in picounits."""

    budget: Budget
    period: Period
    spent: int
    forecast: Forecast | None
    alerts: tuple[BudgetAlert, ...]

    @property
    def percent(self) -> float:
        """The spent share of the amount, in percent."""
        return 100 * self.spent / self.budget.terms.picos


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSetResult:
    """The result of `put`. `secret` is the webhook's new secret, if one was created; it cannot be
    shown again."""

    budget: Budget
    secret: str | None
    is_new: bool


_LIMITED = "SELECT DISTINCT tenant FROM budgets WHERE tenant {in}"
_RECORD = ("environment", "app", "function", "period", "amount", "currency", "hard", "customer")
REACH = ("environment", "app", "function", "period", "currency", "customer")
_C = tables.budgets.c


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
    before = _find(
        write.sql,
        tenant,
        *(_C[name] == getattr(terms, name) for name in REACH),
    )
    is_new = before is None or before.parent is not None
    if is_new and _count(write.sql, tenant) >= MAX_BUDGETS:
        raise Conflict(f"this tenant has {MAX_BUDGETS} budgets: delete one first")
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
    budget = get(write.sql, tenant=tenant, budget_id=budget_id)
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


def _derived(sql: sa.Connection, budget_id: str) -> Collection[str]:
    return sql.execute(sa.select(_C.id).where(_C.parent == budget_id)).scalars().all()


def _change_derived(write: Write, budget: Budget) -> None:
    """Give the budgets that were derived from this one its terms."""
    row = _row(budget)
    same = ("amount", "hard", "alerts", "webhook", "sealed_secret", "updated_at")
    changed = (
        sa.update(tables.budgets)
        .where(_C.parent == budget.id)
        .values({name: row[name] for name in same})
        .returning(tables.budgets)
    )
    for one in write.sql.execute(changed).mappings().all():
        publish(write, _budget(one))


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
    return _find(sql, tenant, tables.budgets.c.id == budget_id)


def listing(
    sql: sa.Connection, tenants: Collection[str] | None = None, *, is_whole: bool = True
) -> list[Budget]:
    """Return the budgets of these tenants (None: of all), the widest scope first. Without
    `is_whole` those that were derived are left out."""
    return _select(
        sql,
        *([] if tenants is None else [_C.tenant.in_(tenants)]),
        *([] if is_whole else [_C.parent.is_(None)]),
    )


def of_customer(sql: sa.Connection, *, tenant: str, customer: str) -> list[Budget]:
    """Return the budgets of a customer, those that were derived included."""
    return _select(sql, _C.tenant == tenant, _C.customer == customer)


def _of_batch(sql: sa.Connection, batch: Collection[SpendKey]) -> list[Budget]:
    """Return the budgets that may cover records of a batch. Of a tenant's customers there may be
    many more than it names."""
    tenants = {tenant for (tenant,) in bulk.select_in(sql, _LIMITED, {key[0] for key in batch})}
    if not tenants:
        return []
    found = _select(sql, _C.tenant.in_(tenants), _C.customer == "")
    named = sorted({key.customer for key in batch if key.customer and key.tenant in tenants})
    for at in range(0, len(named), _CUSTOMERS_AT_ONCE):
        customers = named[at : at + _CUSTOMERS_AT_ONCE]
        found += _select(sql, _C.tenant.in_(tenants), _C.customer.in_(customers))
    return found


def _select(sql: sa.Connection, *where: sa.ColumnElement[bool]) -> list[Budget]:
    order = (_C[name] for name in ("tenant", "customer", *REACH))
    query = sa.select(tables.budgets).where(*where).order_by(*order)
    return [_budget(row) for row in sql.execute(query).mappings()]


def after_usage(
    write: Write, *, new: Mapping[SpendKey, int], batch: Mapping[SpendKey, int]
) -> dict[str, BudgetState]:
    """Record the alerts that a batch of records triggers. Returns what was spent of each budget
    that covers some of it.

    Call it in the batch's own transaction, after the daily rollups include the batch. `new` holds
    the costs (picounits) of the records that are new, `batch` those of all. A late record can
    trigger an alert for the period that it belongs to, if the budget existed then."""
    found = _of_batch(write.sql, batch)
    if not found:
        return {}
    reaches = {budget.reach for budget in found}
    sent, fresh = spend.spend_of_batch(batch, reaches), spend.spend_of_batch(new, reaches)
    periods = {b: _periods(b, fresh, write.now) for b in found if b.reach in sent.by_reach}
    total = _read(write.sql, periods)
    _record_all(
        write,
        {
            (b, period): total.within(b.reach, period)
            for b, budget_periods in periods.items()
            for period in budget_periods
        },
    )
    return {budget.id: _state(budget, total, sent, write.now) for budget in periods}


def states(sql: sa.Connection, *, now: float, ids: Collection[str] = ()) -> dict[str, BudgetState]:
    """Return what was spent of these budgets, () = of all, in their current periods."""
    found = _select(sql, _C.id.in_(ids)) if ids else listing(sql)
    periods = {budget: {budget.period_at(now)} for budget in found}
    total = _read(sql, periods)
    return {budget.id: _state(budget, total, SpendByScope(), now) for budget in periods}


def shares(sql: sa.Connection, *, now: float) -> dict[tuple[str, str], float]:
    """Return the spent share of every budget in its current period, 1 = all, by (tenant, budget
    id). Those of customers are left out: they may be many."""
    found = _select(sql, _C.customer == "")
    total = _read(sql, {budget: {budget.period_at(now)} for budget in found})
    return {
        (b.tenant, b.id): total.within(b.reach, b.period_at(now)) / b.terms.picos for b in found
    }


def overview(
    sql: sa.Connection,
    *,
    tenant: str,
    now: float,
    budget_id: str | None = None,
    customer: str | None = None,
) -> list[BudgetOverview]:
    """Return a tenant's budgets without those that were derived, or one by its id, or those of a
    customer, with spending, forecast and alerts. Raises NotFound."""
    found = (
        [get(sql, tenant=tenant, budget_id=budget_id)]
        if budget_id is not None
        else of_customer(sql, tenant=tenant, customer=customer)
        if customer is not None
        else listing(sql, [tenant], is_whole=False)
    )
    if not found:
        return []
    today = day_of(now)
    first = min(today - FULL_DAYS, *(budget.period_at(now).first_day for budget in found))
    total = spend.read_spend(
        sql,
        {budget.reach for budget in found},
        first_day=first,
        end_day=max(b.period_at(now).end_day for b in found),
    )
    by_budget: dict[str, list[BudgetAlert]] = {}
    current = {budget.period_at(now).name for budget in found}
    for alert in budget_alerts.listing(
        sql,
        budgets=[budget.id for budget in found],
        periods=current,
        limit=MAX_BUDGETS * MAX_ALERTS,
    ):
        by_budget.setdefault(alert.budget, []).append(alert)
    return [_overview(budget, total, by_budget.get(budget.id, []), now) for budget in found]


def picos_text(picos: int) -> str:
    """Format picounits as a decimal with twelve places; "0" for zero."""
    return format(picos * COST_QUANTUM, "f") if picos else "0"


def _overview(
    budget: Budget, total: SpendByScope, recorded: Iterable[BudgetAlert], now: float
) -> BudgetOverview:
    period, days = budget.period_at(now), total.days(budget.reach)
    spent = total.within(budget.reach, period)
    predicted = forecast(now=now, period=period, spent=spent, days=days, amount=budget.terms.picos)
    current = tuple(alert for alert in recorded if alert.period == period.name)
    return BudgetOverview(
        budget=budget, period=period, spent=spent, forecast=predicted, alerts=current
    )


def _periods(budget: Budget, fresh: SpendByScope, now: float) -> set[Period]:
    latest = day_of(now) + 1  # an activator's clock may be ahead of this one, but not by years
    touched = {
        period_of(budget.terms.period, day) for day in fresh.days(budget.reach) if day <= latest
    }
    return {
        budget.period_at(now),
        *(period for period in touched if period.ends_at > budget.created_at),
    }


def _read(sql: sa.Connection, periods: Mapping[Budget, Collection[Period]]) -> SpendByScope:
    if not periods:
        return SpendByScope()
    every = [period for budget_periods in periods.values() for period in budget_periods]
    first, end = min(period.first_day for period in every), max(period.end_day for period in every)
    return spend.read_spend(sql, {budget.reach for budget in periods}, first_day=first, end_day=end)


def _state(budget: Budget, total: SpendByScope, batch: SpendByScope, now: float) -> BudgetState:
    period = budget.period_at(now)
    spent, part = total.within(budget.reach, period), batch.within(budget.reach, period)
    return BudgetState(period=period.name, spent=picos_text(spent), batch=picos_text(part))


def _record_all(write: Write, spent: Mapping[tuple[Budget, Period], int]) -> None:
    """Record the reached thresholds. One query finds those recorded before, which are nearly always
    all: a tenant may have passed thousands of thresholds."""
    reached = {key: _reached(key[0], picos) for key, picos in spent.items()}
    if not any(reached.values()):
        return
    touched = [key for key, percents in reached.items() if percents]
    known = budget_alerts.recorded_alerts(
        write.sql,
        budgets=sorted({b.id for b, _ in touched}),
        periods={period.name for _, period in touched},
    )
    for budget, period in touched:
        if any(
            (budget.id, period.name, percent) not in known for percent in reached[budget, period]
        ):
            _record_alerts(write, budget, period, spent[budget, period])


def _reached(budget: Budget, spent: int) -> list[int]:
    return [
        percent for percent in budget.terms.alerts if spent * 100 >= budget.terms.picos * percent
    ]


def _record_alerts(write: Write, budget: Budget, period: Period, spent: int) -> None:
    reached = _reached(budget, spent)
    budget_alerts.record_alerts(
        write,
        budget_id=budget.id,
        tenant=budget.tenant,
        period=period.name,
        percents=reached,
        spent=picos_text(spent),
        is_sent=budget.terms.webhook is not None,
    )


def _refresh_alerts(write: Write, budget: Budget, *, had_webhook: bool) -> None:
    """Bring the alerts of the current period in line with a changed budget."""
    period = budget.period_at(write.now)
    spent = _read(write.sql, {budget: [period]}).within(budget.reach, period)
    ahead = [
        percent for percent in budget.terms.alerts if spent * 100 < budget.terms.picos * percent
    ]
    budget_alerts.delete_alerts(write, budget_id=budget.id, period=period.name, percents=ahead)
    if budget.terms.webhook is not None and not had_webhook:
        budget_alerts.delete_unsent(write, budget_id=budget.id, period=period.name)
    _record_alerts(write, budget, period, spent)


def _store(write: Write, budget: Budget) -> None:
    row = _row(budget)
    insert = write.insert(tables.budgets).values(
        id=budget.id, tenant=budget.tenant, created_at=budget.created_at, **row
    )
    write.sql.execute(insert.on_conflict_do_update(index_elements=["id"], set_=row))


def insert(write: Write, budget: Budget) -> None:
    """Store a new budget, and send it to activators."""
    first = {"id": budget.id, "tenant": budget.tenant, "created_at": budget.created_at}
    write.sql.execute(sa.insert(tables.budgets).values(**first, **_row(budget)))
    publish(write, budget)


def _row(budget: Budget) -> dict[str, Any]:
    terms = budget.terms.to_json()
    return {
        **terms,
        "alerts": json.dumps(terms["alerts"]),
        "sealed_secret": budget.sealed_secret,
        "updated_at": budget.updated_at,
        "parent": budget.parent,
    }


def _count(sql: sa.Connection, tenant: str) -> int:
    own = (_C.tenant == tenant) & _C.parent.is_(None)
    query = sa.select(sa.func.count()).select_from(tables.budgets).where(own)
    return int(sql.execute(query).scalar_one())


def _find(sql: sa.Connection, tenant: str, *where: sa.ColumnElement[bool]) -> Budget | None:
    row = (
        sql.execute(sa.select(tables.budgets).where(tables.budgets.c.tenant == tenant, *where))
        .mappings()
        .first()
    )
    return None if row is None else _budget(row)


def _budget(row: sa.RowMapping) -> Budget:
    values: dict[str, Any] = {name: row[name] for name in (*_RECORD, "webhook")}
    terms = BudgetDefinition(**{**values, "alerts": tuple(json.loads(row["alerts"]))})
    same = ("id", "tenant", "sealed_secret", "created_at", "updated_at", "parent")
    return Budget(terms=terms, **{name: row[name] for name in same})
