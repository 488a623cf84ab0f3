"""Chooses how an instance is started: FORK if a Template of the revision is resident; else RESTORE
if a snapshot matches and is predicted to be faster than COLD; else a Template is booted, and
forked: IMPORT where an environment snapshot fits its imports, else COLD.

A worker that cannot be forked (surplus threads, `forkable=False`) serves in place, one slot per
instance; one that was booted or restored ahead and waits at its snapshot point is resumed (WAKE).
A restored worker serves in place as well, unless further starts of its revision wait for it: then
it becomes a Template, and all of them are forked (`shared_restores`). A strategy that fails, or
exceeds its deadline, is excluded for this start, which continues with the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from snapshotter.slots.boot_limiter import FairSemaphore
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.slots.pausable_deadline import YieldableSlot
from snapshotter.slots.weights import Weights
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.snapshots.stored import Snapshot
from snapshotter.starts import frozen_workers
from snapshotter.starts.launcher import BOOTED, StartSource
from snapshotter.starts.shared_restores import SharedRestores
from snapshotter.starts.teardown import Teardown
from snapshotter.starts.template_boot import TemplateBooter
from snapshotter.starts.templates import Templates
from snapshotter.types import InstanceInfo, LaunchSpec, StartKind

_log = logging.getLogger(__name__)
_FLOOR_S = 2.0
"""Minimum deadline of a restore: one of 50 ms may take this long on a loaded node before COLD is
the better choice."""
_PATIENCE = 4.0
WAITS = ("weights", "volumes")
"""Phases in which a start waits for bytes that are on their way to the node."""
_COLD_MARGIN = 1.5
"""Factor on the COLD prediction: a node that failed to restore is probably slow."""
_COLD_LEAST_S = 5.0
"""Minimum time reserved for COLD: a boot of 0.4 s may take this long on a loaded node, where it has
a lower priority than calls."""


def cold_reserve_s(*, cold_ms: float, left_s: float) -> float:
    """How much of the rest of the startup timeout is reserved for COLD: its prediction with a
    margin, or up to half of the rest for a slow node."""
    return max(_COLD_MARGIN * cold_ms / 1000, min(_COLD_LEAST_S, left_s / 2))


def restore_deadline_s(*, restore_ms: float, cold_ms: float, left_s: float) -> float | None:
    """How long RESTORE may take before COLD is started instead; None: COLD at once, because it is
    faster, or nothing else fits.

    `restore_ms`, `cold_ms`: predictions; `left_s`: rest of the startup timeout. If not even COLD
    fits, RESTORE is still tried.
    """
    if restore_ms >= cold_ms:
        return None
    wanted_s = max(_FLOOR_S, _PATIENCE * restore_ms / 1000)
    spare_s = left_s - cold_reserve_s(cold_ms=cold_ms, left_s=left_s)
    if spare_s <= 0:
        return left_s
    deadline_s = min(wanted_s, spare_s)
    return deadline_s if deadline_s * 1000 >= restore_ms else None


def _booted(occupied: OccupiedSlot) -> StartKind:
    """How the worker reached its snapshot point in this start."""
    return StartKind.COLD if occupied.environment is None else StartKind.IMPORT


@dataclass(frozen=True, kw_only=True)
class _Restored:
    """What came of RESTORE: a worker for this start, or one that several starts waited for, which
    is a Template if it came; otherwise the start goes on with the next strategy, or a Template."""

    occupied: OccupiedSlot | None = None
    is_shared: bool = False


class StartDeadline:
    """Remaining time of one start."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self._until - time.monotonic())


class StartStrategy:
    """Chooses start strategies. Owner: the event loop. `_gate` limits restores: more than
    processors only slow each other down."""

    def __init__(
        self,
        *,
        template_booter: TemplateBooter,
        templates: Templates,
        selector: SnapshotSelector,
        builder: BackgroundBuilder,
        ends: Teardown,
        weights: Weights,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._template_booter = template_booter
        self._templates = templates
        self._selector = selector
        self._builder = builder
        self._ends = ends
        self._weights = weights
        self._clock = clock
        self._gate = FairSemaphore(max(2, len(os.sched_getaffinity(0))))
        self._shared = SharedRestores()

    async def acquire(
        self, launch: LaunchSpec, phase: StartPhase, clock: StartDeadline, closed: set[StartKind]
    ) -> StartSource:
        """Choose and provide the source of a start. The caller must use it before the next await.
        Raises the errors of a boot."""
        kind = StartKind.FORK
        while True:
            template = self._templates.use(launch.revision, self._clock())
            if template is not None:
                phase.name, phase.kind = "fork", kind
                if kind is StartKind.COLD:
                    kind = _booted(template.occupied)
                elif template.single:
                    kind = StartKind.WAKE
                if template.single:
                    frozen_workers.thaw(template.occupied)
                    self._ends.publish_used(template)
                return StartSource(occupied=template.occupied, in_place=template.single, kind=kind)
            if StartKind.RESTORE not in closed:
                restored = await self._restored(launch, phase, clock, closed)
                if restored.occupied is not None:
                    occupied = restored.occupied
                    phase.cpu_ns += occupied.cpu_ns()
                    return StartSource(occupied=occupied, in_place=True, kind=StartKind.RESTORE)
                kind = StartKind.RESTORE if restored.is_shared else kind
                continue
            kind, phase.name, phase.kind = StartKind.COLD, "boot", StartKind.COLD
            imports = StartKind.IMPORT not in closed
            if (
                not launch.forkable
                or launch.gpu  # its slot's GPUs are those of one instance
                or self._templates.is_single(launch.revision)
            ):
                occupied = await self._template_booter.boot(launch, phase, imports=imports)
                phase.cpu_ns += occupied.cpu_ns()
                return StartSource(occupied=occupied, in_place=True, kind=_booted(occupied))
            await self._template_booter.ensure(launch, imports=imports, share=phase.share)

    def hook_timeout_s(self, way: StartSource, clock: StartDeadline) -> float | None:
        """How long the hooks of a restored worker, or of a fork of one, may take before COLD is
        started instead, which needs time as well; None: no limit."""
        if way.occupied.snapshot is None and way.occupied.environment is None:
            return None
        left_s = clock.left_s()
        spare_s = left_s - cold_reserve_s(
            cold_ms=self._selector.cold_ms(way.occupied.launch), left_s=left_s
        )
        return spare_s if spare_s > 0 else None

    async def on_success(self, way: StartSource, *, suspect: str, launch: LaunchSpec) -> None:
        """Record a successful start. `suspect`: the snapshot that failed earlier in the same
        start."""
        if suspect and not self._template_booter.exclude(launch, suspect):
            await self._selector.failed(
                suspect, "hook", "its worker did not become ready, but a booted one did"
            )
        if way.kind is StartKind.RESTORE and way.occupied.snapshot is not None:
            self._selector.used(way.occupied.snapshot)
            self._template_booter.restore_in_background(launch)
        elif way.kind is StartKind.WAKE:
            self._template_booter.restore_in_background(launch)
        elif way.kind in BOOTED:
            self._builder.want(launch)

    async def on_wrong_answer(self, snapshot_id: str, message: str) -> None:
        """Quarantine a snapshot whose worker answered incorrectly."""
        await self._selector.quarantine(snapshot_id, message)

    def took(self, launch: LaunchSpec, info: InstanceInfo, seconds: float) -> None:
        """Record the duration of a whole start, without waiting for weights or other boots; of
        RESTORE only its own phases, without waiting for a slot or for other restores."""
        own = {k: v for k, v in info.phases_ms.items() if k not in ("slot", *WAITS, "prefetch")}
        whole_ms = max(
            0.0,
            seconds * 1000 - sum(info.phases_ms.get(phase, 0.0) for phase in (*WAITS, "queue")),
        )
        took_ms = sum(own.values()) if info.start_kind is StartKind.RESTORE else whole_ms
        text = "rung.took revision=%s rung=%s ms=%.0f after weights_ms=%.0f"
        _log.info(
            text, launch.revision, info.start_kind, took_ms, info.phases_ms.get("weights", 0.0)
        )
        self._selector.took(launch, info.start_kind, took_ms)

    async def _restored(
        self, launch: LaunchSpec, phase: StartPhase, clock: StartDeadline, closed: set[StartKind]
    ) -> _Restored:
        """A worker from a snapshot, for this start or for all that wait for it."""
        expecting = asyncio.create_task(
            self._weights.predict_wait_s(launch), name=f"weights of {launch.revision}"
        )
        try:
            snapshot = await self._selector.find(launch, phase)
            weights_s = 0.0 if snapshot is None else await expecting
        finally:
            expecting.cancel()
        if snapshot is None:
            closed.add(StartKind.RESTORE)
            return _Restored()
        phase.name, phase.kind = "restore", StartKind.RESTORE

        def restore() -> Coroutine[Any, Any, OccupiedSlot | None]:
            return self._restore(launch, snapshot, phase, clock, closed, weights_s=weights_s)

        if not self._can_be_shared(launch, snapshot):
            return _Restored(occupied=await restore())
        if (running := self._shared.get(launch.revision)) is not None:
            if not await running.follow():
                closed.add(StartKind.RESTORE)
            return _Restored(is_shared=True)
        with self._shared.lead(launch.revision) as shared:
            occupied = await restore()
            if occupied is None or not shared.followers:
                shared.has_failed = StartKind.RESTORE in closed
                return _Restored(occupied=occupied)
            phase.cpu_ns += occupied.cpu_ns()
            if not await self._template_booter.share(occupied):
                shared.has_failed = True
                closed.add(StartKind.RESTORE)
                await self._selector.failed(
                    snapshot.id, "worker_lost", "its worker ended before it was forked"
                )
        return _Restored(is_shared=True)

    def _can_be_shared(self, launch: LaunchSpec, snapshot: Snapshot) -> bool:
        """Whether several starts may be forked from one restored worker, and a fork is expected to
        take less time than a restore."""
        return (
            launch.forkable
            and not launch.gpu
            and not snapshot.manifest.in_place
            and self._selector.is_fork_faster(launch, snapshot)
            and self._template_booter.has_room(launch)
        )

    async def _restore(
        self,
        launch: LaunchSpec,
        snapshot: Snapshot,
        phase: StartPhase,
        clock: StartDeadline,
        closed: set[StartKind],
        *,
        weights_s: float,
    ) -> OccupiedSlot | None:
        """Restore in turn. None: a Template has become available, or RESTORE is excluded now."""
        async with YieldableSlot(self._gate, phase.share) as turn:
            if self._templates.get(launch.revision) is not None:
                return None
            predicted_ms, cold_ms = (
                self._selector.restore_ms(launch, snapshot),
                self._selector.cold_ms(launch),
            )
            text = "rungs.expected revision=%s restore_ms=%.0f cold_ms=%.0f after weights_ms=%.0f"
            _log.info(text, launch.revision, predicted_ms, cold_ms, weights_s * 1000)
            left_s = max(0.0, clock.left_s() - weights_s)  # both strategies wait for them
            deadline_s = restore_deadline_s(restore_ms=predicted_ms, cold_ms=cold_ms, left_s=left_s)
            if deadline_s is not None:
                with phase.patience.bounded_by(turn=turn):
                    occupied = await self._selector.restore(
                        launch, snapshot, phase, self._ends, deadline_s=deadline_s, is_start=True
                    )
                if occupied is not None:
                    return occupied
            elif predicted_ms >= cold_ms:
                self._selector.passed_over(launch, snapshot)
        closed.add(StartKind.RESTORE)
        return None
