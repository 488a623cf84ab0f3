"""Formats tables, money, times and sizes for the terminal, and parses typed values. Pure."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

NO_VALUE = "-"
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def format_table(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, empty: str
) -> Table | str:
    """Format rows as a table. `columns` maps keys to headings, in order; a column without any value
    is omitted. Return `empty` if there are no rows."""
    from rich.markup import escape
    from rich.table import Table

    if not rows:
        return empty
    shown = {
        key: heading
        for key, heading in columns.items()
        if any(row.get(key) is not None for row in rows)
    }
    out = Table(box=None, header_style="bold", pad_edge=False)
    for key, heading in shown.items():
        out.add_column(
            heading,
            justify="right" if all(is_number(row.get(key)) for row in rows) else "left",
            overflow="fold",
        )
    for row in rows:
        out.add_row(*(escape(format_cell(key, row.get(key))) for key in shown))
    return out


def is_number(value: Any) -> bool:
    """Whether a cell is aligned to the right: a number, or no value."""
    return value is None or (
        isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    )


def format_cell(key: str, value: Any) -> str:
    """Format one value as text; the suffix of its key determines the unit."""
    if value is None or value in ("", [], {}):
        return NO_VALUE
    if key.endswith("_at") and isinstance(value, int | float):
        return format_time(value)
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if key == "cost":
        return format_money(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple | Mapping):
        flat = all(
            not isinstance(v, Mapping | list | tuple)
            for v in (value.values() if isinstance(value, Mapping) else value)
        )
        if isinstance(value, list | tuple) and flat:
            return ", ".join(str(v) for v in value)
        return json.dumps(value, default=str)
    return str(value)


def format_time(at: float) -> str:
    """Format a Unix time in the local time zone, to the second."""
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_bytes(count: int) -> str:
    """Format bytes in binary units: `1.5 GiB`."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def count_files(count: int) -> str:
    """`1 file`, `2 files`."""
    return f"{count} file" if count == 1 else f"{count} files"


def format_money(amount: Any, currency: str = "") -> str:
    """Format an amount without trailing zeros or an exponent: `0.0000134`."""
    try:
        text = f"{Decimal(str(amount)):f}"
    except InvalidOperation:
        return str(amount)
    plain = (text.rstrip("0").rstrip(".") if "." in text else text) or "0"
    return f"{plain} {currency}".strip()


def format_milliseconds(amount: float) -> str:
    """Format milliseconds: `5.40 s` from one second, `29 ms` from ten, else `0.4 ms`."""
    if amount >= 1000:
        return f"{amount / 1000:.2f} s"
    return f"{amount:.0f} ms" if amount >= 10 else f"{amount:.1f} ms"


def parse_duration_s(text: str) -> float:
    """Parse `300ms`, `90`, `90s`, `5m`, `2h`, `7d` or `1w` as seconds. Raises InvalidInput."""
    unit = next((unit for unit in _UNITS_S if text.endswith(unit)), "")
    number = text.removesuffix(unit)
    try:
        amount = float(number)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise InvalidInput(
            f"{text!r} is not a duration", hint="Write a number and a unit: 30s, 5m, 2h, 7d or 1w."
        )
    return amount * _UNITS_S.get(unit, 1)


def parse_share(text: str, *, option: str) -> float:
    """Parse `30%` or `0.3` as a share of at least 0. Raises InvalidInput."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise InvalidInput(f"{option} {text!r} is not a share", hint="Write 30% or 0.3.")
    return share


def parse_time(text: str, *, now: float) -> float:
    """Parse a duration before `now`, or an ISO 8601 date or time (local unless it has an offset),
    as seconds since the epoch."""
    try:
        return dt.datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return now - parse_duration_s(text)


def parse_pairs(words: Iterable[str], *, option: str) -> dict[str, Any]:
    """Parse `key=value` words. A value that is valid JSON is parsed, any other is text. Raises
    InvalidInput."""
    out: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise InvalidInput(
                f"{option} {word!r} is not key=value",
                hint=f"Write {option} name=value; the value may be JSON.",
            )
        out[key] = parse_json_or_text(value)
    return out


def parse_json_or_text(text: str) -> Any:
    """Parse `text` as JSON; return `text` itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
