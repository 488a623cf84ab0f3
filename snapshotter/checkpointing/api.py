"""The agent's snapshot API: create, list, prove and delete snapshots, and report whether this node
has any."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.checkpointing.checkpoints import Checkpoints
from snapshotter.checkpointing.environment_builder import EnvironmentBuilder
from snapshotter.checkpointing.requested_validation import Report, RequestedValidations
from snapshotter.errors import SnapshotRefused, SnapshotUnknown, Unsupported
from snapshotter.metrics import Metrics
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.manifest import SnapshotManifest
from snapshotter.snapshots.remote_copies import RemoteCopies, RemoteError
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.snapshots.stored import SnapshotCorrupt
from snapshotter.types import (
    ENVIRONMENT_PREFIX,
    LaunchSpec,
    RevisionKey,
    SnapshotInfo,
    SnapshotState,
)

_log = logging.getLogger(__name__)
_FORGET_S = 60.0
"""Timeout for a store with thousands of records; the agent does not exit earlier."""


class SnapshotApi:
    """The snapshot operations of the agent. Owner: the event loop. Without `stock` snapshots are
    off, and `SnapshotSelector.why_not` says why."""

    def __init__(
        self,
        *,
        stock: SnapshotComponents | None,
        checkpoints: Checkpoints | None,
        asked: RequestedValidations | None = None,
        selector: SnapshotSelector,
        background_tasks: BackgroundTasks,
        metrics: Metrics,
        builder: BackgroundBuilder,
        environments: EnvironmentBuilder | None = None,
    ) -> None:
        """`environments`: None: there is no IMPORT."""
        self._environments = environments
        self._builder = builder
        self._stock = stock
        self._checkpoints = checkpoints
        self._asked = asked
        self._selector = selector
        self._background_tasks = background_tasks
        self._metrics = metrics

    def __repr__(self) -> str:
        return f"<SnapshotApi {self._selector!r}>"

    def want(self, launch: LaunchSpec) -> bool:
        """Request a background snapshot if worthwhile (`BackgroundBuilder.want`)."""
        return self._builder.want(launch)

    @property
    def stock(self) -> SnapshotComponents | None:
        """The snapshot components; None if snapshots are off."""
        return self._stock

    @property
    def selector(self) -> SnapshotSelector:
        """The selector of snapshots to restore."""
        return self._selector

    async def checkpoint(self, launch: LaunchSpec) -> SnapshotInfo:
        """Create a snapshot (`AgentClient.checkpoint`). A failure that may be temporary is tried
        again in the background. Raises Unsupported if snapshots are off, SnapshotRefused."""
        if self._checkpoints is None:
            raise Unsupported(f"no snapshot of {launch.revision}: {self._selector.why_not}")
        try:
            return (await self._checkpoints.make(launch)).info()
        except SnapshotRefused as e:
            if e.detail.get("passing"):
                self._builder.want(launch)
            raise

    def infos(self, labels: Mapping[str, str]) -> list[SnapshotInfo]:
        """The snapshots of functions with these labels (`AgentClient.snapshots`)."""
        infos = self._stock.catalogue.infos(labels) if self._stock is not None else []
        return [info for info in infos if not info.revision.startswith(ENVIRONMENT_PREFIX)]

    async def prove(self, snapshot_id: str, report: Report) -> SnapshotInfo:
        """Prove a snapshot again (`AgentClient.prove_snapshot`)."""
        if self._asked is None:
            raise Unsupported(f"cannot prove snapshot {snapshot_id}: {self._selector.why_not}")
        await self._asked.prove(snapshot_id, report)
        found = [info for info in self.infos({}) if info.id == snapshot_id]
        if not found:
            raise SnapshotUnknown(f"snapshot {snapshot_id} was deleted while it was being proven")
        return found[-1]

    async def quarantine(self, snapshot_id: str, reason: str) -> SnapshotInfo:
        """Quarantine a snapshot: it is never restored again (`AgentClient.quarantine_snapshot`).
        Idempotent. Raises SnapshotUnknown."""
        if self._stock is not None and any(s.id == snapshot_id for s in self._stock.catalogue):
            await self._selector.quarantine(snapshot_id, reason)
        found = [info for info in self.infos({}) if info.id == snapshot_id]
        if not found:
            raise SnapshotUnknown(f"snapshot {snapshot_id} is not on this node")
        return found[-1]

    def cancel(self, revision: RevisionKey) -> None:
        """Calls no longer reach this revision: stop what is done for it in the background."""
        self._builder.forget(revision=revision, function=None)
        if self._checkpoints is not None:
            self._checkpoints.cancel(revision)
        if self._environments is not None:
            self._environments.cancel(revision)

    async def aclose(self) -> None:
        """Stop requested proofs, what follows from boots, and running transfers."""
        if self._environments is not None:
            await self._environments.aclose()
        if self._asked is not None:
            await self._asked.aclose()
        await self._selector.aclose()

    async def delete_here(self, snapshot_id: str) -> bool:
        """Delete a snapshot, but not its copy; whether it existed."""
        if self._stock is None:
            return False
        with self._selector.telling("deleted"):
            return await self._stock.catalogue.delete(snapshot_id)

    async def delete(
        self, *, snapshot_id: str | None, revision: str | None, function: str | None
    ) -> int:
        """Delete snapshots (`AgentClient.delete_snapshots`). Remote copies are deleted in the
        background."""
        if self._stock is None:
            return 0
        self._builder.forget(revision=revision, function=function)
        catalogue, remote = self._stock.catalogue, self._stock.remote
        copies = [s.manifest for s in catalogue if s.id == snapshot_id]
        with self._selector.telling("deleted"):
            if snapshot_id is not None:
                count = int(await catalogue.delete(snapshot_id))
            else:
                count = await catalogue.delete_of(revision=revision, function=function)
        if remote is not None:
            self._background_tasks.run(
                self._delete_remote(remote, copies, revision=revision, function=function),
                "forget copies",
            )
        return count

    def describe(self) -> Mapping[str, Any]:
        """The section for `capabilities`."""
        if self._stock is None:
            return {"on": False, "why": self._selector.why_not}
        catalogue, states = self._stock.catalogue, self._by_state()
        return {
            "on": True,
            "why": "",
            "directory": str(catalogue.directory),
            "used_bytes": catalogue.used_bytes,
            "max_bytes": catalogue.max_bytes,
            "ready": states[SnapshotState.READY],
            "quarantined": states[SnapshotState.QUARANTINED],
            "last_refusal": self._checkpoints.last_refusal
            if self._checkpoints is not None
            else None,
            "imports": self._environments.describe() if self._environments is not None else None,
        }

    async def expire(self, now: float) -> None:
        """Delete environment snapshots that no start has used for long."""
        if self._environments is not None:
            await self._environments.expire(now)

    def observe(self) -> None:
        """Update the metrics; called before each scrape."""
        if self._stock is not None:
            self._metrics.observe_snapshots(
                by_state=self._by_state(), used_bytes=self._stock.catalogue.used_bytes
            )

    async def verify_all(self) -> None:
        """Hash the snapshots of an earlier agent one by one, so that the first start of each does
        not have to."""
        if self._stock is None:
            return
        for snapshot in self._stock.catalogue:
            try:
                await self._stock.catalogue.verify(snapshot, None)
            except (SnapshotCorrupt, SnapshotUnknown) as e:
                _log.warning("snapshot.unusable snapshot=%s error=%s", snapshot.id, e)

    @staticmethod
    async def _delete_remote(
        remote: RemoteCopies,
        copies: list[SnapshotManifest],
        *,
        revision: str | None,
        function: str | None,
    ) -> None:
        """Delete remote copies, which the next start would otherwise fetch."""
        try:
            async with asyncio.timeout(_FORGET_S):
                for manifest in copies:
                    await remote.forget(manifest)
                if revision is not None or function is not None:
                    await remote.forget_of(revision=revision, function=function)
        except (RemoteError, TimeoutError) as e:
            _log.warning(
                "snapshot.copies_stay revision=%s function=%s error=%s", revision, function, e
            )

    def _by_state(self) -> Counter[SnapshotState]:
        return Counter(info.state for info in self.infos({}))
