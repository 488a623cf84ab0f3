"""Uploads proven snapshots to the object store in the background, so that other nodes of the same
kind can restore them.

One at a time, in threads of low priority, at most `snapshotter.snapshot_upload_bytes_per_s`. A
failed upload is repeated later; one that was killed goes on with the chunks that the store does not
have yet. Nothing waits for an upload: the snapshot serves this node meanwhile.

What leaves the node is what a snapshot may contain: its tenant's memory at the snapshot point, in
which no secret was ever set (docs/reference/security/snapshots.md). Only proven snapshots
leave it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from pilotlight.core.backoff import Backoff
from snapshotter.errors import SnapshotUnknown
from snapshotter.node_reports import ApprovedCopy
from snapshotter.snapshots.catalog import Catalog, Snapshot, SnapshotCorrupt
from snapshotter.snapshots.remote_copies import ORPHANED_S, RemoteError
from snapshotter.types import SnapshotState

_log = logging.getLogger(__name__)
_AGAIN_FIRST_S, _AGAIN_MAX_S = 30.0, 600.0


class CopyStore(Protocol):
    """The part of `snapshots.remote_copies.RemoteCopies` that uploads use."""

    @property
    def catalog(self) -> Catalog: ...
    @property
    def approved(self) -> dict[str, ApprovedCopy] | None: ...

    async def confirm(self, snapshot: Snapshot) -> bool: ...

    async def push(self, snapshot: Snapshot) -> object: ...

    async def sweep(self, *, now: float) -> int: ...


class SnapshotUploads:
    """Snapshots that wait for their upload. Owner: the event loop; `run` is the only consumer."""

    def __init__(
        self,
        remote: CopyStore | None,
        *,
        again_first_s: float = _AGAIN_FIRST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`remote` None: nothing is uploaded."""
        self._remote = remote
        self._again_first_s = again_first_s
        self._clock = clock
        self._waiting: dict[str, None] = {}
        self._wanted = asyncio.Event()
        self._swept_at = clock()

    def __repr__(self) -> str:
        return f"<SnapshotUploads {len(self._waiting)} waiting>"

    def want(self, snapshot_id: str) -> None:
        """Upload a snapshot when those before it are uploaded."""
        if self._remote is not None:
            self._waiting[snapshot_id] = None
            self._wanted.set()

    async def run(self) -> None:
        """Upload until cancelled, first what an earlier agent did not finish."""
        if self._remote is None:
            return
        for snapshot in self._remote.catalog:
            if snapshot.state is SnapshotState.READY:
                self.want(snapshot.id)
        backoff = Backoff(first_s=self._again_first_s, max_s=_AGAIN_MAX_S)
        while True:
            await self._wait_wanted()
            for snapshot_id in list(self._waiting):
                del self._waiting[snapshot_id]
                try:
                    await self._upload(self._remote, snapshot_id)
                    backoff.reset()
                except (RemoteError, OSError) as e:
                    _log.warning("snapshot.not_pushed snapshot=%s error=%s", snapshot_id, e)
                    self.want(snapshot_id)
                    await backoff.pause()
            await self._sweep(self._remote)

    async def _wait_wanted(self) -> None:
        """Wait for a snapshot to upload, or until it is time to sweep."""
        if not self._waiting:
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ORPHANED_S):
                    await self._wanted.wait()

    async def _upload(self, remote: CopyStore, snapshot_id: str) -> None:
        """Raises RemoteError, OSError."""
        try:
            snapshot = remote.catalog.get(snapshot_id)
            if snapshot.remote or self._is_superfluous(remote, snapshot):
                return
            if not await remote.confirm(snapshot):
                _log.info(
                    "snapshot.pushed snapshot=%s %s", snapshot_id, await remote.push(snapshot)
                )
        except SnapshotUnknown:
            _log.info("snapshot.not_pushed snapshot=%s error=it was removed", snapshot_id)
        except SnapshotCorrupt as e:
            _log.warning("snapshot.not_pushed snapshot=%s error=%s", snapshot_id, e)

    def _is_superfluous(self, remote: CopyStore, snapshot: Snapshot) -> bool:
        """Whether the controller has recorded another copy of the same identity."""
        known = (remote.approved or {}).get(snapshot.manifest.identity.digest())
        return known is not None and known.snapshot != snapshot.id

    async def _sweep(self, remote: CopyStore) -> None:
        if self._clock() - self._swept_at < ORPHANED_S:
            return
        self._swept_at = self._clock()
        try:
            if swept := await remote.sweep(now=self._swept_at):
                _log.info("snapshot.chunks_swept count=%d", swept)
        except RemoteError as e:
            _log.warning("snapshot.chunks_not_swept error=%s", e)
