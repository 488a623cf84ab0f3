"""Starts instances: from the request to a ready instance, by the first strategy that succeeds
(`strategy`), within one startup timeout.

A strategy that fails, or whose worker does not become ready, is excluded for this start, which
continues with the next one: the caller sees only a longer start and its kind. Boots are
deduplicated by revision, starts by instance id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pilotlight.core.background_tasks import cancel_all
from snapshotter.errors import (
    LeaseHeld,
    NoCapacity,
    SnapshotterError,
    StartFailed,
    StartStopped,
    StartTimeout,
)
from snapshotter.linux import proc
from snapshotter.metrics import Metrics
from snapshotter.slots import sockets
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.boot_limiter import NO_SHARE
from snapshotter.slots.instances import Instance, Instances
from snapshotter.slots.occupied_slot import StartPhase
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.starts.launcher import InstanceLauncher, StartRequest, StartSource, TemplateLost
from snapshotter.starts.node_capacity import NodeCapacity, reservation_of
from snapshotter.starts.strategy import StartDeadline, StartStrategy
from snapshotter.starts.teardown import Teardown
from snapshotter.starts.template_boot import TemplateBooter
from snapshotter.types import (
    GpuGrant,
    InstanceId,
    InstanceInfo,
    InstanceState,
    LaunchSpec,
    RevisionKey,
    StartKind,
    TemplateInfo,
    TenantShare,
)
from weight_cache.errors import WeightCacheError

_log = logging.getLogger(__name__)
NOTICE_S = 0.05
"""Time between the event of a stop and SIGTERM, in which the instance's lessee, on this machine,
stops sending calls."""
WRONG_ANSWER = "WrongAnswer"
"""Error type of a worker that answers differently after a restore
(`pilotlight.worker.engine.errors`)."""
_ENDING_S = 5.0
"""How long a start waits for the GPUs of slots that are being cleared: their processes have to
leave the driver."""
_ATTEMPTS = 4
"""A Template may exit between the choice and the fork; three times in a row is no coincidence. One
more attempt for a failed restore."""


@dataclass(kw_only=True)
class _RunningStart:
    """A start in progress. `cpu_ns`: CPU time that it had used when it was stopped."""

    task: asyncio.Task[InstanceInfo]
    waiters: int = 0
    cpu_ns: int = 0


class InstanceStarter:
    """Starts, stops and lists instances. Owner: the event loop. Decisions (`_acquire`,
    `_make_room`) do not await between check and action."""

    def __init__(
        self,
        *,
        slot_allocator: SlotAllocator,
        template_booter: TemplateBooter,
        ends: Teardown,
        instances: Instances,
        strategy: StartStrategy,
        starts: InstanceLauncher,
        metrics: Metrics,
        room: NodeCapacity,
    ) -> None:
        self._slot_allocator = slot_allocator
        self._template_booter = template_booter
        self._ends = ends
        self._instances = instances
        self._templates = template_booter.templates
        self._strategy = strategy
        self._starts = starts
        self._metrics = metrics
        self._room = room
        self._flights: dict[InstanceId, _RunningStart] = {}

    def __repr__(self) -> str:
        return (
            f"<InstanceStarter {len(self._flights)} starting, {self._template_booter!r}, "
            f"{self._instances!r}, {self._templates!r}>"
        )

    async def start(self, request: StartRequest) -> InstanceInfo:
        """Start an instance, as `AgentClient.start`. Cancelled when its last caller is
        cancelled."""
        known = self._instances.get(request.instance_id)
        if known is not None and known.info.lessee != request.lessee:
            raise LeaseHeld(
                f"instance {known.info.id} is leased to {known.info.lessee}",
                {"lessee": known.info.lessee},
            )
        if known is not None and known.info.state in (InstanceState.READY, InstanceState.ASLEEP):
            return known.info
        flight = self._flights.get(request.instance_id) or self._begin(request)
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                message = f"instance {request.instance_id} was stopped while it started"
                raise StartStopped(message, {"cpu_ns": flight.cpu_ns}) from None
            raise
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                flight.task.cancel()

    async def prepare(self, launch: LaunchSpec, share: TenantShare | None = None) -> TemplateInfo:
        """Ensure a Template, as `AgentClient.prepare`."""
        self._room.require_tenant_allowed(share)
        for _ in range(_ATTEMPTS):
            template = self._templates.get(launch.revision)
            if template is not None:
                return template.info()
            await self._template_booter.ensure(launch, restoring=True, share=share or NO_SHARE)
        raise StartFailed(
            f"revision {launch.revision}: its Template exits as soon as it is ready",
            {"log_tail": []},
        )

    async def stop(self, instance_id: InstanceId, grace_s: float) -> None:
        """Stop an instance, as `AgentClient.stop`."""
        flight = self._flights.get(instance_id)
        if flight is not None:
            flight.task.cancel()
            await asyncio.wait([flight.task])
        instance = self._instances.get(instance_id)
        if instance is not None:
            if (
                grace_s > 0
                and instance.was_ready
                and instance.info.state in (InstanceState.READY, InstanceState.ASLEEP)
            ):
                if instance.info.state is InstanceState.ASLEEP:
                    proc.continue_tree(instance.info.pid)
                instance.transition_to(InstanceState.DRAINING)
                self._ends.publish_stopping(instance)
                await asyncio.sleep(NOTICE_S)
            await instance.stop(grace_s)

    def drop_template(self, revision: RevisionKey) -> None:
        """Stop a Template, as `AgentClient.drop_template`."""
        self._template_booter.discard_pending(revision)
        template = self._templates.get(revision)
        if template is not None:
            self._ends.drop(template, "stopped")

    async def aclose(self, grace_s: float) -> None:
        """Stop everything: starts and boots first, then Templates, so that nothing new is forked;
        then instances."""
        await cancel_all([f.task for f in self._flights.values()])
        await self._template_booter.cancel()
        for template in self._templates:
            self._ends.drop(template, "stopped")
        async with asyncio.TaskGroup() as group:
            for instance in self._instances:
                group.create_task(instance.stop(grace_s), name=f"stop {instance.info.id}")

    def _begin(self, request: StartRequest) -> _RunningStart:
        flight = _RunningStart(
            task=asyncio.create_task(self._start(request), name=f"start {request.instance_id}")
        )
        self._flights[request.instance_id] = flight
        flight.task.add_done_callback(lambda task: self._on_done(request.instance_id, task))
        return flight

    def _on_done(self, instance_id: InstanceId, task: asyncio.Task[InstanceInfo]) -> None:
        del self._flights[instance_id]
        sockets.seen(task)

    async def _start(self, request: StartRequest) -> InstanceInfo:
        began, phase = time.perf_counter(), StartPhase(share=request.share or NO_SHARE)
        previous = self._instances.get(request.instance_id)
        if previous is not None:  # an earlier instance of the same id is still being cleared
            await previous.cleared.wait()
        grant = await self._admit(request)
        # also while no attempt has them: one that failed was cleared, and the next has not begun
        with self._room.reserved_gpus(request.launch, grant) as phase.gpus:
            return await self._start_claimed(request, phase, began)

    async def _start_claimed(
        self, request: StartRequest, phase: StartPhase, began: float
    ) -> InstanceInfo:
        timeout_s = request.launch.startup_timeout_s
        attempt = self._claim(request, phase.gpus)
        try:
            async with asyncio.timeout(timeout_s):
                instance = await self._try_strategies(request, attempt, phase)
        except TimeoutError as e:
            self._metrics.start_failed(phase.kind, StartTimeout.code)
            cpu_ns = self._used_ns(request, phase)
            detail = {
                "phase": phase.name,
                "log_tail": await self._slot_allocator.last_lines(
                    request.launch.revision, [request.instance_id, phase.subject]
                ),
                "cpu_ns": cpu_ns,
            }
            raise StartTimeout(
                f"instance {request.instance_id} was not ready within {timeout_s:g} s (phase "
                f"{phase.name})",
                detail,
            ) from e
        except asyncio.CancelledError:
            self._flights[request.instance_id].cpu_ns = self._used_ns(request, phase)
            raise
        except WeightCacheError as e:
            self._metrics.start_failed(phase.kind, e.code)
            raise
        except SnapshotterError as e:
            self._metrics.start_failed(phase.kind, e.code)
            # A new error for each start: waiters of a boot share its error, but the CPU time
            # belongs to one start.
            raise type(e)(str(e), {**e.detail, "cpu_ns": self._used_ns(request, phase)}) from e
        finally:
            self._clean_up_unless_ready(request.instance_id)
        self._count_boots(instance, phase)
        self._record(request.launch, instance.info, time.perf_counter() - began)
        return instance.info

    def _record(self, launch: LaunchSpec, info: InstanceInfo, took_s: float) -> None:
        """Record metrics and predictions. The instance is ready: an implausible number must not
        fail the start."""
        try:
            self._metrics.started(info.start_kind, took_s, info.phases_ms)
            self._strategy.took(launch, info, took_s)
        except ValueError:
            _log.warning(
                "start.not_counted id=%s phases_ms=%s", info.id, info.phases_ms, exc_info=True
            )

    def _count_boots(self, instance: Instance, phase: StartPhase) -> None:
        """Charge CPU time that the start used outside the instance's group to the instance, also
        for a restarted agent."""
        elsewhere_ns = phase.cpu_ns + self._template_booter.pop_cpu_ns(instance.info.revision)
        if elsewhere_ns and instance.occupied is not None:
            instance.info = replace(
                instance.info, cpu_from_ns=instance.info.cpu_from_ns - elsewhere_ns
            )
            instance.occupied.slot.store_note(instance.info.id, instance.to_note())

    def _used_ns(self, request: StartRequest, phase: StartPhase) -> int:
        """CPU time of a failed start: its boots and its last attempt; earlier attempts are at the
        platform's expense."""
        return (
            phase.cpu_ns
            + phase.attempt_ns()
            + self._template_booter.pop_cpu_ns(request.launch.revision)
        )

    async def _try_strategies(
        self, request: StartRequest, instance: Instance, phase: StartPhase
    ) -> Instance:
        clock, closed, suspect = (
            StartDeadline(request.launch.startup_timeout_s),
            set[StartKind](),
            "",
        )
        for _ in range(_ATTEMPTS):
            way: StartSource | None = None
            phase.attempt_ns = instance.used_ns
            try:
                way = await self._strategy.acquire(request.launch, phase, clock, closed)
                async with asyncio.timeout(self._strategy.hook_timeout_s(way, clock)):
                    await self._starts.run(instance, request, way)
                await self._strategy.on_success(way, suspect=suspect, launch=request.launch)
                return instance
            except (TemplateLost, SlotConnectionLost, StartFailed, TimeoutError) as e:
                if way is not None and _counts_against_restore(way, e):
                    suspect = await self._exclude_restore(instance, way, closed, e)
                elif isinstance(e, StartFailed | TimeoutError):
                    raise
                else:
                    await self._wait_cleared(instance)
            phase.cpu_ns = 0  # the platform bears an attempt that it repeats
            instance = self._claim(request, phase.gpus)
        raise StartFailed(
            f"instance {request.instance_id}: its Template exited {_ATTEMPTS} times before "
            f"the fork",
            {"log_tail": []},
        )

    async def _exclude_restore(
        self, instance: Instance, way: StartSource, closed: set[StartKind], error: Exception
    ) -> str:
        """Handle a worker that came from a snapshot, or a fork of one, and did not become ready:
        end its process, and a Template of the same snapshot, which would fail as well; the start
        continues without RESTORE and IMPORT. Returns the snapshot's id."""
        words = {StartFailed: "hook_failed", TimeoutError: "hook_timeout"}
        reason = (
            "wrong_answer" if _is_wrong_answer(error) else words.get(type(error), "worker_lost")
        )
        _log.warning(
            "rung.failed id=%s rung=%s reason=%s error=%s",
            instance.info.id,
            way.kind,
            reason,
            error,
        )
        self._metrics.rung_failed(way.kind, reason)
        closed |= {StartKind.RESTORE, StartKind.IMPORT}
        self._starts.kill_unready(instance)
        template = self._templates.get(instance.info.revision)
        if (
            template is not None
            and template.occupied.origin == way.occupied.origin
            and type(error) in words
        ):
            self._ends.drop(template, reason)
        await self._wait_cleared(instance)
        if reason == "wrong_answer" and way.occupied.snapshot is not None:
            await self._strategy.on_wrong_answer(way.occupied.snapshot, str(error))
            return ""
        return way.occupied.origin or ""

    @staticmethod
    async def _wait_cleared(instance: Instance) -> None:
        if instance.running is not None and not instance.cleared.is_set():
            await instance.cleared.wait()

    def _claim(self, request: StartRequest, gpus: GpuGrant | None) -> Instance:
        info = InstanceInfo(
            id=request.instance_id,
            revision=request.launch.revision,
            state=InstanceState.STARTING,
            socket="",
            start_kind=StartKind.COLD,
            phases_ms={},
            lessee=request.lessee,
            started_at=time.time(),
            pid=0,
            memory_bytes=request.launch.memory_bytes,
            cpu=request.launch.cpu,
            gpus=gpus,
            labels=dict(request.launch.labels),
        )
        instance = Instance(info=info)
        self._instances.add(instance)
        return instance

    def _clean_up_unless_ready(self, instance_id: InstanceId) -> None:
        """Clean up a failed start: its claim, or its process, whose claim lasts until it has
        exited."""
        instance = self._instances.get(instance_id)
        if instance is None or instance.was_ready:
            return
        if instance.running is None or instance.occupied is None:
            self._instances.remove(instance)
        else:
            self._starts.kill_unready(instance)

    async def _admit(self, request: StartRequest) -> GpuGrant | None:
        """The GPUs of the start. Those of slots that end now are waited for: an instance whose
        process has exited is stopped, but its slot is cleared some milliseconds later. Then
        Templates that have GPUs are evicted, if that is enough. Raises NoCapacity."""
        until = time.monotonic() + _ENDING_S
        while True:
            try:
                return self._make_room(request)
            except NoCapacity as e:
                left_s = until - time.monotonic()
                if e.detail["resource"] != "gpu" or left_s <= 0:
                    raise
                if not (ending := self._ends.ending_with_gpus()):
                    lacking = int(e.detail["asked"]) - int(e.detail["free"])
                    self._template_booter.evict_gpus(request.launch, lacking)
                    ending = self._ends.ending_with_gpus()
                if not ending:
                    raise
            waits = [asyncio.create_task(slot.cleared.wait()) for slot in ending]
            try:
                await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_all(waits)

    def _make_room(self, request: StartRequest) -> GpuGrant | None:
        """The GPUs of the start: of the Template that it will use, or free ones. Evict unused
        Templates if that frees enough memory. Raises NoCapacity; no await before the claim, so the
        answer remains valid."""
        launch = request.launch
        infos = [instance.info for instance in self._instances]
        template = self._templates.get(launch.revision)
        has = template.occupied.gpus if template is not None else None
        try:
            grant = self._room.check(launch, infos, request.share, has=has)
        except NoCapacity as e:
            if e.detail["resource"] == "memory":
                self._ends.publish_shortage(
                    request.instance_id, request.share, e, reservation_of(infos)
                )
            raise
        claimed = self._instances.claimed_bytes()
        need = claimed + launch.memory_bytes + self._templates.pss_bytes() - self._room.memory_bytes
        self._template_booter.evict_unused(need, but=launch.revision)
        return grant


def _is_wrong_answer(error: Exception) -> bool:
    """Whether a restored worker answered the known prompt differently than before: one failure is
    sufficient."""
    failure = error.detail.get("error") if isinstance(error, StartFailed) else None
    return (
        isinstance(failure, Mapping) and str(failure.get("type")).rpartition(".")[2] == WRONG_ANSWER
    )


def _counts_against_restore(way: StartSource, error: Exception) -> bool:
    """Whether a worker booted from nothing may succeed: the failed one came from a snapshot. A
    Template lost before its fork says nothing about the snapshot."""
    return way.kind is StartKind.RESTORE or (
        way.occupied.origin is not None and isinstance(error, StartFailed | TimeoutError)
    )
