"""Spans of time: the last hours or days, in whole units of the rollup that covers them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import tables

HOUR_S = 3600
DAY_S = 86_400
DEFAULT = "24h"
_CHOICES = {
    "24h": ("hour", 24, "24 hours"),
    "7d": ("day", 7, "7 days"),
    "30d": ("day", 30, "30 days"),
    "90d": ("day", 90, "90 days"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """`count` units, ending with the current one.

    Attributes:
        unit: `hour` or `day`, in UTC.
        last: number of the newest unit since the epoch.
        words: for display: "24 hours".
    """

    name: str
    unit: str
    count: int
    last: int
    words: str

    @classmethod
    def of(cls, name: str, now: float) -> TimeRange:
        """Return the named span at `now`; an unknown name gives the default."""
        name = name if name in _CHOICES else DEFAULT
        unit, count, words = _CHOICES[name]
        return cls(name=name, unit=unit, count=count, last=int(now // _SECONDS[unit]), words=words)

    @property
    def first(self) -> int:
        """The number of the oldest unit."""
        return self.last - self.count + 1

    @property
    def units(self) -> range:
        """All units, oldest first."""
        return range(self.first, self.last + 1)

    @property
    def unit_s(self) -> int:
        """The length of a unit in seconds."""
        return _SECONDS[self.unit]

    def starts(self) -> list[dt.datetime]:
        """Return the start of each unit, in UTC."""
        return [dt.datetime.fromtimestamp(unit * self.unit_s, tz=dt.UTC) for unit in self.units]

    @property
    def table(self) -> sa.Table:
        """The rollup table of this unit."""
        return tables.usage_hours if self.unit == "hour" else tables.usage_days

    def covers(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """Select the rows of `table` (a rollup of this unit) within the span."""
        return table.c[self.unit].between(self.first, self.last)


_SECONDS = {"hour": HOUR_S, "day": DAY_S}
