"""Tests that a backup of the running platform can be restored, and measures RPO and RTO.

The drill makes a backup, loads it into a temporary home, and verifies its ledger: the rollups and
issued invoices must equal the sums of their records, and every record from before the backup must
be present. RPO is the age of the backup's state when the backup is complete; with hourly backups,
at most an hour plus the RPO is lost. RTO is the time from an empty home to a state that is
unpacked, checked against its hashes, migrated and verified."""

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
from pilotlight.controller.billing.ledger_totals import money_sums, picos_of
from pilotlight.controller.database import sqlite_file, tables
from pilotlight.controller.database.store import Store
from pilotlight.errors import PilotlightError
from pilotlight.spec.pricing import COST_QUANTUM, picos_text


class DrillFailed(PilotlightError):
    """Raised when a loaded backup is incomplete or inconsistent; the message says what is missing
    or wrong."""

    type = "drill-failed"
    status = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """Result of a drill.

    Attributes:
        rpo_s, rto_s: as defined by the module. backup_s, load_s, verify_s: durations of the steps.
        records: number in the loaded ledger. later: number of records that arrived during the
        backup, which it lacks. totals: amounts of the loaded ledger by currency. invoices: number
        of issued invoices, each equal to the sum of its records.
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
    """Run a drill for `home` in the empty directory `scratch`. Raises DrillFailed and the errors of
    `save_backup` and `load_backup`."""
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
    """Verify a loaded ledger; return its record count, totals by currency, and invoice count.
    Raises DrillFailed."""
    store = _open(home, clock)
    try:
        store.migrate()
        with store.read() as sql:
            if found := rollups.verify(sql):
                raise DrillFailed(
                    f"{len(found)} sums of the loaded ledger differ from its records, the first is "
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
    return {currency: picos_text(picos_of(high, low)) for currency, high, low in found}


def _check_invoices(sql: sa.Connection) -> int:
    c = tables.usage.c
    issued = sql.execute(sa.select(tables.invoices)).all()
    for row in issued:
        theirs = (c.tenant == row.tenant) & (c.month == row.month) & (c.currency == row.currency)
        high, low = sql.execute(sa.select(*money_sums(tables.usage)).where(theirs)).one()
        summed = COST_QUANTUM * picos_of(high, low)
        if summed != Decimal(row.total) or Decimal(json.loads(row.document)["total"]) != summed:
            raise DrillFailed(
                f"invoice {row.id} has total {row.total}, but its records add up to {summed:f}"
            )
    return len(issued)


def _compare(home: Path, loaded: Path, *, before: float, clock: Callable[[], float]) -> int:
    """Check that the copy has all records from before the backup; return the number of later ones.
    Raises DrillFailed."""

    def counted(where: Path) -> tuple[int, int]:
        with contextlib.closing(_open(where, clock)) as store, store.read() as sql:
            return _count(sql, before)

    live: Sequence[int] = sqlite_file.run_as_owner(
        sqlite_file.database_owner(home), lambda: counted(home)
    )
    copied = counted(loaded)
    if live[0] != copied[0]:
        raise DrillFailed(
            f"the ledger had {live[0]} records before the backup began, but the copy has "
            f"{copied[0]} of them"
        )
    return max(0, live[1] - copied[1])


def _count(sql: sa.Connection, before: float) -> tuple[int, int]:
    """The number of records received before `before`, and of all records."""
    c = tables.usage.c
    older = sa.func.coalesce(sa.func.sum(sa.case((c.received_at < before, 1), else_=0)), 0)
    row = sql.execute(sa.select(older, sa.func.count())).one()
    return int(row[0]), int(row[1])
