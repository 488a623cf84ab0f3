"""Records of the ledger, one after the other, without holding a transaction while they travel.

They come by (started_at, id). The last record that arrived is the cursor: who was cut off asks
again with its id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.aggregation import AT, COLUMNS
from pilotlight.controller.store import Store
from pilotlight.errors import NotFound

FIELDS = tuple(name for name in COLUMNS if name not in ("cost_picos", "day"))
"""Of an exported record: those of `UsageRecord`, `received_at`, and `month`, whose invoice has
it."""
PAGE = 1000
assert set(FIELDS) <= AT.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which records: since <= started_at < until, of the invoice `month`; None = all."""

    tenant: str
    since: float | None = None
    until: float | None = None
    environment: str | None = None
    month: str | None = None


def position(sql: sa.Connection, *, tenant: str, cursor: str) -> tuple[float, str]:
    """Where to go on after a record. Raises NotFound when it is not this tenant's."""
    c = tables.usage.c
    found = sql.execute(
        sa.select(c.started_at, c.id).where(c.id == cursor, c.tenant == tenant)
    ).first()
    if found is None:
        raise NotFound(f"cursor = {cursor!r}: there is no such record", parameter="cursor")
    return float(found.started_at), str(found.id)


def pages(
    store: Store, wanted: Wanted, *, after: tuple[float, str] | None, limit: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Pages of records, each read in a transaction of its own."""
    left = limit
    while left is None or left > 0:
        with store.read() as sql:
            page = _page(sql, wanted, after=after, limit=PAGE if left is None else min(PAGE, left))
        if not page:
            return
        yield page
        after = page[-1]["started_at"], page[-1]["id"]
        left = None if left is None else left - len(page)


def _page(
    sql: sa.Connection, wanted: Wanted, *, after: tuple[float, str] | None, limit: int
) -> list[dict[str, Any]]:
    c = tables.usage.c
    within = [c.tenant == wanted.tenant]
    since = wanted.since if after is None else after[0]
    if since is not None:
        within.append(c.started_at >= since)
    if after is not None:
        within.append(sa.tuple_(c.started_at, c.id) > after)
    if wanted.until is not None:
        within.append(c.started_at < wanted.until)
    within += [
        c[name] == value
        for name in ("environment", "month")
        if (value := getattr(wanted, name)) is not None
    ]
    query = (
        sa.select(*(c[name] for name in FIELDS))
        .where(*within)
        .order_by(c.started_at, c.id)
        .limit(limit)
    )
    return [dict(row) for row in sql.execute(query).mappings()]
