"""Archives usage records older than `controller.usage_days` and removes them from the database.

    records → file in the blob store → row (`written`) → records removed, piece by piece → `removed`

Killed before the row, the file is written anew under the same number; after it, the removal goes on
with the ids in the file. A record is removed in the transaction that adds it to the sums of its
archive, so the ledger's sums follow from live records and archives at every commit.

Records are archived by tenant and time, of months whose invoice is issued. Corrections stay: they
are few, and statements list them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.billing import ledger
from pilotlight.controller.billing.usage_aggregation import COLUMNS, DAY_S
from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.pieces import Keys, Pieces
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.database.transactions import in_read, in_write
from pilotlight.controller.usage_archive import archive_file, archives
from pilotlight.controller.usage_archive.archive_file import (
    GENESIS,
    MAX_FILE_BYTES,
    ArchiveDamaged,
    ArchiveFile,
    LedgerRow,
)
from pilotlight.controller.usage_archive.archives import WRITTEN, UsageArchive
from pilotlight.core.object_store import ObjectStore
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.errors import PilotlightError

log = logging.getLogger(__name__)

RECORDS: Final = 20_000
"""Records of a file, some MiB."""
ROUND_S: Final = 3600.0
LEAST_S: Final = DAY_S
"""Least time between two archives that are not full, so that a small platform has one a day."""


class UsageArchiver:
    """Makes archives, one after the other. Owner: the task of `run`."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        *,
        days: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._clock = clock
        self._objects = objects
        self._days = days
        self._pieces = Pieces(store)

    def __repr__(self) -> str:
        return f"<UsageArchiver of {self._store!r}, {self._days} days>"

    async def run(self) -> None:
        """Archive until cancelled."""
        while True:
            try:
                while await self.archive_next():
                    pass
            except (ObjectStoreError, PilotlightError, SQLAlchemyError, ArchiveDamaged) as e:
                # nothing was removed that is not in a file: the next round goes on
                log.error("event=usage_not_archived error=%r", e)
            await asyncio.sleep(ROUND_S)

    async def archive_next(self) -> bool:
        """Complete the archive that was begun, or make the next one; returns whether there may be
        more to do. Raises ObjectStoreError, ArchiveDamaged."""
        last = await in_read(self._store, archives.newest)
        if last is not None and last.state == WRITTEN:
            await self._remove(last)
            return True
        if self._days is None:
            return False
        read = partial(_oldest, now=self._clock(), days=self._days, last=last)
        rows = await in_read(self._store, read)
        if not rows:
            return False
        number, previous = (1, GENESIS) if last is None else (last.number + 1, last.sha256)
        content = await asyncio.to_thread(
            ArchiveFile(number=number, previous=previous, rows=rows).content
        )
        await self._objects.put(
            archive_file.object_key(number), await asyncio.to_thread(archive_file.pack, content)
        )
        made = partial(
            archives.insert,
            number=number,
            sha256=archive_file.sha256(content),
            previous=previous,
            records=len(rows),
        )
        await in_write(self._store, made)
        log.info("event=usage_archived archive=%d records=%d", number, len(rows))
        return True

    async def _remove(self, last: UsageArchive) -> None:
        """Remove the records of an archive that is stored, as its file says. Raises
        ObjectStoreError, ArchiveDamaged."""
        data = await self._objects.get(
            archive_file.object_key(last.number), max_bytes=MAX_FILE_BYTES
        )
        unpack = partial(
            archive_file.unpack,
            data,
            number=last.number,
            digest=last.sha256,
            previous=last.previous,
        )
        ids = (await asyncio.to_thread(unpack)).ids()
        await self._pieces.apply_to(
            [(one,) for one in ids], partial(_remove_records, number=last.number)
        )
        await in_write(self._store, partial(archives.finish, number=last.number))


def _oldest(
    sql: sa.Connection, *, now: float, days: int, last: UsageArchive | None
) -> list[LedgerRow]:
    """The records of the next archive; none while they are few and the last one is of today."""
    end_day = int(now // DAY_S) - days
    sums = tables.usage_days
    owners = sa.select(sums.c.tenant).where(sums.c.day < end_day).distinct()
    rows: list[LedgerRow] = []
    for tenant in sorted(sql.execute(owners).scalars()):
        query = _of_tenant(tenant, before=float(end_day * DAY_S)).limit(RECORDS - len(rows))
        rows += [tuple(row) for row in sql.execute(query)]
        if len(rows) >= RECORDS:
            return rows
    is_early = last is not None and now - last.created_at < LEAST_S
    return [] if is_early else rows


def _of_tenant(tenant: str, *, before: float) -> sa.Select[LedgerRow]:
    c, invoices = tables.usage.c, tables.invoices.c
    is_issued = sa.exists().where(
        invoices.tenant == tenant, invoices.month == c.month, invoices.currency == c.currency
    )
    return (
        sa.select(*(c[name] for name in COLUMNS))
        .where(c.tenant == tenant, c.started_at < before, c.kind != ledger.ADJUSTMENT, is_issued)
        .order_by(c.started_at, c.id)
    )


def _remove_records(write: Write, keys: Keys, *, number: int) -> None:
    """Remove records, and add them to the sums of their archive."""
    table = tables.usage
    query = sa.delete(table).where(bulk.is_one_of(write.sql, tuple(table.primary_key), keys))
    gone = write.sql.execute(query.returning(*(table.c[name] for name in COLUMNS))).all()
    archives.add_sums(write, number, archive_file.day_sums([tuple(row) for row in gone]))
