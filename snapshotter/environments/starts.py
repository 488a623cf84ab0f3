"""IMPORT: boots a function in a process that is restored from an environment snapshot.

The snapshot is restored into a slot of the function's own, all of its memory copied: it is never
forked, and shares no page with another function. There it imports the user's code, which must begin
with the imports of the snapshot (`pilotlight.worker.imports.recorder`), runs `enter()` and the
examples, and is at a snapshot point like a worker that was booted from nothing."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator

from snapshotter.environments.import_order import ImportOrder, split
from snapshotter.environments.launches import environment_launch, scope_of, why_not
from snapshotter.environments.records import ImportRecords
from snapshotter.errors import StartFailed
from snapshotter.metrics import Metrics
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.slots.slot import SlotListener
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.restores import RestoreFailed, Restores
from snapshotter.snapshots.stored import LibraryChanged, Snapshot
from snapshotter.types import ENVIRONMENT_PREFIX, LaunchSpec, SnapshotState, StartKind

_log = logging.getLogger(__name__)
ORDER_DIFFERS = "ImportOrderDiffers"
"""Error type of a worker whose code begins with other imports
(`pilotlight.worker.imports.recorder`)."""
_DIFFERS = re.compile(r"(\d{1,6}): ")
_RESTORE_S = 10.0
"""Most that a restore may take, and less if little of the startup timeout is left."""
_FAILURES = 3
_TRIES = 2
"""Environment snapshots that a start tries: user code runs anew in each."""


class EnvironmentStarts:
    """Finds and uses environment snapshots. Owner: the event loop."""

    def __init__(
        self,
        *,
        stock: SnapshotComponents,
        restores: Restores,
        records: ImportRecords,
        metrics: Metrics,
        limits_memory: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stock = stock
        self._restores = restores
        self.records = records
        self._metrics = metrics
        self._limits_memory = limits_memory
        self._clock = clock

    def __repr__(self) -> str:
        return f"<EnvironmentStarts {len(list(self.all()))} snapshots>"

    def all(self) -> Iterator[Snapshot]:
        """The environment snapshots of this node."""
        for snapshot in self._stock.catalogue:
            if snapshot.manifest.revision.startswith(ENVIRONMENT_PREFIX):
                yield snapshot

    def launch_for(self, launch: LaunchSpec, modules: list[str]) -> LaunchSpec:
        """The launch of an environment snapshot for `launch`."""
        return environment_launch(launch, modules, limits_memory=self._limits_memory)

    def ready_for(self, launch: LaunchSpec) -> list[tuple[Snapshot, list[str]]]:
        """Proven snapshots of the launch's scope that were made on this machine as it is, and their
        modules."""
        prefix = f"{ENVIRONMENT_PREFIX}{scope_of(launch)}@"
        return [
            (snapshot, modules_of(snapshot))
            for snapshot in self.all()
            if snapshot.state is SnapshotState.READY
            and snapshot.manifest.revision.startswith(prefix)
            and self._is_of_today(launch, snapshot)
        ]

    def _is_of_today(self, launch: LaunchSpec, snapshot: Snapshot) -> bool:
        try:
            identity, _ = self._stock.describe(self.launch_for(launch, modules_of(snapshot)))
        except OSError:
            return False
        return snapshot.manifest.identity == identity

    async def boot(
        self, launch: LaunchSpec, phase: StartPhase, owner: SlotListener, *, network: bool = False
    ) -> OccupiedSlot | None:
        """A worker of `launch` at its snapshot point; None if no environment snapshot fits, or none
        led there: then a boot from nothing has to say whose fault that is.

        Where its imports differ, one that has only those to which it kept is tried."""
        if why_not(launch) or self.records.why_off(launch):
            return None
        order = self.records.order(launch.revision)
        for _ in range(_TRIES):
            snapshot = await self._find(launch, order)
            if snapshot is None:
                break
            phase.kind, began = StartKind.IMPORT, time.monotonic()
            deadline_s = min(_RESTORE_S, launch.startup_timeout_s / 2)
            try:
                occupied = await self._restores.boot(
                    launch, snapshot, phase, owner, deadline_s=deadline_s, network=network
                )
            except RestoreFailed as e:
                await self.failed(snapshot.id, e.reason, str(e))
                break
            except StartFailed as e:
                self._on_user_failure(launch, snapshot, e)
                if (kept := kept_imports(e)) is None:
                    break
                order = ImportOrder.of_names(split(modules_of(snapshot))[0][:kept])
            except asyncio.CancelledError:
                if time.monotonic() - began > launch.startup_timeout_s / 2:
                    # it may hang there, and would not from nothing
                    self.records.exclude(launch.revision, snapshot.id)
                raise
            else:
                self._stock.catalogue.used(snapshot.id, now=self._clock())
                return occupied
        phase.kind = StartKind.COLD
        return None

    async def rehearse(
        self, launch: LaunchSpec, snapshot: Snapshot, owner: SlotListener, *, network: bool
    ) -> OccupiedSlot:
        """Boot a worker of `launch` in this environment snapshot in the background; the caller
        clears its slot. Raises what `Restores.boot` raises."""
        return await self._restores.boot(
            launch,
            snapshot,
            StartPhase(is_background=True),
            owner,
            deadline_s=_RESTORE_S,
            network=network,
            transient=True,
        )

    def exclude(self, launch: LaunchSpec, snapshot_id: str) -> bool:
        """The function does not work in this environment snapshot: do not use it for it again.
        False if the snapshot is not one."""
        is_environment = any(snapshot.id == snapshot_id for snapshot in self.all())
        if is_environment:
            self.records.exclude(launch.revision, snapshot_id)
        return is_environment

    async def failed(self, snapshot_id: str, reason: str, message: str) -> None:
        """Record that it could not be restored; the third time in a row, quarantine it."""
        _log.warning("import.failed snapshot=%s reason=%s error=%s", snapshot_id, reason, message)
        self._metrics.rung_failed(StartKind.IMPORT, reason)
        if self._stock.catalogue.failed(snapshot_id) >= _FAILURES:
            await self._stock.catalogue.quarantine(snapshot_id, message)

    def _on_user_failure(self, launch: LaunchSpec, snapshot: Snapshot, error: StartFailed) -> None:
        reason = "boot" if kept_imports(error) is None else "order"
        failure = error.detail.get("error") or {}
        text = "import.unfit revision=%s snapshot=%s reason=%s error=%s"
        _log.info(text, launch.revision, snapshot.id, reason, failure.get("message", error))
        self._metrics.rung_failed(StartKind.IMPORT, reason)
        self.records.exclude(launch.revision, snapshot.id)

    async def _find(self, launch: LaunchSpec, order: ImportOrder | None) -> Snapshot | None:
        """The snapshot with which the function's import order begins, the longest first; of a
        function that was never booted here (None), the one that suits those most that are like
        it."""
        candidates = [
            (snapshot, modules)
            for snapshot, modules in self.ready_for(launch)
            if not self.records.is_excluded(launch.revision, snapshot.id)
            and (order is None or order.begins_with(modules))
        ]
        if order is None:
            saving = self.records.saving_ms
            candidates.sort(key=lambda one: (saving(launch, one[1]), one[0].last_used_at))
        else:
            candidates.sort(key=lambda one: (order.ms_of(one[1]) or 0.0, len(one[1])))
        for snapshot, modules in reversed(candidates):
            if (found := await self._usable(launch, modules)) is not None:
                return found
            _log.info("import.missed revision=%s snapshot=%s", launch.revision, snapshot.id)
        return None

    async def _usable(self, launch: LaunchSpec, modules: list[str]) -> Snapshot | None:
        """It, if image, machine and mapped files are still those that it was made with."""
        try:
            identity, binds = self._stock.describe(self.launch_for(launch, modules))
            return await self._stock.catalogue.usable(identity, binds)
        except (LibraryChanged, OSError) as e:
            _log.info("import.unusable revision=%s error=%s", launch.revision, e)
            return None


def kept_imports(error: StartFailed) -> int | None:
    """To how many imports of an environment snapshot user code kept; None if it failed for another
    reason."""
    failure = error.detail.get("error") or {}
    found = _DIFFERS.match(str(failure.get("message", "")))
    if str(failure.get("type", "")).rpartition(".")[2] != ORDER_DIFFERS or found is None:
        return None
    return int(found[1])


def modules_of(snapshot: Snapshot) -> list[str]:
    """The modules of an environment snapshot, in the order of their imports."""
    return list(snapshot.manifest.point["launch"]["entry"]["imports"])
