"""Transactions in a thread, for tasks of the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.database.store import Store, Write

T = TypeVar("T")


async def in_read(store: Store, query: Callable[[sa.Connection], T]) -> T:
    """Run `query` in a read transaction, in a thread."""

    def run() -> T:
        with store.read() as sql:
            return query(sql)

    return await anyio.to_thread.run_sync(run)


async def in_write(store: Store, change: Callable[[Write], T]) -> T:
    """Run `change` in a write transaction, in a thread."""

    def run() -> T:
        with store.write() as write:
            return change(write)

    return await anyio.to_thread.run_sync(run)
