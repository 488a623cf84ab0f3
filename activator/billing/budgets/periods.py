"""Calendar days and months in UTC, computed from wall time in nanoseconds. Pure functions."""

from __future__ import annotations

import calendar
import time
from dataclasses import dataclass

_NS = 10**9
_DAY_S = 86_400
ROUNDING_NS = 500
"""`started_at` of a record is rounded to the microsecond, so the last half microsecond before
midnight belongs to the next day."""


@dataclass(frozen=True, slots=True)
class Period:
    """One day (`2026-11-21`) or month (`2026-11`). It contains `starts_ns <= t < ends_ns`."""

    name: str
    starts_ns: int
    ends_ns: int


def period_at(kind: str, at_ns: int) -> Period:
    """Return the `day` or `month` that contains a time. Raises ValueError for another kind."""
    at_s = (at_ns + ROUNDING_NS) // _NS
    at = time.gmtime(at_s)
    match kind:
        case "day":
            first_s = at_s - at_s % _DAY_S
            return Period(time.strftime("%Y-%m-%d", at), *_span(first_s, first_s + _DAY_S))
        case "month":
            first_s = calendar.timegm((at.tm_year, at.tm_mon, 1, 0, 0, 0))
            days = calendar.monthrange(at.tm_year, at.tm_mon)[1]
            return Period(time.strftime("%Y-%m", at), *_span(first_s, first_s + days * _DAY_S))
    raise ValueError(f"period = {kind!r}: must be 'day' or 'month'")


def _span(first_s: int, end_s: int) -> tuple[int, int]:
    return first_s * _NS - ROUNDING_NS, end_s * _NS - ROUNDING_NS


def utc_text(at_ns: int) -> str:
    """Format a time in ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((at_ns + ROUNDING_NS) // _NS))
