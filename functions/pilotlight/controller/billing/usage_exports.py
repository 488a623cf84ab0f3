"""Export of the ledger's records, without holding a transaction while they are sent: as they are,
or each as a CloudEvent (https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/spec.md).

Records are ordered by (started_at, id). A client resumes an interrupted export with the id of the
last record that it received as the cursor."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing.ledger_totals import names_customer
from pilotlight.controller.billing.usage_aggregation import AT, COLUMNS
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.errors import NotFound
from pilotlight.protocol import CONTENT_JSON

FIELDS = tuple(name for name in COLUMNS if name not in ("cost_picos", "day"))
"""Fields of an exported record: those of `UsageRecord`, `received_at`, and `month`, the month of
the invoice that includes the record."""
EVENT_TYPE = "dev.pilotlight.usage.recorded"
PAGE = 1000
assert set(FIELDS) <= AT.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportQuery:
    """A filter for records: since <= started_at < until, on the invoice of `month`, of `customer`;
    None = all."""

    tenant: str
    since: float | None = None
    until: float | None = None
    environment: str | None = None
    month: str | None = None
    customer: str | None = None


def cloud_event(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as a CloudEvent in the JSON format. Source and id are the same whenever it is
    sent, so that a receiver may get it again."""
    started_at = dt.datetime.fromtimestamp(record["started_at"], tz=dt.UTC)
    customer = record["customer"]
    return {
        "specversion": "1.0",
        "type": EVENT_TYPE,
        "source": f"/tenants/{record['tenant']}",
        "id": record["id"],
        "time": started_at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        **({"subject": customer} if customer else {}),
        "datacontenttype": CONTENT_JSON,
        "data": dict(record),
    }


def position(sql: sa.Connection, *, tenant: str, cursor: str) -> tuple[float, str]:
    """Return the position of a record, to resume after it. Raises NotFound when the tenant has no
    such record."""
    c = tables.usage.c
    found = sql.execute(
        sa.select(c.started_at, c.id).where(c.id == cursor, c.tenant == tenant)
    ).first()
    if found is None:
        raise NotFound(f"cursor = {cursor!r}: there is no such record", parameter="cursor")
    return float(found.started_at), str(found.id)


def pages(
    store: Store, wanted: ExportQuery, *, after: tuple[float, str] | None, limit: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Yield pages of records, each read in a separate transaction."""
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
    sql: sa.Connection, wanted: ExportQuery, *, after: tuple[float, str] | None, limit: int
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
        for name in ("environment", "month", "customer")
        if (value := getattr(wanted, name)) is not None
    ]
    if wanted.customer is not None:
        within.append(names_customer(tables.usage))
    query = (
        sa.select(*(c[name] for name in FIELDS))
        .where(*within)
        .order_by(c.started_at, c.id)
        .limit(limit)
    )
    return [dict(row) for row in sql.execute(query).mappings()]
