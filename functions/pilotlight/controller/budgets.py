"""Budgets: what may be spent in a day or a month, by a tenant, an environment, an app or a
function.

A budget covers the records of its reach, in its currency, by the day on which they began (UTC); ""
in environment, app or function covers all of them. One reach has at most one budget per period and
currency, so a hard and a soft one are one budget with alerts. Activators get budgets through the
feed and enforce them; the ledger's answer to every batch tells them what was spent."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import alerts, audit, feed, spending, tables
from pilotlight.controller.aggregation import Spending
from pilotlight.controller.alerts import Alert
from pilotlight.controller.budget_terms import MAX_ALERTS, Terms
from pilotlight.controller.forecast import FULL_DAYS, Forecast, forecast
from pilotlight.controller.periods import Period, day_of, period_of
from pilotlight.controller.spending import Reach, SpendByReach
from pilotlight.controller.store import Write
from pilotlight.errors import Conflict, NotFound
from pilotlight.pricing import COST_QUANTUM
from pilotlight.protocol import BudgetRecord, BudgetState
from pilotlight.seal import PlatformKey

FEED_KIND = "budget"
MAX_BUDGETS = 1000
"""Of one tenant: every batch of usage looks at all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget as it stands. `sealed_secret` opens (with the platform's key) to what its webhook's
    messages are signed with."""

    id: str
    tenant: str
    terms: Terms
    sealed_secret: str | None
    created_at: float
    updated_at: float

    @property
    def reach(self) -> Reach:
        """What it covers."""
        terms = self.terms
        return (self.tenant, terms.environment, terms.app, terms.function, terms.currency)

    def period_at(self, now: float) -> Period:
        """The period that runs at `now`."""
        return period_of(self.terms.period, day_of(now))

    def record(self) -> BudgetRecord:
        """As activators need it."""
        return BudgetRecord(
            id=self.id, tenant=self.tenant, **{name: getattr(self.terms, name) for name in _RECORD}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A budget with what became of it in the period that runs. `spent` is in picounits."""

    budget: Budget
    period: Period
    spent: int
    forecast: Forecast | None
    alerts: tuple[Alert, ...]

    @property
    def percent(self) -> float:
        """The share of the amount that is spent."""
        return 100 * self.spent / self.budget.terms.picos


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A budget that was put. `secret` is the webhook's where a new one was made; it cannot be shown
    again."""

    budget: Budget
    secret: str | None
    is_new: bool


_RECORD = ("environment", "app", "function", "period", "amount", "currency", "hard")
_REACH = ("environment", "app", "function", "period", "currency")


def put(
    write: Write,
    *,
    key: PlatformKey,
    tenant: str,
    terms: Terms,
    actor: str,
    new_secret: bool = False,
    request: str = "",
) -> Placed:
    """Make the budget of that reach, or change it.

    A secret stays as long as its webhook does, unless `new_secret`. Thresholds that are reached
    already are alerted at once, to a webhook that is new, too; those that a higher amount leaves
    behind will be alerted again. Raises Conflict when there are too many."""
    before = _find(
        write.sql,
        tenant,
        *(getattr(tables.budgets.c, name) == getattr(terms, name) for name in _REACH),
    )
    if before is None and _count(write.sql, tenant) >= MAX_BUDGETS:
        raise Conflict(f"this tenant has {MAX_BUDGETS} budgets: delete one first")
    keeps = (
        before is not None
        and before.sealed_secret is not None
        and before.terms.webhook == terms.webhook
        and not new_secret
    )
    secret = None if keeps or terms.webhook is None else alerts.new_secret()
    sealed = (
        before.sealed_secret
        if before is not None and keeps
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
    if terms.webhook is None:
        alerts.cancel(write, budget_id=budget.id, error="the webhook was taken away")
    feed.append(write, FEED_KIND, budget.id, budget.record().to_json())
    was = before.terms.to_json() if before else None
    audit.record(
        write,
        tenant=tenant,
        actor=actor,
        action="budget.put",
        subject=budget.id,
        before=was,
        after=terms.to_json(),
        request=request,
    )
    _alert_now(write, budget, was_told=before is None or before.terms.webhook is not None)
    return Placed(budget=budget, secret=secret, is_new=before is None)


def delete(write: Write, *, tenant: str, budget_id: str, actor: str, request: str = "") -> None:
    """Remove a budget and its alerts. Raises NotFound."""
    budget = get(write.sql, tenant=tenant, budget_id=budget_id)
    write.sql.execute(
        sa.delete(tables.budget_alerts).where(tables.budget_alerts.c.budget == budget_id)
    )
    write.sql.execute(sa.delete(tables.budgets).where(tables.budgets.c.id == budget_id))
    feed.append(write, FEED_KIND, budget_id, None)
    audit.record(
        write,
        tenant=tenant,
        actor=actor,
        action="budget.delete",
        subject=budget_id,
        before=budget.terms.to_json(),
        request=request,
    )


def drop_webhook(
    write: Write, *, tenant: str, budget_id: str, url: str, actor: str, why: str
) -> None:
    """Send no more alerts of a budget there: the receiver wants none. A budget that is gone, or has
    another webhook by now, stays."""
    which = (
        (tables.budgets.c.id == budget_id)
        & (tables.budgets.c.tenant == tenant)
        & (tables.budgets.c.webhook == url)
    )
    gone = {"webhook": None, "sealed_secret": None, "updated_at": write.now}
    if write.sql.execute(sa.update(tables.budgets).where(which).values(**gone)).rowcount:
        alerts.cancel(write, budget_id=budget_id, error=why)
        audit.record(
            write,
            tenant=tenant,
            actor=actor,
            action="budget.webhook_dropped",
            subject=budget_id,
            after={"why": why},
        )


def get(sql: sa.Connection, *, tenant: str, budget_id: str) -> Budget:
    """One budget of a tenant. Raises NotFound."""
    found = find(sql, tenant=tenant, budget_id=budget_id)
    if found is None:
        raise NotFound(
            f"there is no budget {budget_id}", hint="`pilotlight budget list` shows what there is."
        )
    return found


def find(sql: sa.Connection, *, tenant: str, budget_id: str) -> Budget | None:
    """The same; None: it is gone."""
    return _find(sql, tenant, tables.budgets.c.id == budget_id)


def listing(sql: sa.Connection, tenants: Collection[str] | None = None) -> list[Budget]:
    """The budgets of these tenants (None: of all), the widest reach first."""
    table = tables.budgets
    query = sa.select(table).order_by(*(table.c[name] for name in ("tenant", *_REACH)))
    if tenants is not None:
        query = query.where(table.c.tenant.in_(tenants))
    return [_budget(row) for row in sql.execute(query).mappings()]


def after_usage(
    write: Write, *, new: Mapping[Spending, int], batch: Mapping[Spending, int]
) -> dict[str, BudgetState]:
    """Note the alerts that a batch of records brings, and say what was spent of each budget that it
    falls under.

    To be called in the batch's own transaction, once the daily rollups have it. `new` are the costs
    (picounits) of the records that were not there before, `batch` those of all. A late record
    alerts for the period that it belongs to, if the budget was there then."""
    found = listing(write.sql, {key[0] for key in batch})
    if not found:
        return {}
    reaches = {budget.reach for budget in found}
    sent, fresh = spending.of_batch(batch, reaches), spending.of_batch(new, reaches)
    periods = {b: _periods(b, fresh, write.now) for b in found if b.reach in sent.by_reach}
    total = _read(write.sql, periods)
    _note_all(
        write,
        {
            (b, period): total.within(b.reach, period)
            for b, theirs in periods.items()
            for period in theirs
        },
    )
    return {budget.id: _state(budget, total, sent, write.now) for budget in periods}


def states(sql: sa.Connection, *, now: float) -> dict[str, BudgetState]:
    """What was spent of every budget in the period that runs."""
    periods = {budget: {budget.period_at(now)} for budget in listing(sql)}
    total = _read(sql, periods)
    return {budget.id: _state(budget, total, SpendByReach(), now) for budget in periods}


def shares(sql: sa.Connection, *, now: float) -> dict[tuple[str, str], float]:
    """The part of every budget that is spent in the period that runs, 1 = all of it, by (tenant,
    budget id)."""
    found = listing(sql)
    total = _read(sql, {budget: {budget.period_at(now)} for budget in found})
    return {
        (b.tenant, b.id): total.within(b.reach, b.period_at(now)) / b.terms.picos for b in found
    }


def overview(
    sql: sa.Connection, *, tenant: str, now: float, budget_id: str | None = None
) -> list[Overview]:
    """A tenant's budgets with spending, forecast and alerts; or the one of that id. Raises
    NotFound."""
    found = (
        listing(sql, [tenant])
        if budget_id is None
        else [get(sql, tenant=tenant, budget_id=budget_id)]
    )
    if not found:
        return []
    today = day_of(now)
    first = min(today - FULL_DAYS, *(budget.period_at(now).first_day for budget in found))
    total = spending.read(
        sql,
        {budget.reach for budget in found},
        first_day=first,
        end_day=max(b.period_at(now).end_day for b in found),
    )
    noted: dict[str, list[Alert]] = {}
    current = {budget.period_at(now).name for budget in found}
    for alert in alerts.listing(
        sql,
        budgets=[budget.id for budget in found],
        periods=current,
        limit=MAX_BUDGETS * MAX_ALERTS,
    ):
        noted.setdefault(alert.budget, []).append(alert)
    return [_overview(budget, total, noted.get(budget.id, []), now) for budget in found]


def text(picos: int) -> str:
    """Picounits as a decimal with all its twelve places; "0" for none."""
    return format(picos * COST_QUANTUM, "f") if picos else "0"


def _overview(budget: Budget, total: SpendByReach, noted: Iterable[Alert], now: float) -> Overview:
    period, days = budget.period_at(now), total.days(budget.reach)
    spent = total.within(budget.reach, period)
    seen = forecast(now=now, period=period, spent=spent, days=days, amount=budget.terms.picos)
    theirs = tuple(alert for alert in noted if alert.period == period.name)
    return Overview(budget=budget, period=period, spent=spent, forecast=seen, alerts=theirs)


def _periods(budget: Budget, fresh: SpendByReach, now: float) -> set[Period]:
    latest = day_of(now) + 1  # an activator's clock may be ahead of ours, but not by years
    touched = {
        period_of(budget.terms.period, day) for day in fresh.days(budget.reach) if day <= latest
    }
    return {
        budget.period_at(now),
        *(period for period in touched if period.ends_at > budget.created_at),
    }


def _read(sql: sa.Connection, periods: Mapping[Budget, Collection[Period]]) -> SpendByReach:
    if not periods:
        return SpendByReach()
    every = [period for theirs in periods.values() for period in theirs]
    first, end = min(period.first_day for period in every), max(period.end_day for period in every)
    return spending.read(sql, {budget.reach for budget in periods}, first_day=first, end_day=end)


def _state(budget: Budget, total: SpendByReach, batch: SpendByReach, now: float) -> BudgetState:
    period = budget.period_at(now)
    spent, part = total.within(budget.reach, period), batch.within(budget.reach, period)
    return BudgetState(period=period.name, spent=text(spent), batch=text(part))


def _note_all(write: Write, spent: Mapping[tuple[Budget, Period], int]) -> None:
    """One look for what was noted before: it is nearly always all of it, and a tenant may have
    thousands of thresholds behind it."""
    reached = {place: _reached(place[0], picos) for place, picos in spent.items()}
    if not any(reached.values()):
        return
    touched = [place for place, percents in reached.items() if percents]
    known = alerts.noted(
        write.sql,
        budgets=sorted({b.id for b, _ in touched}),
        periods={period.name for _, period in touched},
    )
    for budget, period in touched:
        if any(
            (budget.id, period.name, percent) not in known for percent in reached[budget, period]
        ):
            _note(write, budget, period, spent[budget, period])


def _reached(budget: Budget, spent: int) -> list[int]:
    return [
        percent for percent in budget.terms.alerts if spent * 100 >= budget.terms.picos * percent
    ]


def _note(write: Write, budget: Budget, period: Period, spent: int) -> None:
    reached = _reached(budget, spent)
    alerts.note(
        write,
        budget_id=budget.id,
        tenant=budget.tenant,
        period=period.name,
        percents=reached,
        spent=text(spent),
        is_sent=budget.terms.webhook is not None,
    )


def _alert_now(write: Write, budget: Budget, *, was_told: bool) -> None:
    period = budget.period_at(write.now)
    spent = _read(write.sql, {budget: [period]}).within(budget.reach, period)
    ahead = [
        percent for percent in budget.terms.alerts if spent * 100 < budget.terms.picos * percent
    ]
    alerts.forget(write, budget_id=budget.id, period=period.name, percents=ahead)
    if budget.terms.webhook is not None and not was_told:
        alerts.forget_untold(write, budget_id=budget.id, period=period.name)
    _note(write, budget, period, spent)


def _store(write: Write, budget: Budget) -> None:
    terms = budget.terms.to_json()
    row = {
        **terms,
        "alerts": json.dumps(terms["alerts"]),
        "sealed_secret": budget.sealed_secret,
        "updated_at": budget.updated_at,
    }
    insert = write.insert(tables.budgets).values(
        id=budget.id, tenant=budget.tenant, created_at=budget.created_at, **row
    )
    write.sql.execute(insert.on_conflict_do_update(index_elements=["id"], set_=row))


def _count(sql: sa.Connection, tenant: str) -> int:
    table = tables.budgets
    return int(
        sql.execute(
            sa.select(sa.func.count()).select_from(table).where(table.c.tenant == tenant)
        ).scalar_one()
    )


def _find(sql: sa.Connection, tenant: str, *where: sa.ColumnElement[bool]) -> Budget | None:
    row = (
        sql.execute(sa.select(tables.budgets).where(tables.budgets.c.tenant == tenant, *where))
        .mappings()
        .first()
    )
    return None if row is None else _budget(row)


def _budget(row: sa.RowMapping) -> Budget:
    values: dict[str, Any] = {name: row[name] for name in (*_RECORD, "webhook")}
    terms = Terms(**{**values, "alerts": tuple(json.loads(row["alerts"]))})
    times = {name: row[name] for name in ("created_at", "updated_at")}
    return Budget(
        id=row["id"], tenant=row["tenant"], terms=terms, sealed_secret=row["sealed_secret"], **times
    )
