"""A tenant's spending by day in all its environments: this month so far, and the forecast."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.billing.budget_periods import MONTH, Period, day_of, period_of
from pilotlight.controller.billing.forecast import FULL_DAYS, Forecast, forecast
from pilotlight.controller.billing.ledger_totals import picos_of
from pilotlight.controller.database import tables


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthlySpend:
    """The current month. `spent` is in picounits."""

    period: Period
    spent: int
    forecast: Forecast | None


def month_so_far(sql: sa.Connection, *, tenant: str, currency: str, now: float) -> MonthlySpend:
    """Return the spending since the first of the month (UTC), by the day on which records began."""
    period, today = period_of(MONTH, day_of(now)), day_of(now)
    days = by_day(
        sql,
        tenant=tenant,
        currency=currency,
        first=min(period.first_day, today - FULL_DAYS),
        last=today,
    )
    spent = sum(picos for day, picos in days.items() if day >= period.first_day)
    return MonthlySpend(
        period=period,
        spent=spent,
        forecast=forecast(now=now, period=period, spent=spent, days=days),
    )


def by_day(
    sql: sa.Connection, *, tenant: str, currency: str, first: int, last: int
) -> dict[int, int]:
    """Return picounits by day since the epoch."""
    table = tables.usage_days
    sums = (sa.func.sum(table.c.high), sa.func.sum(table.c.low))
    where = (
        table.c.tenant == tenant,
        table.c.day.between(first, last),
        table.c.currency == currency,
    )
    rows = sql.execute(sa.select(table.c.day, *sums).where(*where).group_by(table.c.day))
    return {day: picos_of(high, low) for day, high, low in rows}
