"""A ledger from before there were months, rollups and invoices: what it has counts afterwards, to
the last digit."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import pytest
import sqlalchemy as sa

from pilotlight.controller.analytics import usage_reports
from pilotlight.controller.billing import invoices, rollups
from pilotlight.controller.billing.usage_aggregation import COLUMNS, DAY_S, month_of_day
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from tests.fakes.databases import migrate_to
from tests.functions.controller.parts import ManualClock, usage

NOVEMBER_1 = 1_793_491_200.0  # 2026, UTC
NEW = frozenset(
    {
        "caller",
        "corrects",
        "note",
        "month",
        "experiment",
        "arm",
        "unit",
        "degraded",
        "tokens_cached",
        "finish",
        "first_token_ms",
    }
)
MOMENTS = (NOVEMBER_1, NOVEMBER_1 - 0.0004, NOVEMBER_1 - 1e-6, NOVEMBER_1 + 86_400 * 29.999, 0.0)
"""The last parts of a second of a month are that month's, whatever a database rounds."""


@pytest.fixture
def old(url: str) -> Iterator[Store]:
    """A store as 0004 left it."""
    store = Store(url, clock=ManualClock(NOVEMBER_1))
    migrate_to(store, "0004")
    yield store
    store.close()


def test_records_from_before_are_in_months_and_rollups(old: Store) -> None:
    columns = [name for name in COLUMNS if name not in NEW]
    with old.write() as write:
        for number, at in enumerate(MOMENTS):
            record = usage(f"req-{number}/1", started_at=at, cost="0.000000000007").to_json()
            row = {**record, "received_at": at, "cost_picos": 7, "day": int(at // DAY_S)}
            write.sql.execute(
                sa.insert(sa.table("usage", *(sa.column(name) for name in columns))).values(
                    {k: row[k] for k in columns}
                )
            )
    old.migrate()
    with old.write() as write:
        assert (rollups.rebuild_once(write), rollups.rebuild_once(write)) == (len(MOMENTS), 0)
    with old.read() as sql:
        found = {row.id: row for row in sql.execute(sa.select(tables.usage))}
        months = [found[f"req-{number}/1"].month for number in range(len(MOMENTS))]
        assert (
            months
            == [month_of_day(int(at // DAY_S)) for at in MOMENTS]
            == ["2026-11", "2026-10", "2026-10", "2026-11", "1970-01"]
        )
        assert rollups.verify(sql) == []
        (line,) = usage_reports.report(
            sql, tenant="t-1", by="function", since=None, until=None, environment=None
        )
        assert line.cost == Decimal("0.000000000035")
        totals = {one["month"]: one["total"] for one in invoices.listing(sql, tenant="t-1")}
    assert totals == {
        "2026-11": "0.000000000014",
        "2026-10": "0.000000000014",
        "1970-01": "0.000000000007",
    }
