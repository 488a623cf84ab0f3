"""Spans of time that pages look at: the last hours or days, in whole units of the rollup that
serves them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller import tables

HOUR_S = 3600
DAY_S = 86_400
DEFAULT = "24h"
_CHOICES = {
    "24h": ("hour", 24, "24 hours"),
    "7d": ("day", 7, "7 days"),
    "30d": ("day", 30, "30 days"),
    "90d": ("day", 90, "90 days"),
}
NAMES = tuple(_CHOICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`count` units that end with the one that runs now.

    Attributes:
        unit: `hour` or `day`, of UTC.
        last: number of the newest unit since the epoch.
        words: for people: "24 hours".
    """

    name: str
    unit: str
    count: int
    last: int
    words: str

    @classmethod
    def of(cls, name: str, now: float) -> Span:
        """The span of that name at `now`; an unknown name is the default one."""
        name = name if name in _CHOICES else DEFAULT
        unit, count, words = _CHOICES[name]
        return cls(name=name, unit=unit, count=count, last=int(now // _SECONDS[unit]), words=words)

    @property
    def first(self) -> int:
        """Number of the oldest unit."""
        return self.last - self.count + 1

    @property
    def units(self) -> range:
        """Every unit, oldest first."""
        return range(self.first, self.last + 1)

    @property
    def unit_s(self) -> int:
        """Length of a unit in seconds."""
        return _SECONDS[self.unit]

    @property
    def length_s(self) -> int:
        """Length of the whole in seconds, the unit that runs counted in full."""
        return self.count * self.unit_s

    def starts(self) -> list[dt.datetime]:
        """When each unit begins, in UTC."""
        return [dt.datetime.fromtimestamp(unit * self.unit_s, tz=dt.UTC) for unit in self.units]

    @property
    def table(self) -> sa.Table:
        """The rollup that has it."""
        return tables.usage_hours if self.unit == "hour" else tables.usage_days

    def holds(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """Rows of `table` (a rollup in this unit) that lie within."""
        return table.c[self.unit].between(self.first, self.last)


_SECONDS = {"hour": HOUR_S, "day": DAY_S}
