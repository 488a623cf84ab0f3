"""A drill: is what we save enough to go on from, and how long would that take?

A backup is made of the running platform, loaded into a home that is thrown away, and its ledger is
read: the sums of its rollups and of its issued invoices must be those of its records, and every
record that was there before the backup began must be in it. Two numbers come out. RPO: how old the
backup's state was when it was complete; whoever makes one every hour loses at most that hour and
this. RTO: from a bare home to a state that is unpacked, checked against its hashes, migrated and
verified."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import sqlalchemy as sa

from pilotlight.cli.commands.operations import backup as archive
from pilotlight.controller.billing import rollups
from pilotlight.controller.billing.ledger_totals import HALF, money_sums
from pilotlight.controller.database import sqlite_file, tables
from pilotlight.controller.database.store import Store
from pilotlight.errors import PilotlightError
from pilotlight.spec.pricing import COST_QUANTUM


class DrillFailed(PilotlightError):
    """Raised when a loaded backup does not hold what the platform had; the message says what is
    missing or wrong."""

    type = "drill-failed"
    status = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """What the drill found.

    Attributes:
        rpo_s, rto_s: see the module. backup_s, load_s, verify_s: of which the parts took so long.
        records: in the loaded ledger; `later`: those that reached the platform while the backup was
        made, which it lacks. totals: money of the loaded ledger by currency. invoices: issued ones,
        each equal to the sum of its records.
    """

    rpo_s: float
    rto_s: float
    backup_s: float
    load_s: float
    verify_s: float
    size_bytes: int
    records: int
    later: int
    totals: dict[str, str]
    invoices: int


def run_drill(
    home: Path, scratch: Path, *, clock: Callable[[], float], blobs_at: str | None = None
) -> DrillResult:
    """Drill the state of `home` in the empty directory `scratch`. Raises DrillFailed, and what
    `save` and `load` raise."""
    elapsed = time.perf_counter
    began, wall = elapsed(), clock()
    saved = archive.save_backup(home, scratch / "backup.tar", now=wall, blobs_at=blobs_at)
    complete = elapsed()
    archive.load_backup(scratch / "backup.tar", scratch / "home", replace=False, now=clock())
    loaded = elapsed()
    records, totals, invoices = _verify(scratch / "home", clock)
    verified = elapsed()
    later = _compare(home, scratch / "home", before=wall, clock=clock)
    return DrillResult(
        rpo_s=complete - began,
        rto_s=verified - complete,
        backup_s=complete - began,
        load_s=loaded - complete,
        verify_s=verified - loaded,
        size_bytes=saved.size_bytes,
        records=records,
        later=later,
        totals=totals,
        invoices=invoices,
    )


def _open(home: Path, clock: Callable[[], float]) -> Store:
    return Store(f"sqlite:///{sqlite_file.find_database(home)}", clock=clock)


def _verify(home: Path, clock: Callable[[], float]) -> tuple[int, dict[str, str], int]:
    """Records, money by currency, and issued invoices of a loaded ledger. Raises DrillFailed."""
    store = _open(home, clock)
    try:
        store.migrate()
        with store.write() as write:
            rollups.rebuild_once(write)
        with store.read() as sql:
            if found := rollups.verify(sql):
                raise DrillFailed(
                    f"{len(found)} sums of the loaded ledger differ from its records, first "
                    f"{found[0]}"
                )
            return rollups.count(sql), _totals(sql), _check_invoices(sql)
    finally:
        store.close()


def _totals(sql: sa.Connection) -> dict[str, str]:
    c = tables.usage.c
    found = sql.execute(
        sa.select(c.currency, *money_sums(tables.usage)).group_by(c.currency).order_by(c.currency)
    )
    return {
        currency: format(COST_QUANTUM * (int(high) * HALF + int(low)), "f")
        for currency, high, low in found
    }


def _check_invoices(sql: sa.Connection) -> int:
    c = tables.usage.c
    issued = sql.execute(sa.select(tables.invoices)).all()
    for row in issued:
        theirs = (c.tenant == row.tenant) & (c.month == row.month) & (c.currency == row.currency)
        high, low = sql.execute(sa.select(*money_sums(tables.usage)).where(theirs)).one()
        summed = COST_QUANTUM * (int(high or 0) * HALF + int(low or 0))
        if summed != Decimal(row.total) or Decimal(json.loads(row.document)["total"]) != summed:
            raise DrillFailed(
                f"invoice {row.id} says {row.total}, and its records add up to {summed:f}"
            )
    return len(issued)


def _compare(home: Path, loaded: Path, *, before: float, clock: Callable[[], float]) -> int:
    """What the live ledger had before the backup began must be in the copy; returns how many
    records came since. Raises DrillFailed."""

    def counted(where: Path) -> tuple[int, int]:
        with contextlib.closing(_open(where, clock)) as store, store.read() as sql:
            return _count(sql, before)

    live: Sequence[int] = sqlite_file.run_as_owner(
        sqlite_file.database_owner(home), lambda: counted(home)
    )
    copied = counted(loaded)
    if live[0] != copied[0]:
        raise DrillFailed(
            f"the ledger had {live[0]} records before the backup began, and the copy has "
            f"{copied[0]} of them"
        )
    return max(0, live[1] - copied[1])


def _count(sql: sa.Connection, before: float) -> tuple[int, int]:
    """(records received before, all)."""
    c = tables.usage.c
    older = sa.func.coalesce(sa.func.sum(sa.case((c.received_at < before, 1), else_=0)), 0)
    row = sql.execute(sa.select(older, sa.func.count())).one()
    return int(row[0]), int(row[1])
