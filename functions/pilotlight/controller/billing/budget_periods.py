"""The periods of a budget: days and months of the calendar in UTC. Pure.

Days are counted since the epoch, as in the ledger: day 0 is 1970-01-01.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

DAY_S = 86_400
DAY, MONTH = "day", "month"
KINDS = (DAY, MONTH)
_EPOCH = dt.date(1970, 1, 1).toordinal()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Period:
    """One day or month: `first_day` <= day < `end_day`. `name` is `2026-11-21` or `2026-11`."""

    first_day: int
    end_day: int
    name: str

    @property
    def begins_at(self) -> float:
        """The period's first second, since the epoch."""
        return float(self.first_day * DAY_S)

    @property
    def ends_at(self) -> float:
        """The first second after the period."""
        return float(self.end_day * DAY_S)


def day_of(at: float) -> int:
    """Return the day of a time (seconds since the epoch)."""
    return int(at // DAY_S)


def date_of(day: int) -> dt.date:
    """Convert a day to a date. Raises ValueError beyond the year 9999."""
    return dt.date.fromordinal(_EPOCH + day)


def period_of(kind: str, day: int) -> Period:
    """Return the period of that kind that contains `day`. Raises ValueError for an unknown kind,
    and beyond the year 9999."""
    date = date_of(day)
    if kind == DAY:
        return Period(first_day=day, end_day=day + 1, name=date.isoformat())
    if kind == MONTH:
        first = date.replace(day=1)
        after = (first + dt.timedelta(days=31)).replace(day=1)
        return Period(
            first_day=first.toordinal() - _EPOCH,
            end_day=after.toordinal() - _EPOCH,
            name=f"{date:%Y-%m}",
        )
    raise ValueError(f"{kind!r} is not a period: must be one of {', '.join(KINDS)}")


def period_named(name: str) -> Period:
    """Return the period of that name. Raises ValueError."""
    kind = DAY if len(name) > len("2026-11") else MONTH
    date = dt.date.fromisoformat(name if kind == DAY else f"{name}-01")
    return period_of(kind, date.toordinal() - _EPOCH)
