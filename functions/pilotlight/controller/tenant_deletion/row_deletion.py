"""Deletes rows of a tenant in bounded pieces, so that usage records wait for the database's only
writer for some milliseconds at most, however much a tenant has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.tenant_deletion import progress
from pilotlight.controller.tenant_deletion.tenant_tables import TenantRows

PIECE_S: Final = 0.03
"""How long a transaction is to hold the writer."""
FIRST, LEAST, MOST = 100, 4, 2000
"""Rows of a piece: the first one, and bounds of the following ones, which depend on how long the
one before took. Rows may have megabytes."""
READ_AT_ONCE: Final = 20_000
"""Keys that one query finds: some tables have no index by tenant and are read whole."""
PAUSE_S: Final = 0.002
"""Between two pieces, so that others get the writer."""
Keys = Sequence[Sequence[Any]]
OnDelete = Callable[[Write, Keys], None]
"""Called with primary keys, in the transaction that deletes their rows."""


class RowDeletion:
    """Deletes rows of tenants. Owner: the task that deletes tenants."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._limit = FIRST

    def __repr__(self) -> str:
        return f"<RowDeletion of {self._store!r}, {self._limit} rows a piece>"

    async def delete(self, rows: TenantRows, tenant: str, then: OnDelete | None = None) -> None:
        """Delete all rows of the tenant."""
        await self.apply(rows, tenant, partial(_delete, rows, tenant, then))

    async def apply(
        self,
        rows: TenantRows,
        tenant: str,
        change: OnDelete,
        *where: sa.ColumnElement[bool],
    ) -> None:
        """Call `change` with the keys of pieces of the tenant's rows, until there are none. It must
        delete them, or make them differ from `where`."""
        self._limit = FIRST
        while keys := await self.keys(rows, tenant, *where):
            begin = 0
            while begin < len(keys):
                part = keys[begin : begin + self._limit]
                took_s = await anyio.to_thread.run_sync(self._write, change, part)
                begin += len(part)
                fitting = int(len(part) * PIECE_S / max(took_s, 1e-4))
                self._limit = max(LEAST, min(MOST, 2 * self._limit, fitting))
                await asyncio.sleep(PAUSE_S)

    async def keys(
        self,
        rows: TenantRows,
        tenant: str,
        *where: sa.ColumnElement[bool],
        limit: int = READ_AT_ONCE,
    ) -> Keys:
        """Primary keys of some rows of the tenant. They are read apart, because finding them may
        take long, and readers keep no writer waiting."""
        query = sa.select(*rows.table.primary_key).where(rows.where(tenant), *where).limit(limit)

        def read() -> Keys:
            with self._store.read() as sql:
                return [tuple(row) for row in sql.execute(query)]

        return await anyio.to_thread.run_sync(read)

    def _write(self, change: OnDelete, keys: Keys) -> float:
        with self._store.write() as write:
            began = self._clock()
            change(write, keys)
            return self._clock() - began


def is_one_of(table: sa.Table, keys: Keys) -> sa.ColumnElement[bool]:
    """The condition for rows with these primary keys."""
    columns = list(table.primary_key)
    if len(columns) == 1:
        return columns[0].in_([key for (key,) in keys])
    return sa.tuple_(*columns).in_(keys)


def _delete(
    rows: TenantRows, tenant: str, then: OnDelete | None, write: Write, keys: Keys
) -> None:
    if then is not None:
        then(write, keys)
    deleted = write.sql.execute(sa.delete(rows.table).where(is_one_of(rows.table, keys))).rowcount
    progress.count(write, tenant, rows.name, deleted)
