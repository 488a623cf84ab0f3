"""Current figures as text: shown when a page is loaded, and then updated live."""

from __future__ import annotations

from decimal import Decimal

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.dashboard import words
from pilotlight.controller.figures import sums
from pilotlight.controller.figures.spans import HOUR_S


def figures(
    sql: sa.Connection, *, tenant: str, environment: str, currency: str, now: float
) -> dict[str, str]:
    """Return the figures of one environment for this hour (UTC) and today, by their names on the
    pages."""
    table, hour = tables.usage_hours, int(now // HOUR_S)
    first = hour - hour % 24
    where = (
        table.c.tenant == tenant,
        table.c.hour.between(first, hour),
        table.c.environment == environment,
    )
    cells = sums.cells(sql, table, "hour", *where)
    calls = sums.total(c for c in cells if c.kind == "CALL" and c.unit == hour)
    today = sums.total(c for c in cells if c.currency == currency)
    per_min = calls.records / max(1.0, now % HOUR_S / 60)
    return {
        "hour-calls": words.count(calls.records),
        "hour-rate": f"{per_min:,.1f}" if per_min < 100 else words.count(per_min),
        "hour-failed": words.count(calls.errors),
        "today-spent": words.money(today.cost if today.picos else Decimal(0), currency),
        "clock": words.clock(now),
    }
