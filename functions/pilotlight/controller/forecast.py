"""How much a period will have cost at its end. Pure.

The forecast is what was spent, plus the mean of the last full days (at most seven: a whole week has
its working days and its weekend) for the time that is left. Days before the first one with records
do not count: a tenant that began yesterday did not spend nothing last week. Before the first full
day is over, today so far stands for a day.

The band holds 80 of 100 outcomes if days are independent and alike: the prediction interval of a
sum of n further days from the mean of k observed ones, t(k-1) * s * sqrt(n + n²/k), with Student's
t at 0.9 (Student 1908). One full day alone gives no band."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.controller.periods import DAY_S, Period, day_of

FULL_DAYS = 7
LEAST_OF_A_DAY = 1 / 24
"""Less than an hour says nothing about a day."""
_T_90 = {1: 3.0777, 2: 1.8856, 3: 1.6377, 4: 1.5332, 5: 1.4759, 6: 1.4398}
"""Student's t at 0.9 by degrees of freedom: 80 of 100 lie between both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The end of a period, seen from now. Amounts are picounits.

    Attributes:
        expected: what the whole period will have cost. low, high: the band of 80 %; None where
        there are fewer than two full days. per_day: what a day costs. basis_days: full days that
        this rests on; 0: on today so far. reached_at: when the amount will have been spent at that
        pace (seconds since the epoch); None: not in this period.
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
    """The forecast, or None while nothing is known to rest it on.

    Args:
        now: wall clock, within the period; seconds since the epoch.
        spent: picounits in the period so far.
        days: picounits of each day that has records, of the last seven at least, today included.
        amount: what may be spent, for `reached_at`.
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
