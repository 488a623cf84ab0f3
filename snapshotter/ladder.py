"""Starting: the first rung that can be reached. FORK if a Template of the revision is resident, else COLD: boot one, then fork.

A worker that cannot be forked (surplus threads, `forkable=False`) serves in place, one slot for each instance; one that was booted ahead
and waits at its snapshot point is woken (WAKE). Boots are single flight per revision, starts are single flight per instance id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snapshotter import exits, slots, wire
from snapshotter.boots import Boots
from snapshotter.cgroups import Cgroups, Group
from snapshotter.ends import Ends
from snapshotter.errors import LeaseHeld, NoCapacity, SnapshotterError, StartFailed, StartTimeout
from snapshotter.housing import Housekeeper, Housing, Phase
from snapshotter.instances import Instance, Instances
from snapshotter.logs import Logs
from snapshotter.metrics import Metrics
from snapshotter.parking import Parking
from snapshotter.running import Running
from snapshotter.slots import SlotLost
from snapshotter.templates import Templates
from snapshotter.types import InstanceId, InstanceInfo, InstanceState, LaunchSpec, RevisionKey, StartKind, TemplateInfo

_log = logging.getLogger(__name__)
NOTICE_S = 0.05
"""Between the word that an instance stops and its SIGTERM: time for its lessee, on this machine, to send it nothing more."""
_ATTEMPTS = 3
"""A Template may die between the choice and the fork; three times in a row is no accident."""


class TemplateLost(Exception):
    """Raised when the Template was gone before it forked: the start takes the next rung."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One start that was asked for."""

    launch: LaunchSpec
    instance_id: InstanceId
    lessee: str
    secret_env: Mapping[str, str]


@dataclass(kw_only=True)
class _Flight:
    task: asyncio.Task[InstanceInfo]
    waiters: int = 0


class Ladder:
    """Owner: the event loop. Decisions (`_acquire`, `_make_room`) do not await between the look and the act."""

    def __init__(
        self,
        *,
        housekeeper: Housekeeper,
        boots: Boots,
        ends: Ends,
        instances: Instances,
        templates: Templates,
        parking: Parking,
        cgroups: Cgroups,
        logs: Logs,
        metrics: Metrics,
        memory_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._housekeeper = housekeeper
        self._boots = boots
        self._ends = ends
        self._instances = instances
        self._templates = templates
        self._parking = parking
        self._cgroups = cgroups
        self._logs = logs
        self._metrics = metrics
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._flights: dict[InstanceId, _Flight] = {}

    def __repr__(self) -> str:
        return f"<Ladder {len(self._flights)} starting, {self._boots!r}, {self._instances!r}, {self._templates!r}>"

    async def start(self, request: Request) -> InstanceInfo:
        """See `AgentClient.start`. The last caller that leaves takes the start with it."""
        known = self._instances.get(request.instance_id)
        if known is not None and known.info.lessee != request.lessee:
            raise LeaseHeld(f"instance {known.info.id} is leased to {known.info.lessee}", {"lessee": known.info.lessee})
        if known is not None and known.info.state is InstanceState.READY:
            return known.info
        flight = self._flights.get(request.instance_id) or self._fly(request)
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                flight.task.cancel()

    async def prepare(self, launch: LaunchSpec) -> TemplateInfo:
        """See `AgentClient.prepare`."""
        for _ in range(_ATTEMPTS):
            template = self._templates.get(launch.revision)
            if template is not None:
                return template.info()
            await self._boots.once(launch)
        raise StartFailed(f"revision {launch.revision}: its Template ends as soon as it is ready", {"log_tail": []})

    async def stop(self, instance_id: InstanceId, grace_s: float) -> None:
        """See `AgentClient.stop`."""
        flight = self._flights.get(instance_id)
        if flight is not None:
            flight.task.cancel()
            await asyncio.wait([flight.task])
        instance = self._instances.get(instance_id)
        if instance is not None:
            if grace_s > 0 and instance.was_ready and instance.info.state is InstanceState.READY:
                instance.become(InstanceState.DRAINING)
                self._ends.instance_stopping(instance)
                await asyncio.sleep(NOTICE_S)
            await instance.stop(grace_s)

    def drop_template(self, revision: RevisionKey) -> None:
        """See `AgentClient.drop_template`."""
        template = self._templates.get(revision)
        if template is not None:
            self._ends.drop(template, "stopped")

    async def aclose(self, grace_s: float) -> None:
        """End everything: starts and boots first, then Templates, so that nothing new is born; then instances."""
        flights = [f.task for f in self._flights.values()]
        for flight in flights:
            flight.cancel()
        if flights:
            await asyncio.wait(flights)
        await self._boots.cancel()
        for template in self._templates:
            self._ends.drop(template, "stopped")
        async with asyncio.TaskGroup() as group:
            for instance in self._instances:
                group.create_task(instance.stop(grace_s), name=f"stop {instance.info.id}")

    def _fly(self, request: Request) -> _Flight:
        flight = _Flight(task=asyncio.create_task(self._start(request), name=f"start {request.instance_id}"))
        self._flights[request.instance_id] = flight
        flight.task.add_done_callback(lambda task: self._landed(request.instance_id, task))
        return flight

    def _landed(self, instance_id: InstanceId, task: asyncio.Task[InstanceInfo]) -> None:
        del self._flights[instance_id]
        slots.seen(task)

    async def _start(self, request: Request) -> InstanceInfo:
        began, phase, timeout_s = time.perf_counter(), Phase(), request.launch.startup_timeout_s
        leaving = self._instances.get(request.instance_id)
        if leaving is not None:  # an earlier life of the same id is still being cleared
            await leaving.cleared.wait()
        self._make_room(request.launch)
        attempt = self._claim(request)
        try:
            async with asyncio.timeout(timeout_s):
                instance = await self._climb(request, attempt, phase)
        except TimeoutError as e:
            self._metrics.start_failed(StartKind.COLD if phase.name != "fork" else StartKind.FORK, StartTimeout.code)
            detail = {"phase": phase.name, "log_tail": await self._last_lines(request, phase)}
            raise StartTimeout(f"instance {request.instance_id} was not ready within {timeout_s:g} s (phase {phase.name})", detail) from e
        except SnapshotterError as e:
            self._metrics.start_failed(StartKind.COLD if phase.name != "fork" else StartKind.FORK, e.code)
            raise
        finally:
            self._abandon_unless_ready(request.instance_id)
        self._metrics.started(instance.info.start_kind, time.perf_counter() - began, instance.info.phases_ms)
        return instance.info

    async def _climb(self, request: Request, instance: Instance, phase: Phase) -> Instance:
        for _ in range(_ATTEMPTS):
            try:
                housing, in_place, kind = await self._acquire(request.launch, phase)
                await self._run(instance, housing, request, kind=kind, in_place=in_place)
                return instance
            except (TemplateLost, SlotLost):
                if instance.running is not None and not instance.cleared.is_set():
                    await instance.cleared.wait()
                instance = self._claim(request)
        raise StartFailed(f"instance {request.instance_id}: its Template ended {_ATTEMPTS} times before the fork", {"log_tail": []})

    def _claim(self, request: Request) -> Instance:
        info = InstanceInfo(
            id=request.instance_id,
            revision=request.launch.revision,
            state=InstanceState.STARTING,
            socket="",
            start_kind=StartKind.COLD,
            phases_ms={},
            lessee=request.lessee,
            started_at=self._clock(),
            pid=0,
            memory_bytes=request.launch.memory_bytes,
            cpu=request.launch.cpu,
            labels=dict(request.launch.labels),
        )
        instance = Instance(info=info)
        self._instances.add(instance)
        return instance

    async def _acquire(self, launch: LaunchSpec, phase: Phase) -> tuple[Housing, bool, StartKind]:
        """Where to start from: (slot, in place?, how). What it returns must be used before the next await."""
        kind = StartKind.FORK
        while True:
            template = self._templates.use(launch.revision, self._clock())
            if template is not None:
                phase.name = "fork"
                woken = template.single and kind is StartKind.FORK
                return template.housing, template.single, StartKind.WAKE if woken else kind
            kind, phase.name = StartKind.COLD, "boot"
            if not launch.forkable or self._templates.is_single(launch.revision):
                return await self._boots.boot(launch, phase), True, kind
            await self._boots.once(launch)

    async def _run(self, instance: Instance, housing: Housing, request: Request, *, kind: StartKind, in_place: bool) -> None:
        """Fork or serve, and wait until it is ready. Raises StartFailed, TemplateLost, SlotLost."""
        slot = housing.slot
        try:
            instance.info = replace(instance.info, start_kind=kind, socket=str(slot.directory / f"{instance.info.id}.sock"))
            running = self._order(instance, housing, request, in_place=in_place)
        except (SnapshotterError, SlotLost):
            await instance.clear()
            self._ends.clear_if_empty(housing)
            raise
        either: list[asyncio.Future[Any]] = [running.ready, running.gone]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.gone.done():
            raise await self._explain(instance, running)
        before = housing.boot_ms if kind is StartKind.COLD else {}
        instance.was_ready = True
        instance.become(InstanceState.READY, pid=running.pid, phases_ms={**before, **running.ready.result()})
        slot.note(instance.info.id, instance.note())
        if not in_place:
            self._parking.used(housing)
        _log.info("instance.ready id=%s revision=%s kind=%s", instance.info.id, instance.info.revision, kind)

    def _order(self, instance: Instance, housing: Housing, request: Request, *, in_place: bool) -> Running:
        launch, slot, name = request.launch, housing.slot, instance.info.id
        spot = None if in_place else self._parking.take(housing)
        try:
            instance.group = housing.group if in_place else spot.group if spot else self._make_group(request)
            self._logs.register(name, labels=launch.labels, revision=launch.revision, now=self._clock())
            listener = slots.listen(Path(instance.info.socket)).detach()
        except OSError as e:
            raise StartFailed(f"instance {name}: the node cannot make its socket, cgroup or log: {e}", {"log_tail": []}) from e
        env, cgroup = {**launch.env, **request.secret_env}, instance.group.ways_in()
        try:
            parked = spot.name if spot else None
            running = slot.start(name, env=env, cgroup=cgroup, note=instance.note(), in_place=in_place, listener=listener, parked=parked)
        except wire.MessageTooLong as e:
            raise StartFailed(f"instance {name}: {e}", {"log_tail": []}) from e
        instance.housing, instance.running = housing, running
        return running

    def _make_group(self, request: Request) -> Group:
        return self._cgroups.make(request.instance_id, memory_bytes=request.launch.memory_bytes, cpu=request.launch.cpu)

    async def _explain(self, instance: Instance, running: Running) -> StartFailed | TemplateLost:
        how, word = running.gone.result(), instance.info.exit_reason or "exited"
        await instance.cleared.wait()
        if word == "template_lost":
            return TemplateLost(instance.info.id)
        detail: dict[str, Any] = {"log_tail": await self._logs.tail(running.id), "exit_reason": word, **exits.detail(how.status)}
        message = exits.sentence(f"instance {running.id}", word, how.status, memory_bytes=instance.info.memory_bytes)
        if running.error is not None:
            detail["error"] = running.error
            message = f"instance {running.id} did not start: {running.error.get('type')}: {running.error.get('message')}"
        return StartFailed(message, detail)

    async def _last_lines(self, request: Request, phase: Phase) -> list[str]:
        """Of the instance, else of the boot that it waited for."""
        booting = [h.slot.id for h in self._housekeeper.housings.values() if h.launch.revision == request.launch.revision]
        for name in [request.instance_id, phase.subject, *booting]:
            if name and (lines := await self._logs.tail(name)):
                return lines
        return []

    def _abandon_unless_ready(self, instance_id: InstanceId) -> None:
        """What a start leaves that did not become an instance: a claim, or a process whose claim lasts until it is gone."""
        instance = self._instances.get(instance_id)
        if instance is None or instance.was_ready:
            return
        if instance.running is None or instance.housing is None:
            self._instances.remove(instance)
        elif not instance.running.gone.done():
            instance.asked = "stopped"
            instance.housing.slot.kill(instance_id)

    def _make_room(self, launch: LaunchSpec) -> None:
        """Evict Templates that nobody uses where that helps. Raises NoCapacity; no await before the claim, so the answer holds."""
        claimed = self._instances.claimed_bytes()
        if claimed + launch.memory_bytes > self._memory_bytes:
            free = max(0, self._memory_bytes - claimed)
            detail = {"resource": "memory", "asked": launch.memory_bytes, "free": free}
            wanted = f"{launch.memory_bytes // 1024**2} MiB wanted, {free // 1024**2} MiB of {self._memory_bytes // 1024**2} MiB free"
            raise NoCapacity(f"{wanted} on this node", detail)
        need = claimed + launch.memory_bytes + self._templates.pss_bytes() - self._memory_bytes
        self._boots.evict_unused(need, but=launch.revision)
