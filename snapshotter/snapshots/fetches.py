"""Fetches copies of snapshots for starts, without making a start slower than COLD would be.

A start waits for a transfer if transfer and restore together are expected to be faster than a boot,
and no longer than the boot would take. Otherwise it continues without the snapshot, and the
transfer goes on behind it, one at a time, for the next start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pilotlight.core.background_tasks import cancel_all
from snapshotter.node_reports import ApprovedCopy
from snapshotter.snapshots.identity import Identity
from snapshotter.snapshots.mapped_files import BindMounts
from snapshotter.snapshots.remote_copies import RemoteCopies, RemoteError
from snapshotter.snapshots.stored import DiskBudgetExceeded, Snapshot

_log = logging.getLogger(__name__)
PATIENCE_S = 0.5
"""How long a start waits for the store to name a copy; minimum time that it waits for a transfer
that is expected to be worthwhile."""
UNTRIED = 0.5
"""Share of COLD: a proof yields to calls, for seconds on a busy machine, while a start does not. So
a slow proof alone does not rule out RESTORE."""
UNKNOWN_COLD_MS = 60_000.0
"""Of a revision that was never booted: trying its snapshot is worthwhile."""


class SnapshotFetches:
    """Running transfers, one per snapshot. Owner: the event loop. Cancelling a start cancels
    none."""

    def __init__(self, remote: RemoteCopies, *, clock: Callable[[], float] = time.time) -> None:
        self._remote = remote
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[Snapshot | None]] = {}
        self._behind = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<SnapshotFetches {len(self._tasks)} running>"

    async def aclose(self) -> None:
        """Cancel them; what was received of them is removed."""
        await cancel_all(self._tasks.values())

    async def fetch(
        self,
        identity: Identity,
        binds: BindMounts,
        *,
        tenant: str,
        cold_ms: float | None,
        waits: bool = False,
    ) -> Snapshot | None:
        """The snapshot of this identity; None if there is no copy, if it cannot be transferred, or
        if a start would be slower with it.

        cold_ms: expected time of a boot; None: not known here, then as long as that of the node
            that made the snapshot. waits: wait for the transfer, however long it takes.

        Raises LibraryChanged."""
        try:
            async with asyncio.timeout(None if waits else PATIENCE_S):
                found = await self._remote.find(identity, tenant=tenant)
        except (RemoteError, TimeoutError) as e:
            _log.warning("snapshot.fetch_failed revision=%s error=%r", identity.revision, e)
            return None
        if found is None:
            return None
        cold_ms = cold_ms or found.manifest.cold_ms or UNKNOWN_COLD_MS
        restore_ms = found.manifest.proof.restore_ms if found.manifest.proof else 0.0
        start_ms = self._remote.expected_ms(found) + min(restore_ms, UNTRIED * cold_ms)
        is_worthwhile = start_ms < cold_ms
        receiving = partial(self._remote.receive, found, binds, now=self._clock())
        name, is_behind = found.manifest.id, not (waits or is_worthwhile)
        task = self._task(name, self._received(name, receiving, is_behind=is_behind))
        if waits:
            return await asyncio.shield(task)
        if is_worthwhile:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(PATIENCE_S, cold_ms / 1000)):
                    return await asyncio.shield(task)
        _log.info(
            "snapshot.fetched_behind snapshot=%s revision=%s bytes=%d",
            found.manifest.id,
            identity.revision,
            found.packed_bytes,
        )
        return None

    async def prefetch(self, copy: ApprovedCopy) -> Snapshot | None:
        """Transfer a copy before a start needs it; None if it did not succeed, or does not fit."""
        receiving = partial(self._remote.prefetch, copy, now=self._clock())
        return await asyncio.shield(
            self._task(copy.snapshot, self._received(copy.snapshot, receiving, is_behind=True))
        )

    def _task(
        self, snapshot_id: str, receiving: Coroutine[Any, Any, Snapshot | None]
    ) -> asyncio.Task[Snapshot | None]:
        """The running transfer of a snapshot, or a new one."""
        if snapshot_id in self._tasks:
            receiving.close()
            return self._tasks[snapshot_id]
        task = asyncio.create_task(receiving, name=f"fetch snapshot {snapshot_id}")
        self._tasks[snapshot_id] = task
        task.add_done_callback(lambda task: self._ended(snapshot_id, task))
        return task

    def _ended(self, snapshot_id: str, task: asyncio.Task[Snapshot | None]) -> None:
        del self._tasks[snapshot_id]
        if not task.cancelled():
            task.exception()  # retrieved: the start may have gone on without it

    async def _received(
        self,
        snapshot_id: str,
        receiving: Callable[[], Coroutine[Any, Any, Snapshot | None]],
        *,
        is_behind: bool,
    ) -> Snapshot | None:
        """`is_behind`: one at a time, because no start waits for it."""
        async with self._behind if is_behind else contextlib.nullcontext():
            try:
                return await receiving()
            except (RemoteError, DiskBudgetExceeded, OSError) as e:
                _log.warning("snapshot.fetch_failed snapshot=%s error=%s", snapshot_id, e)
                return None
