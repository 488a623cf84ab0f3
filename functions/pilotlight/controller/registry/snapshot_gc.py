"""Deletes the node's snapshots of functions that were removed or have snapshots switched off.

A change deletes them at once if the node agent answers; `sweep` finds the rest. Snapshots of older
revisions are kept because a rollback restores them; the node's own budget evicts the least recently
used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.server.node_backend import NodeBackend
from snapshotter.errors import SnapshotterError

log = logging.getLogger(__name__)

DELETE_TIMEOUT_S = 10.0
"""Limit on waiting for a busy node during a change to the platform: deletion is only renames and
unlinks."""


async def delete_snapshots(agent: NodeBackend, functions: Iterable[str]) -> int | None:
    """Delete all snapshots of these function ids. Returns how many, or None when the node did not
    answer (then `sweep` deletes them)."""
    deleted = 0
    try:
        async with asyncio.timeout(DELETE_TIMEOUT_S):
            for function in functions:
                deleted += await agent.delete_snapshots(function=function)
    except (SnapshotterError, TimeoutError) as e:
        log.warning("event=snapshots_stay error=%r", e)
        return None
    return deleted


async def sweep(agent: NodeBackend, store: Store) -> int:
    """Delete the snapshots of functions that do not exist, or may not have any. Raises
    SnapshotterError."""
    on_node = {str(info.revision).partition("@")[0] for info in await agent.snapshots()}
    kept = await anyio.to_thread.run_sync(_used_snapshots, store, on_node) if on_node else set()
    deleted = sum(
        [await agent.delete_snapshots(function=function) for function in sorted(on_node - kept)]
    )
    if deleted:
        log.info("event=snapshots_swept count=%d", deleted)
    return deleted


def _used_snapshots(store: Store, functions: set[str]) -> set[str]:
    table = tables.functions
    query = sa.select(table.c.id).where(table.c.removed_at.is_(None), table.c.snapshots)
    with store.read() as sql:
        return functions & set(sql.execute(query).scalars())
