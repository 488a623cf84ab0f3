"""Current figures as text: shown when a page is loaded, and then updated live."""

from __future__ import annotations

from decimal import Decimal

import sqlalchemy as sa

from pilotlight.controller.analytics import rollup_queries
from pilotlight.controller.analytics.time_range import HOUR_S
from pilotlight.controller.dashboard import formatting
from pilotlight.controller.database import tables


def live_figures(
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
    cells = rollup_queries.cells(sql, table, "hour", *where)
    calls = rollup_queries.total(c for c in cells if c.kind == "CALL" and c.unit == hour)
    today = rollup_queries.total(c for c in cells if c.currency == currency)
    per_min = calls.records / max(1.0, now % HOUR_S / 60)
    return {
        "hour-calls": formatting.count(calls.records),
        "hour-rate": f"{per_min:,.1f}" if per_min < 100 else formatting.count(per_min),
        "hour-failed": formatting.count(calls.errors),
        "today-spent": formatting.money(today.cost if today.picos else Decimal(0), currency),
        "clock": formatting.clock(now),
    }
