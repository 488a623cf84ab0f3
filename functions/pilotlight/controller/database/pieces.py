"""Changes of many rows in bounded pieces, so that usage records wait for the database's only writer
for some milliseconds at most, however many rows there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import sqlalchemy as sa

from pilotlight.controller.database import bulk
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.database.transactions import in_read, in_write

PIECE_S: Final = 0.03
"""How long a transaction is to hold the writer."""
FIRST, LEAST, MOST = 100, 4, 2000
"""Rows of a piece: the first one, and bounds of the following ones, which depend on how long the
one before took. Rows may have megabytes."""
READ_AT_ONCE: Final = 20_000
"""Keys that one query finds: it may have to read a large table whole."""
PAUSE_S: Final = 0.002
"""Between two pieces, so that others get the writer."""
Keys = Sequence[Sequence[Any]]
"""Primary keys of some rows."""
Change = Callable[[Write, Keys], object]
"""Changes the rows with these keys."""


class Pieces:
    """Changes rows piece by piece. Owner: one task."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Pieces of {self._store!r}>"

    async def apply(
        self, table: sa.Table, where: sa.ColumnElement[bool], change: Change | None = None
    ) -> None:
        """Apply `change` (None: delete them) to all rows that match `where`; it must make them
        match no more."""
        change = change or (lambda write, keys: delete(write, table, keys))
        while keys := await self.keys(table, where):
            await self.apply_to(keys, change)

    async def apply_to(self, keys: Keys, change: Change) -> None:
        """Apply `change` to the rows with these keys."""
        limit = begin = 0
        while begin < len(keys):
            part = keys[begin : begin + (limit or FIRST)]
            took_s = await in_write(self._store, partial(self._timed, change, part))
            begin += len(part)
            fitting = int(len(part) * PIECE_S / max(took_s, 1e-4))
            limit = max(LEAST, min(MOST, 2 * len(part), fitting))
            await asyncio.sleep(PAUSE_S)

    async def keys(
        self, table: sa.Table, where: sa.ColumnElement[bool], *, limit: int = READ_AT_ONCE
    ) -> Keys:
        """Primary keys of some rows that match `where`. They are read apart, because finding them
        may take long, and readers keep no writer waiting."""
        query = sa.select(*table.primary_key).where(where).limit(limit)
        return await in_read(self._store, lambda sql: [tuple(row) for row in sql.execute(query)])

    def _timed(self, change: Change, keys: Keys, write: Write) -> float:
        began = self._clock()
        change(write, keys)
        return self._clock() - began


def delete(write: Write, table: sa.Table, keys: Keys) -> int:
    """Delete rows; returns how many there were."""
    return bulk.delete(write.sql, table.name, tuple(c.name for c in table.primary_key), keys)
