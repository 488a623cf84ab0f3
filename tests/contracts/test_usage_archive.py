"""Usage records leave the database for a chain of files: none is lost or counted twice wherever the
controller is killed, and a file that was changed, lost or moved is named."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.billing import billing_jobs, corrections, invoices, ledger, rollups
from pilotlight.controller.database import pieces, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.controller.usage_archive import archive_file, archiver
from pilotlight.controller.usage_archive.archive_file import object_key
from pilotlight.controller.usage_archive.archiver import UsageArchiver
from pilotlight.controller.usage_archive.verification import check_archive
from pilotlight.core.object_store import DirectoryStore
from tests.fakes.killed_commits import Killed, killed_after
from tests.functions.controller.parts import ManualClock, usage

DAY_S = 86_400.0
DAYS = 400


@pytest.fixture(autouse=True)
def _small_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archiver, "RECORDS", 10)


@pytest.fixture(name="objects")
def _objects(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "blobs")


@pytest.fixture(name="tenant")
def _tenant(store: Store, clock: ManualClock) -> str:
    """A tenant with 26 records of long ago, of which half name a customer, some of today, and an
    invoice for each month that ended."""
    with store.write() as write:
        made = tenants.create(write, name="acme", uid_base=None, actor="platform").id
        ledger.add(write, [_record(made, n, clock.now - (DAYS + 2 + n) * DAY_S) for n in range(26)])
        ledger.add(write, [_record(made, n, clock.now - n) for n in range(100, 103)])
    billing_jobs.issue_due_invoices(store, after_days=3)
    return made


def _record(tenant: str, number: int, at: float) -> Any:
    customer = "ana" if number % 2 else ""
    return usage(
        f"req-{number}/1", tenant=tenant, started_at=at, cost="0.123456789012", customer=customer
    )


def archiver_of(store: Store, objects: DirectoryStore, clock: ManualClock) -> UsageArchiver:
    return UsageArchiver(store, objects, days=DAYS, clock=clock)


async def archive_all(store: Store, objects: DirectoryStore, clock: ManualClock) -> None:
    made = archiver_of(store, objects, clock)
    while await made.archive_next():
        pass
    clock.now += DAY_S
    while await made.archive_next():
        pass


def live_ids(store: Store) -> set[str]:
    with store.read() as sql:
        return set(sql.execute(sa.select(tables.usage.c.id)).scalars())


def archived_ids(store: Store, tmp_path: Path) -> list[str]:
    with store.read() as sql:
        rows = sql.execute(sa.select(tables.usage_archives)).all()
    return [
        one
        for row in rows
        for one in archive_file.unpack(
            (tmp_path / "blobs" / object_key(row.number)).read_bytes(),
            number=row.number,
            digest=row.sha256,
            previous=row.previous,
        ).ids()
    ]


def bills(store: Store, tenant: str) -> list[dict[str, Any]]:
    """All invoices, and the statements of a customer."""
    found = []
    with store.read() as sql:
        for one in invoices.listing(sql, tenant=tenant):
            which = one["id"] or one["month"]
            found.append(invoices.show(sql, tenant=tenant, which=which, now=1.0))
            part = {"customer": "ana"}
            found.append(invoices.statement(sql, tenant=tenant, which=which, part=part, now=1.0))
    return found


def assert_sums_match(store: Store) -> None:
    with store.read() as sql:
        assert rollups.verify(sql) == []
        assert invoices.verify_totals(sql) == []


async def test_old_records_leave_the_database_and_bills_stay(
    store: Store, objects: DirectoryStore, clock: ManualClock, tenant: str, tmp_path: Path
) -> None:
    before = bills(store, tenant)
    assert len(before) > 2
    await archive_all(store, objects, clock)
    assert live_ids(store) == {f"req-{n}/1" for n in range(100, 103)}
    assert sorted(archived_ids(store, tmp_path)) == sorted(f"req-{n}/1" for n in range(26))
    assert [(await check_archive(store, objects, n)).problem for n in (1, 2, 3)] == ["", "", ""]
    assert_sums_match(store)
    assert bills(store, tenant) == before
    with store.write() as write:
        rollups.rebuild(write)
    assert_sums_match(store)


async def test_records_without_an_invoice_and_corrections_stay(
    store: Store, objects: DirectoryStore, clock: ManualClock, tenant: str
) -> None:
    with store.write() as write:
        corrections.correct(write, record="req-3/1", amount="-0.1", note="a gift", actor="k-1")
        ledger.add(write, [_record(tenant, 50, clock.now - 500 * DAY_S)])  # on an open month
    await archive_all(store, objects, clock)
    with store.read() as sql:
        kinds = set(sql.execute(sa.select(tables.usage.c.kind)).scalars())
    assert kinds == {"CALL", "ADJUSTMENT"}
    assert "req-50/1" in live_ids(store)
    assert_sums_match(store)


@pytest.fixture(name="small_pieces")
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "MOST"):
        monkeypatch.setattr(pieces, name, 4)


@pytest.mark.usefixtures("small_pieces")
async def test_killed_at_any_transaction_no_record_is_lost_or_doubled(
    store: Store, objects: DirectoryStore, clock: ManualClock, tenant: str, tmp_path: Path
) -> None:
    expected, commits, kills, state = live_ids(store), 0, 0, ""
    while True:
        with killed_after(store, commits), contextlib.suppress(Killed):
            if not await archiver_of(store, objects, clock).archive_next():
                break
        assert_sums_match(store)
        with store.read() as sql:
            rows = sql.execute(sa.select(tables.usage_archives)).all()
        before, state = state, f"{rows} {len(live_ids(store))}"
        # what is safe to repeat takes a transaction again
        commits = commits + 1 if state == before else 0
        kills += 1
        assert kills < 200
    clock.now += DAY_S
    await archive_all(store, objects, clock)
    ids = archived_ids(store, tmp_path)
    assert kills > 20
    assert len(ids) == len(set(ids)) == 26
    assert set(ids) | live_ids(store) == expected
    assert not set(ids) & live_ids(store)


async def test_an_archive_that_was_changed_lost_or_moved_is_named(
    store: Store, objects: DirectoryStore, clock: ManualClock, tenant: str, tmp_path: Path
) -> None:
    await archive_all(store, objects, clock)
    first, second = (tmp_path / "blobs" / object_key(n) for n in (1, 2))
    whole, other = first.read_bytes(), second.read_bytes()

    async def problems() -> list[str]:
        return [(await check_archive(store, objects, n)).problem for n in (1, 2, 3)]

    content = gzip.decompress(whole)
    first.write_bytes(archive_file.pack(content.replace(b"123456789012", b"023456789012", 1)))
    found = await problems()
    assert "archive 1 was changed" in found[0]
    assert found[1:] == ["", ""]

    first.write_bytes(whole[:-9])
    assert "archive 1" in (await problems())[0]

    first.write_bytes(other)
    second.write_bytes(whole)
    found = await problems()
    assert ["was changed" in one for one in found] == [True, True, False]

    second.write_bytes(other)
    first.unlink()
    assert "archive 1 is missing" in (await problems())[0]
    first.write_bytes(whole)
    assert await problems() == ["", "", ""]


async def test_a_forged_row_breaks_the_chain_and_the_sums(
    store: Store, objects: DirectoryStore, clock: ManualClock, tenant: str
) -> None:
    await archive_all(store, objects, clock)
    table, days = tables.usage_archives, tables.usage_archive_days
    with store.write() as write:
        write.sql.execute(sa.update(table).where(table.c.number == 2).values(previous="ab" * 32))
    assert "does not follow" in (await check_archive(store, objects, 2)).problem
    with store.write() as write:
        write.sql.execute(sa.delete(days).where(days.c.archive == 3))
        write.sql.execute(sa.delete(table).where(table.c.number == 3))
    with store.read() as sql:
        assert rollups.verify(sql)


async def test_without_a_window_nothing_is_archived(
    store: Store, objects: DirectoryStore, clock: ManualClock, tenant: str
) -> None:
    assert not await UsageArchiver(store, objects, days=None, clock=clock).archive_next()
    assert len(live_ids(store)) == 29
