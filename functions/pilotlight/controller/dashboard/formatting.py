"""Formatting of numbers for display: money, durations, counts, bytes. Exact amounts are in invoices
and exports."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from pilotlight.spec.pricing import COST_QUANTUM, GIB

DASH = "\u2013"
TIMES = "\u00d7"
MINUS = "\u2212"
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£"}
_MIB = 1024**2


def amount(picos: int) -> Decimal:
    """Convert picounits to money."""
    return COST_QUANTUM * picos


def money(amount: Decimal | str, currency: str = "") -> str:
    """Format an amount with two decimals from 1 on, else with four, else up to its second
    significant digit: a nonzero amount is never rounded to zero."""
    amount = Decimal(amount)
    sign = MINUS if amount < 0 else ""
    return f"{sign}{_sign(currency)}{_digits(abs(amount))}"


def _digits(amount: Decimal) -> str:
    if amount == 0:
        return "0"
    if amount >= 1:
        return f"{amount:,.2f}"
    return f"{amount:.{min(12, max(4, 1 - amount.adjusted()))}f}"


def price(amount: Decimal, currency: str = "") -> str:
    """Format the cost of one call for a column: eight decimals, twelve if these would all be
    zero."""
    digits = 8 if amount == 0 or abs(amount) >= Decimal("1e-8") else 12
    return f"{MINUS if amount < 0 else ''}{_sign(currency)}{abs(amount):,.{digits}f}"


def column_money(amount: Decimal | str, currency: str = "") -> str:
    """Format an amount for a column, where points align: four decimals; a smaller one is shown as
    below the least that they show."""
    amount = Decimal(amount)
    if 0 < abs(amount) < Decimal("0.0001"):
        return f"{'> ' + MINUS if amount < 0 else '< '}{_sign(currency)}0.0001"
    return f"{MINUS if amount < 0 else ''}{_sign(currency)}{abs(amount):,.4f}"


def _sign(currency: str) -> str:
    return _SIGNS.get(currency, f"{currency} " if currency else "")


def milliseconds(value: float | None) -> str:
    """Format milliseconds as 12 ms, 1.24 s, 3.1 min, or a dash."""
    if value is None:
        return DASH
    if value < 999.5:
        return f"{value:.0f} ms"
    if value < 99_950:
        return f"{value / 1000:.2f} s"
    return duration(value / 1000)


def duration(seconds: float) -> str:
    """Format seconds with two digits in a suitable unit: 12 s, 4.2 min, 3.5 h, 2.1 d."""
    for bound, length, unit in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < bound:
            return f"{_short(seconds / length)} {unit}"
    return f"{_short(seconds / 86_400)} d"


def _short(number: float) -> str:
    return f"{number:.1f}" if 0 < number < 9.95 else f"{number:,.0f}"


def count(number: float) -> str:
    """Format a number as 1,234 or 1.2 M, with at most five digits."""
    for bound, length, unit in (
        (1e5, 1.0, ""),
        (9.995e5, 1e3, " k"),
        (9.995e8, 1e6, " M"),
        (9.995e11, 1e9, " G"),
    ):
        if abs(number) < bound:
            return f"{number:,.0f}" if length == 1.0 else f"{number / length:.3g}{unit}"
    return f"{number / 1e12:.3g} T"


def percent(share: float | None) -> str:
    """Format a share between 0 and 1 as 0.3 %, 42 %; small shares keep a digit, and a nonzero share
    is never shown as zero."""
    if share is None:
        return DASH
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if value < 9.95 or 99 < value < 100 else f"{value:.0f} %"


def size(count_bytes: float) -> str:
    """Format bytes as B, KiB, MiB or GiB."""
    if count_bytes < 1024:
        return f"{count_bytes:.0f} B"
    if count_bytes < _MIB:
        return f"{_short(count_bytes / 1024)} KiB"
    if count_bytes < GIB:
        return f"{_short(count_bytes / _MIB)} MiB"
    gib = count_bytes / GIB
    return f"{gib:.3g} GiB" if gib < 999.5 else f"{gib:,.0f} GiB"


def ago(at: float, now: float) -> str:
    """Format how long ago a time was."""
    return f"{duration(max(0.0, now - at))} ago"


def clock(at: float) -> str:
    """Format a time as 21 Nov 11:05:06, in UTC."""
    return f"{dt.datetime.fromtimestamp(at, tz=dt.UTC):%d %b %H:%M:%S}".lstrip("0")


def instant(at: float) -> str:
    """Format a time as 21 Nov 11:05:06.034, in UTC."""
    return f"{clock(at)}.{int(at % 1 * 1000):03d}"


def day(at: float) -> str:
    """Format a date as 21 Nov 2026, in UTC."""
    return f"{dt.datetime.fromtimestamp(at, tz=dt.UTC):%d %b %Y}".lstrip("0")


def month(name: str) -> str:
    """Format "2026-11" as November 2026."""
    return f"{dt.date.fromisoformat(f'{name}-01'):%B %Y}"


KIND_WORDS: Mapping[str, str] = {
    "CALL": "Execution",
    "START": "Cold starts",
    "IDLE": "Idle",
    "RESERVED": "Reserved",
    "FREE_START": "Starts for copies of calls",
    "FREE_IDLE": "Idle, not paid",
    "ASLEEP": "Suspended",
    "CPU": "CPU outside calls",
    "BUILD": "Builds",
    "STORAGE": "Storage",
    "ADJUSTMENT": "Corrections",
}


def kind(name: str) -> str:
    """Return the display name of a kind of record."""
    return KIND_WORDS.get(name, name.capitalize())


FILTERS: Mapping[str, Callable[..., Any]] = {
    "money": money,
    "price": price,
    "column_money": column_money,
    "milliseconds": milliseconds,
    "duration": duration,
    "count": count,
    "percent": percent,
    "size": size,
    "ago": ago,
    "clock": clock,
    "instant": instant,
    "day": day,
    "month": month,
    "kind": kind,
    "decimal": Decimal,
}
