"""Selection of snapshots for starts: find one for a launch, predict its duration, and restore it.

A snapshot that fails three times in a row is quarantined; the next COLD start builds a new one. If
snapshots are off (`SnapshotSelector.why_not` is not empty), no snapshot is found and everything
else works normally."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from snapshotter.events import Events
from snapshotter.metrics import Metrics
from snapshotter.node_reports import ApprovedCopy
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.slots.slot import SlotListener
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.fetches import UNKNOWN_COLD_MS, UNTRIED, SnapshotFetches
from snapshotter.snapshots.identity import Identity
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.restores import ENVIRONMENT, RestoreFailed, Restores, SnapshotUnfit
from snapshotter.snapshots.stored import LibraryChanged, Snapshot
from snapshotter.types import (
    ENVIRONMENT_PREFIX,
    AgentEvent,
    LaunchSpec,
    RevisionKey,
    SnapshotState,
    StartKind,
)

_log = logging.getLogger(__name__)
_FAILURES = 3
"""Consecutive failures, after which the snapshot is considered broken."""


class SnapshotSelector:
    """Selects, restores and quarantines snapshots. Owner: the event loop.

    Attributes:
        why_not: why this node has no snapshots, "" if it has.
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
        on_ready: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_ready`: called with the id of each snapshot that was made and proven here."""
        self._stock = stock
        self._restores = restores
        self.why_not = why_not
        self._events = events
        self._metrics = metrics
        self._predictions = predictions
        self._on_ready = on_ready
        self._clock = clock
        remote = stock.remote if stock is not None else None
        self._fetches = SnapshotFetches(remote, clock=clock) if remote is not None else None

    def __repr__(self) -> str:
        return (
            f"<SnapshotSelector {self._stock.catalogue!r}>"
            if self._stock
            else f"<SnapshotSelector off: {self.why_not}>"
        )

    # -- lookup

    async def aclose(self) -> None:
        """Cancel running transfers."""
        if self._fetches is not None:
            await self._fetches.aclose()

    async def find(
        self, launch: LaunchSpec, phase: StartPhase, *, waits: bool = False
    ) -> Snapshot | None:
        """A proven snapshot that may be restored now: from this node, otherwise from the object
        store, if the transfer makes the start no slower (`waits`: whatever it takes). If None, a
        metric records the reason."""
        if self._stock is None or not launch.snapshot:
            return None
        try:
            identity, binds = self._stock.describe(launch, phase.gpus)
            with self.telling("corrupt"):
                found = await self._stock.catalogue.usable(identity, binds)
            if found is None and self._fetches is not None:
                phase.name, began = "fetch", time.perf_counter()
                found = await self._fetches.fetch(
                    identity,
                    binds,
                    tenant=launch.labels.get("tenant", ""),
                    cold_ms=self.known_cold_ms(launch),
                    waits=waits,
                )
                if found is not None:
                    phase.before_ms["fetch"] = (time.perf_counter() - began) * 1000
            self._note_miss(self._stock, identity, found)
            return found
        except LibraryChanged as e:
            _log.info("snapshot.missed revision=%s field=%s", launch.revision, e.field)
            self._metrics.snapshot_missed("file")
        except OSError as e:
            _log.warning("snapshot.missed revision=%s error=%s", launch.revision, e)
            self._metrics.snapshot_missed("unreadable")
        return None

    def restore_ms(self, launch: LaunchSpec, snapshot: Snapshot) -> float:
        """Expected time until an instance is ready: from recent restores, otherwise from the proof,
        capped so that a restore is tried once."""
        predicted = self._predictions.expect_ms(launch.revision, StartKind.RESTORE)
        proof = snapshot.manifest.proof
        return (
            predicted
            if predicted is not None
            else min(proof.restore_ms, UNTRIED * self.cold_ms(launch))
            if proof
            else 0.0
        )

    def is_fork_faster(self, launch: LaunchSpec, snapshot: Snapshot) -> bool:
        """Whether a fork of a Template is expected to take less time than a restore; also if none
        was forked yet."""
        fork_ms = self._predictions.expect_ms(launch.revision, StartKind.FORK)
        return fork_ms is None or fork_ms < self.restore_ms(launch, snapshot)

    async def prefetch(self, copy: ApprovedCopy) -> Snapshot | None:
        """Receive a copy before a start needs it; None if that failed, or if it does not fit."""
        return None if self._fetches is None else await self._fetches.prefetch(copy)

    def cold_ms(self, launch: LaunchSpec) -> float:
        """Expected time of a boot: from recent boots, otherwise from the snapshot's creation."""
        return self.known_cold_ms(launch) or (0.0 if self._stock is None else UNKNOWN_COLD_MS)

    def known_cold_ms(self, launch: LaunchSpec) -> float | None:
        """Expected time of a boot here; None: the revision was never booted on this node."""
        predicted = self._predictions.expect_ms(launch.revision, StartKind.COLD)
        if predicted is not None or self._stock is None:
            return predicted
        known = [
            s.manifest.cold_ms
            for s in self._stock.catalogue
            if s.manifest.revision == launch.revision and s.manifest.cold_ms > 0
        ]
        return known[-1] if known else None

    def image_bytes(self, revision: RevisionKey) -> int | None:
        """Size of the revision's newest snapshot; None: there is none."""
        ready = [
            s.manifest
            for s in (self._stock.catalogue if self._stock else ())
            if s.state is SnapshotState.READY
        ]
        mine = [m for m in ready if m.revision == revision]
        return mine[-1].image_bytes if mine else None

    # -- use

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
        """A worker at its snapshot point; None if it was not restored in time, which counts as a
        failure of the snapshot.

        Waiting for its weights does not count. A background restore, which yields to calls, may be
        late without counting as a failure. `is_start`: if it is too late, the next start expects
        at least this duration."""
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
                # a lower bound
                self._predictions.observe(launch.revision, StartKind.RESTORE, deadline_s * 1000)
            await self.failed(snapshot.id, "timeout", f"not restored within {deadline_s:g} s")
        except SnapshotUnfit as e:
            _log.warning("restore.unfit snapshot=%s error=%s", snapshot.id, e)
            self._metrics.rung_failed(StartKind.RESTORE, e.reason)
        except RestoreFailed as e:
            await self.failed(snapshot.id, e.reason, str(e))
        return None

    def used(self, snapshot_id: str) -> None:
        """An instance or a Template was restored from it: reset its failure count."""
        if self._stock is not None:
            self._stock.catalogue.used(snapshot_id, now=self._clock())

    async def failed(self, snapshot_id: str, reason: str, message: str) -> None:
        """Record that it did not lead to an instance; the third time in a row, quarantine it."""
        assert self._stock is not None
        _log.warning("restore.failed snapshot=%s reason=%s error=%s", snapshot_id, reason, message)
        is_environment = any(s.id == snapshot_id and _is_environment(s) for s in self.all())
        rung = StartKind.IMPORT if is_environment else StartKind.RESTORE
        self._metrics.rung_failed(rung, reason)
        if self._stock.catalogue.failed(snapshot_id) >= _FAILURES:
            await self.quarantine(snapshot_id, message)

    async def quarantine(self, snapshot_id: str, message: str) -> None:
        """Quarantine it: it is never served again."""
        assert self._stock is not None
        with self.telling("quarantined"):
            await self._stock.catalogue.quarantine(snapshot_id, message, now=self._clock())

    def all(self) -> list[Snapshot]:
        """All snapshots of this node that may be restored."""
        return list(self._stock.catalogue) if self._stock is not None else []

    async def delete(self, snapshot_id: str, reason: str) -> None:
        """Delete it."""
        assert self._stock is not None
        with self.telling(reason):
            await self._stock.catalogue.delete(snapshot_id)

    def ready(self, snapshot: Snapshot) -> None:
        """Announce a new snapshot. One of an environment stays on this node, and is no
        function's."""
        if _is_environment(snapshot):
            return
        if ENVIRONMENT not in snapshot.manifest.point:  # those by IMPORT stay on this node
            self._on_ready(snapshot.id)
        self._tell(
            "snapshot_ready",
            snapshot,
            "ready",
            f"the snapshot of {snapshot.manifest.revision} is proven",
        )

    @contextlib.contextmanager
    def telling(self, reason: str) -> Iterator[None]:
        """Publish events for snapshots removed meanwhile: evicted for another one, replaced, found
        damaged."""
        assert self._stock is not None
        catalogue = self._stock.catalogue
        before = list(catalogue)
        try:
            yield
        finally:
            there, aside = {s.id for s in catalogue}, {q.id for q in catalogue.quarantined}
            gone = (s for s in before if s.id not in there and not _is_environment(s))
            for snapshot in gone:
                kind = "snapshot_quarantined" if snapshot.id in aside else "snapshot_gone"
                self._tell(
                    kind,
                    snapshot,
                    reason,
                    f"snapshot {snapshot.id} of {snapshot.manifest.revision} was removed: {reason}",
                )

    def took(self, launch: LaunchSpec, kind: StartKind, ms: float) -> None:
        """Record the actual duration of a start."""
        predicted = self._predictions.expect_ms(launch.revision, kind)
        if predicted is not None:
            self._metrics.predicted(kind, predicted_ms=predicted, actual_ms=ms)
        self._predictions.observe(launch.revision, kind, ms)

    def passed_over(self, launch: LaunchSpec, snapshot: Snapshot) -> None:
        """COLD is expected to be faster: move the expectation of RESTORE towards its proof, so that
        it is eventually tried again."""
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


def _is_environment(snapshot: Snapshot) -> bool:
    """Whether it has modules of an image, and no function."""
    return snapshot.manifest.revision.startswith(ENVIRONMENT_PREFIX)
