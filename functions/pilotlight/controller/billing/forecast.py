"""Forecast of the spending at the end of a period. Pure.

The forecast is the spending so far, plus the mean of the last full days (at most seven: a week has
working days and a weekend) for the remaining time. Days before the first one with records do not
count as days without spending. Before the first full day is over, the forecast extrapolates today's
spending so far.

The band covers 80 of 100 outcomes if days are independent and identically distributed: the
prediction interval of a sum of n further days from the mean of k observed ones, t(k-1) * s * sqrt(n
+ n²/k), with Student's t at 0.9 (Student 1908). A single full day gives no band."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.controller.billing.budget_periods import DAY_S, Period, day_of

FULL_DAYS = 7
LEAST_OF_A_DAY = 1 / 24
"""The shortest part of today, in days, that is extrapolated: less than an hour is not
representative."""
_T_90 = {1: 3.0777, 2: 1.8856, 3: 1.6377, 4: 1.5332, 5: 1.4759, 6: 1.4398}
"""Student's t at 0.9 by degrees of freedom: 80 of 100 lie between -t and t."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected spending at the end of a period. Amounts are picounits.

    Attributes:
        expected: the cost of the whole period.
        low, high: the 80 % band; None with fewer than two full days.
        per_day: the cost per day.
        basis_days: the number of full days that the forecast is based on; 0: today so far.
        reached_at: when the amount will be spent at this rate (seconds since the epoch); None: not
        in this period.
    """

    expected: int
    low: int | None
    high: int | None
    per_day: int
    basis_days: int
    reached_at: float | None = None


def forecast(
    *, now: float, period: Period, spent: int, days: Mapping[int, int], amount: int | None = None
) -> Forecast | None:
    """Return the forecast, or None while there is no data to base it on.

    Args:
        now: wall clock, within the period; seconds since the epoch.
        spent: picounits in the period so far.
        days: picounits of each day with records, for at least the last seven days and today.
        amount: the budget's amount, for `reached_at`.
    """
    today = day_of(now)
    sample = _full_days(days, today)
    passed = now / DAY_S - today
    if sample:
        per_day = max(0.0, statistics.fmean(sample))
    elif today in days and passed >= LEAST_OF_A_DAY:
        per_day = max(0.0, days[today] / passed)
    else:
        return None
    left = max(0.0, period.end_day - now / DAY_S)
    expected = spent + round(per_day * left)
    low, high = _band(sample, left, spent, expected)
    reached_at = _reached_at(now, period, spent, per_day, amount)
    return Forecast(
        expected=expected,
        low=low,
        high=high,
        per_day=round(per_day),
        basis_days=len(sample),
        reached_at=reached_at,
    )


def _full_days(days: Mapping[int, int], today: int) -> list[int]:
    begun = [day for day in days if day < today]
    first = max(min(begun), today - FULL_DAYS) if begun else today
    return [days.get(day, 0) for day in range(first, today)]


def _band(
    sample: list[int], left: float, spent: int, expected: int
) -> tuple[int | None, int | None]:
    count = len(sample)
    if count < 2:
        return None, None
    half = _T_90[count - 1] * statistics.stdev(sample) * math.sqrt(left + left * left / count)
    return max(spent, expected - round(half)), expected + round(half)


def _reached_at(
    now: float, period: Period, spent: int, per_day: float, amount: int | None
) -> float | None:
    if amount is None:
        return None
    if spent >= amount:
        return now
    if per_day <= 0:
        return None
    at = now + (amount - spent) / per_day * DAY_S
    return at if at < period.ends_at else None
