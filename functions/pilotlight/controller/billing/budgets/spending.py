"""What is spent of budgets, by the ledger: for its response to each batch, from which activators
learn it, for alerts, and for tenants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.billing import budget_alerts, spend
from pilotlight.controller.billing.budget_alerts import BudgetAlert
from pilotlight.controller.billing.budget_definition import MAX_ALERTS
from pilotlight.controller.billing.budget_periods import Period, day_of, period_of
from pilotlight.controller.billing.budgets import records
from pilotlight.controller.billing.budgets.records import Budget
from pilotlight.controller.billing.forecast import FULL_DAYS, Forecast, forecast
from pilotlight.controller.billing.spend import SpendByScope
from pilotlight.controller.billing.usage_aggregation import SpendKey
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.protocol import BudgetState
from pilotlight.spec.pricing import picos_text

_C = tables.budgets.c


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


def after_usage(
    write: Write, *, new: Mapping[SpendKey, int], batch: Mapping[SpendKey, int]
) -> dict[str, BudgetState]:
    """Record the alerts that a batch of records triggers. Returns what was spent of each budget
    that covers some of it.

    Call it in the batch's own transaction, after the daily rollups include the batch. `new` holds
    the costs (picounits) of the records that are new, `batch` those of all. A late record can
    trigger an alert for the period that it belongs to, if the budget existed then."""
    found = records.of_batch(write.sql, batch)
    if not found:
        return {}
    reaches = {budget.reach for budget in found}
    sent, fresh = spend.spend_of_batch(batch, reaches), spend.spend_of_batch(new, reaches)
    periods = {b: _periods(b, fresh, write.now) for b in found if b.reach in sent.by_reach}
    total = read(write.sql, periods)
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
    found = records.select(sql, _C.id.in_(ids)) if ids else records.listing(sql)
    periods = {budget: {budget.period_at(now)} for budget in found}
    total = read(sql, periods)
    return {budget.id: _state(budget, total, SpendByScope(), now) for budget in periods}


def shares(sql: sa.Connection, *, now: float) -> dict[tuple[str, str], float]:
    """Return the spent share of every budget in its current period, 1 = all, by (tenant, budget
    id). Those of customers are left out: they may be many."""
    found = records.select(sql, _C.customer == "")
    total = read(sql, {budget: {budget.period_at(now)} for budget in found})
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
        [records.get(sql, tenant=tenant, budget_id=budget_id)]
        if budget_id is not None
        else records.of_customer(sql, tenant=tenant, customer=customer)
        if customer is not None
        else records.listing(sql, [tenant], is_whole=False)
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
        limit=records.MAX_BUDGETS * MAX_ALERTS,
    ):
        by_budget.setdefault(alert.budget, []).append(alert)
    return [_overview(budget, total, by_budget.get(budget.id, []), now) for budget in found]


def _spent_text(picos: int) -> str:
    """Format picounits as a decimal with twelve places; "0" for zero."""
    return picos_text(picos) if picos else "0"


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


def read(sql: sa.Connection, periods: Mapping[Budget, Collection[Period]]) -> SpendByScope:
    """Return what is spent of budgets in at least these of their periods."""
    if not periods:
        return SpendByScope()
    every = [period for budget_periods in periods.values() for period in budget_periods]
    first, end = min(period.first_day for period in every), max(period.end_day for period in every)
    return spend.read_spend(sql, {budget.reach for budget in periods}, first_day=first, end_day=end)


def _state(budget: Budget, total: SpendByScope, batch: SpendByScope, now: float) -> BudgetState:
    period = budget.period_at(now)
    spent, part = total.within(budget.reach, period), batch.within(budget.reach, period)
    return BudgetState(period=period.name, spent=_spent_text(spent), batch=_spent_text(part))


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
            record_alerts(write, budget, period, spent[budget, period])


def _reached(budget: Budget, spent: int) -> list[int]:
    return [
        percent for percent in budget.terms.alerts if spent * 100 >= budget.terms.picos * percent
    ]


def record_alerts(write: Write, budget: Budget, period: Period, spent: int) -> None:
    """Record the alerts of the thresholds that are reached."""
    reached = _reached(budget, spent)
    budget_alerts.record_alerts(
        write,
        budget_id=budget.id,
        tenant=budget.tenant,
        period=period.name,
        percents=reached,
        spent=_spent_text(spent),
        is_sent=budget.terms.webhook is not None,
    )
