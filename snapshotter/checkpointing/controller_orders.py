"""What a node tells the controller of a cluster about its snapshots, and does as the controller
answers.

The controller answers each report of the node (`agent.node_report`); there is no other way from it
to the node. Orders name snapshots that the node reported, or copies that the controller recorded:
delete, quarantine, remove a copy from the object store, receive one before a start needs it. They
are repeated until a report shows that they were carried out, so nothing is stored here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from pilotlight.core.background_tasks import cancel_all
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.errors import SnapshotterError
from snapshotter.node_reports import MAX_NODE_SNAPSHOTS, ApprovedCopy, NodeSnapshot, SnapshotOrders
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.remote_copies import RemoteError
from snapshotter.snapshots.stored import Snapshot
from snapshotter.types import SnapshotInfo, SnapshotState

_log = logging.getLogger(__name__)
_MOST_FORGOTTEN = 1000
_STORE_S = 120.0
"""Timeout of removing one copy from a store that answers slowly."""


class ControllerOrders:
    """Reports of snapshots, and the orders in answer to them. Owner: the event loop.

    Attributes:
        version: of the list of approved copies that this node has; "" without one.
    """

    def __init__(self, snapshots: SnapshotApi) -> None:
        self._snapshots = snapshots
        self._running: dict[str, asyncio.Task[None]] = {}
        self._forgotten: dict[str, None] = {}
        self.version = ""

    def __repr__(self) -> str:
        return f"<ControllerOrders {len(self._running)} running>"

    async def aclose(self) -> None:
        """Cancel what is under way; the next agent gets the orders again."""
        await cancel_all(self._running.values())

    @property
    def kind(self) -> str:
        """What nodes must have in common to restore each other's snapshots; "" if this node makes
        none."""
        stock = self._snapshots.stock
        return stock.node.kind() if stock is not None else ""

    def reported(self) -> tuple[NodeSnapshot, ...]:
        """The snapshots on this node in any state, most recently used first."""
        stock = self._snapshots.stock
        if stock is None:
            return ()
        infos = sorted(self._snapshots.infos({}), key=lambda info: -info.last_used_at)
        restorable = {snapshot.id: snapshot for snapshot in stock.catalogue}
        return tuple(
            _reported(restorable.get(info.id), info) for info in infos[:MAX_NODE_SNAPSHOTS]
        )

    def forgotten(self) -> tuple[str, ...]:
        """Snapshots whose copies this node has removed from the store."""
        return tuple(self._forgotten)

    def apply(self, orders: SnapshotOrders) -> None:
        """Begin to do what the controller answered."""
        stock = self._snapshots.stock
        if stock is None:
            return
        remote = stock.remote
        if remote is not None and remote.approved is not None and orders.approved is not None:
            remote.approved.clear()
            remote.approved.update((copy.identity, copy) for copy in orders.approved)
            self.version = orders.version
        for snapshot_id, reason in orders.quarantine.items():
            self._begin(snapshot_id, self._snapshots.quarantine(snapshot_id, reason))
        for snapshot_id in orders.delete:
            self._begin(snapshot_id, self._delete(snapshot_id))
        if remote is not None:
            for copy in orders.forget:
                self._begin(f"copy of {copy.snapshot}", self._delete_copy(stock, copy))
            self._begin("prefetch", self._prefetched(stock, orders.prefetch))

    def _begin(self, subject: str, work: Coroutine[Any, Any, object]) -> None:
        """Run in the background, once per subject at a time."""
        if subject in self._running:
            work.close()
            return
        task = asyncio.create_task(self._run(subject, work), name=f"order for {subject}")
        self._running[subject] = task
        task.add_done_callback(lambda _: self._running.pop(subject))

    async def _run(self, subject: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except (SnapshotterError, RemoteError, OSError, TimeoutError) as e:
            _log.warning("snapshot.order_failed subject=%r error=%s", subject, e)

    async def _delete(self, snapshot_id: str) -> None:
        """Delete it on this node alone: the controller says which node removes the copy."""
        await self._snapshots.delete_here(snapshot_id)

    async def _delete_copy(self, stock: SnapshotComponents, copy: ApprovedCopy) -> None:
        assert stock.remote is not None
        async with asyncio.timeout(_STORE_S):
            await stock.remote.forget_copy(copy)
        stock.catalogue.mark_remote(copy.snapshot, record="")
        self._forgotten[copy.snapshot] = None
        while len(self._forgotten) > _MOST_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    async def _prefetched(self, stock: SnapshotComponents, wanted: tuple[str, ...]) -> None:
        approved: Mapping[str, ApprovedCopy] = (stock.remote and stock.remote.approved) or {}
        by_id = {copy.snapshot: copy for copy in approved.values()}
        there = {info.id for info in self._snapshots.infos({})}
        for snapshot_id in wanted:
            if snapshot_id in by_id and snapshot_id not in there:
                await self._snapshots.selector.prefetch(by_id[snapshot_id])


def _reported(found: Snapshot | None, info: SnapshotInfo) -> NodeSnapshot:
    """`found`: the snapshot, unless it is quarantined."""
    known = NodeSnapshot(revision=info.revision, identity=dict(info.identity), info=info)
    if found is None or info.state is SnapshotState.QUARANTINED:
        return known
    return replace(
        known,
        digest=found.manifest.identity_digest,
        copy=found.copy,
        copy_bytes=found.copy_bytes,
    )
