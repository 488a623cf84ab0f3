"""What the ladder asks about snapshots: is there one for this launch, how long will it take, and
bring it back.

A snapshot that fails three times in a row is quarantined; the next COLD start has a new one made.
Where snapshots are off (`SnapshotSelector.off`) there is none for anybody, and everything else
works as if there never had been."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from snapshotter.events import Events
from snapshotter.metrics import Metrics
from snapshotter.slots.instance_process import SlotListener
from snapshotter.slots.manager import OccupiedSlot, StartPhase
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.identity import Identity
from snapshotter.snapshots.mapped_files import BindMounts
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.remote_copies import RemoteCopies, RemoteError
from snapshotter.snapshots.restores import RestoreFailed, Restores
from snapshotter.snapshots.stored import DiskBudgetExceeded, LibraryChanged, Snapshot
from snapshotter.types import AgentEvent, LaunchSpec, RevisionKey, SnapshotState, StartKind

_log = logging.getLogger(__name__)
_FAILURES = 3
"""In a row; then it is the snapshot, and not the moment."""
_UNTRIED = 0.5
"""Of COLD: a proof gives way to calls, on a busy machine for seconds, a start does not. So a slow
proof alone keeps nobody from RESTORE."""
_UNKNOWN_COLD_MS = 60_000.0
"""For a revision that was never booted here: a snapshot that was fetched is worth a try."""


class SnapshotSelector:
    """Owner: the event loop.

    Attributes:
        why_not: why there are no snapshots on this node, "" when there are.
    """

    def __init__(
        self,
        stock: SnapshotComponents | None,
        restores: Restores | None,
        *,
        why_not: str = "",
        events: Events,
        metrics: Metrics,
        predictions: Predictions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stock = stock
        self._restores = restores
        self.why_not = why_not
        self._events = events
        self._metrics = metrics
        self._predictions = predictions
        self._clock = clock
        self._fetches: dict[str, asyncio.Task[Snapshot | None]] = {}

    def __repr__(self) -> str:
        return (
            f"<SnapshotSelector {self._stock.catalogue!r}>"
            if self._stock
            else f"<SnapshotSelector off: {self.why_not}>"
        )

    # -- looking

    async def find(self, launch: LaunchSpec, phase: StartPhase) -> Snapshot | None:
        """A proven snapshot that may be restored now: from this node, else from the object store.
        None: metrics say why."""
        if self._stock is None or not launch.snapshot:
            return None
        try:
            identity, binds = self._stock.describe(launch)
            with self.telling("corrupt"):
                found = await self._stock.catalogue.usable(identity, binds)
            if found is not None or self._stock.remote is None:
                self._note_miss(self._stock, identity, found)
                return found
            return await self._fetched(self._stock.remote, identity, binds, phase)
        except LibraryChanged as e:
            _log.info("snapshot.missed revision=%s field=%s", launch.revision, e.field)
            self._metrics.snapshot_missed("file")
        except OSError as e:
            _log.warning("snapshot.missed revision=%s error=%s", launch.revision, e)
            self._metrics.snapshot_missed("unreadable")
        return None

    def restore_ms(self, launch: LaunchSpec, snapshot: Snapshot) -> float:
        """How long until an instance is ready: as it was of late, else as it was proven, at most so
        long that it is tried once."""
        predicted = self._predictions.expect_ms(launch.revision, StartKind.RESTORE)
        proof = snapshot.manifest.proof
        return (
            predicted
            if predicted is not None
            else min(proof.restore_ms, _UNTRIED * self.cold_ms(launch))
            if proof
            else 0.0
        )

    def cold_ms(self, launch: LaunchSpec) -> float:
        """How long a boot takes: as of late, else as when the snapshot was made."""
        predicted = self._predictions.expect_ms(launch.revision, StartKind.COLD)
        if predicted is not None or self._stock is None:
            return predicted or 0.0
        known = [
            s.manifest.cold_ms
            for s in self._stock.catalogue
            if s.manifest.revision == launch.revision and s.manifest.cold_ms > 0
        ]
        return known[-1] if known else _UNKNOWN_COLD_MS

    def forkable_image_bytes(self, revision: RevisionKey) -> int | None:
        """Size of the revision's newest snapshot that a Template can come of; None: there is
        none."""
        ready = [
            s.manifest
            for s in (self._stock.catalogue if self._stock else ())
            if s.state is SnapshotState.READY
        ]
        mine = [m for m in ready if m.revision == revision and not m.in_place]
        return mine[-1].image_bytes if mine else None

    # -- using

    async def restore(
        self,
        launch: LaunchSpec,
        snapshot: Snapshot,
        phase: StartPhase,
        owner: SlotListener,
        *,
        deadline_s: float,
        lazy: bool | None = None,
        is_start: bool = False,
    ) -> OccupiedSlot | None:
        """A worker at its snapshot point; None when it could not be brought back in time, which is
        held against the snapshot.

        Waiting for its weights takes none of that time. One that gives way to calls, and was not
        given the processor, says nothing of the snapshot. `is_start`: of one that is too late the
        next start expects no better."""
        assert self._restores is not None
        try:
            async with asyncio.timeout(deadline_s) as limit:
                with phase.patience.bounded_by(limit):
                    return await self._restores.restore(
                        launch, snapshot, phase, owner, deadline_s=deadline_s, lazy=lazy
                    )
        except TimeoutError:
            if phase.is_background:
                _log.info("restore.late snapshot=%s deadline_s=%g", snapshot.id, deadline_s)
                return None
            if is_start:
                # at least
                self._predictions.observe(launch.revision, StartKind.RESTORE, deadline_s * 1000)
            await self.failed(snapshot.id, "timeout", f"it was not back within {deadline_s:g} s")
        except RestoreFailed as e:
            await self.failed(snapshot.id, e.reason, str(e))
        return None

    def used(self, snapshot_id: str) -> None:
        """An instance or a Template was born of it: what failed before is forgotten."""
        if self._stock is not None:
            self._stock.catalogue.used(snapshot_id, now=self._clock())

    async def failed(self, snapshot_id: str, reason: str, message: str) -> None:
        """It did not lead to an instance; the third time in a row it is quarantined."""
        assert self._stock is not None
        _log.warning("restore.failed snapshot=%s reason=%s error=%s", snapshot_id, reason, message)
        self._metrics.rung_failed(StartKind.RESTORE, reason)
        if self._stock.catalogue.failed(snapshot_id) >= _FAILURES:
            await self.quarantine(snapshot_id, message)

    async def quarantine(self, snapshot_id: str, message: str) -> None:
        """Never serve it again."""
        assert self._stock is not None
        with self.telling("quarantined"):
            await self._stock.catalogue.quarantine(snapshot_id, message, now=self._clock())

    def ready(self, snapshot: Snapshot) -> None:
        """Tell the watchers of a new one."""
        self._tell(
            "snapshot_ready",
            snapshot,
            "ready",
            f"a snapshot of {snapshot.manifest.revision} is proven",
        )

    @contextlib.contextmanager
    def telling(self, reason: str) -> Iterator[None]:
        """Tell the watchers of those that go meanwhile: evicted for another one, replaced, found
        damaged."""
        assert self._stock is not None
        catalogue = self._stock.catalogue
        before = list(catalogue)
        try:
            yield
        finally:
            there, aside = {s.id for s in catalogue}, {q.id for q in catalogue.quarantined}
            for snapshot in (s for s in before if s.id not in there):
                kind = "snapshot_quarantined" if snapshot.id in aside else "snapshot_gone"
                self._tell(
                    kind,
                    snapshot,
                    reason,
                    f"snapshot {snapshot.id} of {snapshot.manifest.revision} is gone: {reason}",
                )

    def took(self, launch: LaunchSpec, kind: StartKind, ms: float) -> None:
        """How long a start really took."""
        predicted = self._predictions.expect_ms(launch.revision, kind)
        if predicted is not None:
            self._metrics.predicted(kind, predicted_ms=predicted, actual_ms=ms)
        self._predictions.observe(launch.revision, kind, ms)

    def passed_over(self, launch: LaunchSpec, snapshot: Snapshot) -> None:
        """COLD is expected to be faster: what was seen of RESTORE is forgotten bit by bit, or it
        would never be tried again."""
        if snapshot.manifest.proof is not None:
            self._predictions.observe(
                launch.revision, StartKind.RESTORE, snapshot.manifest.proof.restore_ms
            )

    def _note_miss(
        self, stock: SnapshotComponents, identity: Identity, found: Snapshot | None
    ) -> None:
        if found is None and (field := stock.catalogue.missed(identity)) is not None:
            _log.info("snapshot.missed revision=%s field=%s", identity.revision, field)
            self._metrics.snapshot_missed(field)

    async def _fetched(
        self, remote: RemoteCopies, identity: Identity, binds: BindMounts, phase: StartPhase
    ) -> Snapshot | None:
        """From the object store, single flight per identity; the phase `fetch` is part of the start
        that waits for it."""
        key, began, phase.name = identity.digest(), time.perf_counter(), "fetch"
        if key not in self._fetches:
            self._fetches[key] = asyncio.create_task(
                self._fetch(remote, identity, binds), name=f"fetch snapshot of {identity.revision}"
            )
            self._fetches[key].add_done_callback(lambda _: self._fetches.pop(key))
        found = await asyncio.shield(self._fetches[key])
        if found is not None:
            phase.before_ms["fetch"] = (time.perf_counter() - began) * 1000
        return found

    async def _fetch(
        self, remote: RemoteCopies, identity: Identity, binds: BindMounts
    ) -> Snapshot | None:
        assert self._stock is not None
        try:
            found = await remote.fetch(identity, binds, now=self._clock())
        except (RemoteError, DiskBudgetExceeded, OSError) as e:
            _log.warning("snapshot.fetch_failed revision=%s error=%s", identity.revision, e)
            return None
        if found is None:
            self._note_miss(self._stock, identity, found)
        return found

    def _tell(self, kind: str, snapshot: Snapshot, reason: str, message: str) -> None:
        detail = {"snapshot": snapshot.id, "function": snapshot.manifest.revision.partition("@")[0]}
        self._events.publish(
            AgentEvent(
                kind=kind,
                subject=snapshot.manifest.revision,
                reason=reason,
                message=message,
                detail=detail,
            )
        )
