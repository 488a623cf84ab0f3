"""Boots or restores Templates, deduplicated by revision, and keeps them within their memory
budget."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

from pilotlight.core.background_tasks import BackgroundTasks, cancel_all
from snapshotter.errors import StartTimeout
from snapshotter.events import Events
from snapshotter.gpus.grants import GpuGrants
from snapshotter.gpus.kinds import satisfies_any
from snapshotter.slots import sockets
from snapshotter.slots.boot_limiter import NO_SHARE
from snapshotter.slots.logs import Logs
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.starts import frozen_workers
from snapshotter.starts.teardown import Teardown
from snapshotter.starts.templates import Template, Templates
from snapshotter.starts.worker_boot import WorkerBooter
from snapshotter.types import AgentEvent, LaunchSpec, RevisionKey, StartKind, TenantShare

_log = logging.getLogger(__name__)
BEHIND_S = 0.3


class TemplateBooter:
    """Makes Templates. Owner: the event loop. `_flights` changes between awaits only.

    Attributes:
        templates: the Templates of this node.
    """

    def __init__(
        self,
        *,
        workers: WorkerBooter,
        templates: Templates,
        ends: Teardown,
        logs: Logs,
        events: Events,
        background_tasks: BackgroundTasks,
        selector: SnapshotSelector,
        gpus: GpuGrants,
    ) -> None:
        self._workers = workers
        self.templates = templates
        self._ends = ends
        self._logs = logs
        self._events = events
        self._background_tasks = background_tasks
        self._selector = selector
        self._gpus = gpus
        self._flights: dict[RevisionKey, asyncio.Task[None]] = {}
        self._waiting: Counter[RevisionKey] = Counter()
        self._background_restores: set[RevisionKey] = set()
        self._discarded: set[RevisionKey] = set()
        self._unkept: set[RevisionKey] = set()
        """Revisions whose restored worker connects to others at once, or does not stay stopped."""
        self._cpu_ns: dict[RevisionKey, int] = {}
        self._closing = asyncio.Event()

    def __repr__(self) -> str:
        return f"<TemplateBooter {len(self._flights)} in flight>"

    async def ensure(
        self,
        launch: LaunchSpec,
        *,
        restoring: bool = False,
        imports: bool = True,
        share: TenantShare = NO_SHARE,
    ) -> None:
        """Boot a Template, or wait for the boot in progress. Raises the errors of `boot`, and
        StartTimeout.

        restoring: try a snapshot first. imports: IMPORT may be tried. Cancelling a caller does not
        cancel the boot: the next one can use the Template.
        """
        self._discarded.discard(launch.revision)
        if launch.revision not in self._flights:
            self._begin(
                launch.revision,
                self._make_template(launch, restoring=restoring, imports=imports, share=share),
            )
        self._waiting[launch.revision] += 1
        try:
            await asyncio.shield(self._flights[launch.revision])
        finally:
            self._waiting[launch.revision] -= 1
            if not self._waiting[launch.revision]:
                del self._waiting[launch.revision]

    def pop_cpu_ns(self, revision: RevisionKey) -> int:
        """CPU time of Template boots that starts caused; charged once, to the first start that
        calls this."""
        return self._cpu_ns.pop(revision, 0)

    async def share(self, occupied: OccupiedSlot) -> bool:
        """Make a restored worker the Template, once its working set is there, so that its forks do
        not each wait for it. False if it has exited. Cancelled, it becomes the Template at once."""
        self._discarded.discard(occupied.launch.revision)
        try:
            if occupied.pages is not None:
                await asyncio.shield(occupied.pages.brought)
        finally:
            self._register_unless_present(occupied)
        return self.templates.get(occupied.launch.revision) is not None

    def restore_in_background(self, launch: LaunchSpec) -> None:
        """Restore a Template in the background, unless there is one, or memory is insufficient. One
        that cannot be forked is frozen, and serves as one instance."""
        self._discarded.discard(launch.revision)
        if (
            launch.revision in self._background_restores
            or launch.revision in self._unkept
            or launch.gpu
            or self._closing.is_set()
        ):
            return
        self._background_restores.add(launch.revision)
        self._background_tasks.run(self._restore_after_delay(launch), f"refill {launch.revision}")

    def discard_pending(self, revision: RevisionKey) -> None:
        """Discard a Template of this revision that is being made, unless a start requests one
        again; one that no start waits for is not made further."""
        flight = self._flights.get(revision)
        if flight is not None or revision in self._background_restores:
            self._discarded.add(revision)
        if flight is not None and not self._waiting[revision]:
            flight.cancel()

    async def boot(
        self, launch: LaunchSpec, phase: StartPhase, *, imports: bool = True
    ) -> OccupiedSlot:
        """Boot a worker that becomes no Template (`WorkerBooter.boot`)."""
        return await self._workers.boot(launch, phase, imports=imports)

    def exclude(self, launch: LaunchSpec, snapshot_id: str) -> bool:
        """As `WorkerBooter.exclude`."""
        return self._workers.exclude(launch, snapshot_id)

    def resume(self, occupied: OccupiedSlot) -> None:
        """Continue a boot that an earlier agent began."""
        self._begin(occupied.launch.revision, self._resume(occupied))

    def has_room(self, launch: LaunchSpec) -> bool:
        """Whether the revision has a snapshot, and its memory fits into the budget."""
        image_bytes = self._selector.image_bytes(launch.revision)
        return (
            image_bytes is not None
            and self.templates.pss_bytes() + image_bytes <= self.templates.budget_bytes
        )

    def register(self, occupied: OccupiedSlot) -> None:
        """Register a booted worker as a Template; clear its slot if it has exited."""
        if occupied.slot.worker != "resident":
            self._ends.clear_if_empty(occupied)
            return
        occupied.restore_cpu_priority()
        occupied.charged_ns = occupied.group.cpu_ns()
        point = occupied.slot.point.result()
        template = Template(
            occupied=occupied,
            threads=point.threads,
            phases_ms=occupied.boot_ms,
            single=bool(point.threads)
            or not occupied.launch.forkable
            or occupied.whole
            or bool(occupied.launch.gpu),
            last_used_at=time.time(),
        )
        self.templates.add(template)
        message = f"a Template of {template.revision} is resident"
        self._events.publish(
            AgentEvent(
                kind="template_ready", subject=template.revision, reason="ready", message=message
            )
        )
        self._background_tasks.run(self._measure(template), f"measure {template.revision}")
        if occupied.pages is not None and occupied.has_missing_pages:
            occupied.pages.exited.add_done_callback(lambda _: self._on_whole(template))
        if frozen_workers.can_freeze(occupied):
            self._expire_later(template)
            self._watch_later(template)

    def evict_unused(self, need_bytes: int, *, but: RevisionKey) -> None:
        """Evict Templates without instances, least recently used first, to free memory for an
        instance."""
        for victim in self.templates.victims(need_bytes=need_bytes, unused_only=True):
            if victim.revision != but:
                self._ends.drop(victim, "evicted")

    def evict_gpus(self, launch: LaunchSpec, lacking: int) -> None:
        """Evict Templates, least recently used first, to free `lacking` GPUs that this launch
        accepts; none if that is not enough."""
        chosen: list[Template] = []
        for template in sorted(self.templates, key=lambda t: t.last_used_at):
            grant = template.occupied.gpus
            if (
                lacking > 0
                and grant is not None
                and not template.is_dumped
                and satisfies_any(grant.devices[0], launch.gpu)
            ):
                chosen.append(template)
                lacking -= len(grant.devices)
        for template in chosen if lacking <= 0 else ():
            self._ends.drop(template, "evicted")

    @contextlib.contextmanager
    def pinned(self, template: Template) -> Iterator[None]:
        """Prevent eviction while the context lasts; the budget is checked again afterwards."""
        template.is_dumped = True
        try:
            yield
        finally:
            template.is_dumped = False
            self._background_tasks.run(self._measure(template), f"measure {template.revision}")

    async def cancel(self) -> None:
        """Cancel all boots in progress, and disable background restores."""
        self._closing.set()
        await cancel_all(self._flights.values())

    def _begin(self, revision: RevisionKey, work: Coroutine[Any, Any, None]) -> None:
        flight = asyncio.create_task(work, name=f"boot {revision}")
        self._flights[revision] = flight
        flight.add_done_callback(lambda task: self._on_done(revision, task))

    def _on_done(self, revision: RevisionKey, flight: asyncio.Task[None]) -> None:
        del self._flights[revision]
        self._discarded.discard(revision)
        sockets.seen(flight)

    async def _make_template(
        self, launch: LaunchSpec, *, restoring: bool, imports: bool, share: TenantShare
    ) -> None:
        phase = StartPhase(share=share)
        try:
            with self._gpus.reserved(launch) as phase.gpus:
                async with asyncio.timeout(launch.startup_timeout_s):
                    occupied = await self._kept(launch, phase) if restoring else None
                    occupied = occupied or await self.boot(launch, phase, imports=imports)
            phase.cpu_ns += occupied.cpu_ns()
        except TimeoutError as e:
            message = (
                f"revision {launch.revision} did not reach its snapshot point within "
                f"{launch.startup_timeout_s:g} s"
            )
            raise StartTimeout(
                message, {"phase": phase.name, "log_tail": await self._logs.tail(phase.subject)}
            ) from e
        finally:
            if not restoring:  # the platform bears the cost of `prepare`
                self._cpu_ns[launch.revision] = self._cpu_ns.get(launch.revision, 0) + phase.cpu_ns
        self._register_unless_present(occupied)

    async def _restored(self, launch: LaunchSpec, phase: StartPhase) -> OccupiedSlot | None:
        """A worker restored for forking, with all pages loaded: otherwise each fork would load them
        again."""
        snapshot = await self._selector.find(launch, phase)
        if snapshot is None:
            return None
        phase.kind = StartKind.RESTORE
        # leave time for a boot if a caller waits
        deadline_s = launch.startup_timeout_s / (1 if phase.is_background else 2)
        occupied = await self._selector.restore(
            launch, snapshot, phase, self._ends, deadline_s=deadline_s, lazy=False
        )
        if occupied is not None:
            self._selector.used(snapshot.id)
        return occupied

    async def _kept(self, launch: LaunchSpec, phase: StartPhase) -> OccupiedSlot | None:
        """As `_restored`; one that cannot be forked is frozen."""
        occupied = await self._restored(launch, phase)
        if occupied is None or not frozen_workers.can_freeze(occupied):
            return occupied
        try:
            if await frozen_workers.freeze(occupied):
                return occupied
        except asyncio.CancelledError:
            self._ends.clear_if_empty(occupied)
            raise
        _log.info("template.not_kept revision=%s reason=connected", launch.revision)
        self._unkept.add(launch.revision)
        self._ends.clear_if_empty(occupied)
        return None

    async def _restore_after_delay(self, launch: LaunchSpec) -> None:
        """Restore a Template after a delay, so that the first call of the restored instance has the
        processor to itself."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), BEHIND_S)
                return
            if (
                self._needs_restore(launch)
                and (occupied := await self._kept(launch, StartPhase(is_background=True)))
                is not None
            ):
                self._register_restored(occupied)
        finally:
            self._background_restores.discard(launch.revision)
            self._discarded.discard(launch.revision)

    def _needs_restore(self, launch: LaunchSpec) -> bool:
        there = (
            launch.revision in self._discarded
            or launch.revision in self._flights
            or self.templates.get(launch.revision) is not None
        )
        return not there and self.has_room(launch)

    def _register_restored(self, occupied: OccupiedSlot) -> None:
        """Register it unless a boot is in progress: then a start fell back to it because the
        snapshot failed."""
        if occupied.launch.revision in self._flights:
            self._ends.clear_if_empty(occupied)
        else:
            self._register_unless_present(occupied)

    def _register_unless_present(self, occupied: OccupiedSlot) -> None:
        revision = occupied.launch.revision
        if (
            self._closing.is_set()
            or revision in self._discarded
            or self.templates.get(revision) is not None
        ):
            self._ends.clear_if_empty(occupied)
        else:
            self.register(occupied)

    async def _resume(self, occupied: OccupiedSlot) -> None:
        try:
            async with asyncio.timeout(occupied.launch.startup_timeout_s):
                await self._workers.slots.resume(occupied)
        except TimeoutError:
            await self._workers.slots.clear(occupied)
            return
        except asyncio.CancelledError:
            await asyncio.shield(
                asyncio.create_task(
                    self._workers.slots.clear(occupied), name=f"clear {occupied.slot.id}"
                )
            )
            raise
        self.register(occupied)

    def _expire_later(self, template: Template) -> None:
        asyncio.get_running_loop().call_later(self.templates.frozen_idle_s, self._expire, template)

    def _expire(self, template: Template) -> None:
        """Drop a frozen worker that nothing has called for, unless the revision has instances."""
        if self.templates.get(template.revision) is not template:
            return
        if self._workers.slots.has_instances(template.revision):
            self._expire_later(template)
        else:
            self._ends.drop(template, "idle")

    def _watch_later(self, template: Template) -> None:
        asyncio.get_running_loop().call_later(frozen_workers.WATCH_S, self._watch, template)

    def _watch(self, template: Template) -> None:
        """Drop a frozen worker that runs; none of its revision is kept again."""
        if self.templates.get(template.revision) is not template:
            return
        if not frozen_workers.has_run(template.occupied):
            self._watch_later(template)
            return
        _log.warning("template.not_kept revision=%s reason=not_stopped", template.revision)
        self._unkept.add(template.revision)
        self._ends.drop(template, "not_stopped")

    def _on_whole(self, template: Template) -> None:
        """All of its memory is there. The platform bears what that took."""
        occupied = template.occupied
        if self.templates.get(template.revision) is template and not self._closing.is_set():
            occupied.charged_ns = occupied.group.cpu_ns()
            self._background_tasks.run(self._measure(template), f"measure {template.revision}")

    async def _measure(self, template: Template) -> None:
        """Measure its PSS and apply the budget: evict the least recently used Templates, used or
        not; their instances continue without them."""
        template.pss_bytes = await asyncio.to_thread(frozen_workers.pss_bytes, template.occupied)
        surplus = self.templates.pss_bytes() - self.templates.budget_bytes
        for victim in self.templates.victims(need_bytes=surplus, unused_only=False):
            self._ends.drop(victim, "evicted")
