"""The last step of every start: turns a worker at its snapshot point into an instance, by a fork,
an assignment, or in place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snapshotter.errors import SnapshotterError, StartFailed
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.shim import cpu_priority, seqpacket
from snapshotter.slots import exit_reason as exits
from snapshotter.slots import sockets
from snapshotter.slots.instance_process import InstanceProcess
from snapshotter.slots.instances import Instance
from snapshotter.slots.logs import Logs
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.slots.slot_devices import environment_of
from snapshotter.slots.weights import served_from
from snapshotter.starts.prefork_pool import PreforkPool
from snapshotter.starts.teardown import Teardown
from snapshotter.types import InstanceId, InstanceState, LaunchSpec, StartKind, TenantShare

_log = logging.getLogger(__name__)
BOOTED = (StartKind.IMPORT, StartKind.COLD)
"""Kinds of starts in which user code is imported and `enter()` runs."""


class TemplateLost(Exception):
    """Raised when the Template exited before it forked: the start tries the next strategy."""


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """One requested start."""

    launch: LaunchSpec
    instance_id: InstanceId
    lessee: str
    secret_env: Mapping[str, str]
    share: TenantShare | None = None


@dataclass(frozen=True, kw_only=True)
class StartSource:
    """Source of an instance: the slot, whether its worker itself becomes the instance, and the
    strategy that provided it."""

    occupied: OccupiedSlot
    in_place: bool
    kind: StartKind


class InstanceLauncher:
    """Turns workers into instances. Owner: the event loop; no await between the choice of a source
    and the order."""

    def __init__(
        self,
        *,
        ends: Teardown,
        prefork_pool: PreforkPool,
        cgroups: Cgroups,
        logs: Logs,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ends = ends
        self._prefork_pool = prefork_pool
        self._cgroups = cgroups
        self._logs = logs
        self._clock = clock

    async def run(self, instance: Instance, request: StartRequest, way: StartSource) -> None:
        """Fork or serve in place, and wait until the instance is ready. Raises StartFailed,
        TemplateLost, SlotConnectionLost."""
        occupied, slot = way.occupied, way.occupied.slot
        try:
            instance.info = replace(
                instance.info,
                start_kind=way.kind,
                gpus=occupied.gpus,
                socket=str(slot.directory / f"{instance.info.id}.sock"),
            )
            running = self._order(instance, request, way)
        except (SnapshotterError, SlotConnectionLost):
            await instance.clear()
            self._ends.clear_if_empty(occupied)
            raise
        either: list[asyncio.Future[Any]] = [running.ready, running.exited]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.exited.done():
            raise await self._explain(instance, running)
        if way.kind in BOOTED:
            self._restore_cpu_priority(instance, occupied)
        before = occupied.boot_ms if way.kind in (*BOOTED, StartKind.RESTORE) else {}
        instance.was_ready = True
        served = served_from(way.kind, occupied.launch, occupied.weights)
        instance.transition_to(
            InstanceState.READY,
            pid=running.pid,
            phases_ms={**before, **running.ready.result()},
            weights=served,
        )
        slot.store_note(instance.info.id, instance.to_note())
        if not way.in_place:
            self._prefork_pool.on_fork(occupied)
        _log.info(
            "instance.ready id=%s revision=%s kind=%s",
            instance.info.id,
            instance.info.revision,
            way.kind,
        )

    def kill_unready(self, instance: Instance) -> None:
        """Kill the process of a failed start; its memory claim lasts until it has exited."""
        if (
            instance.running is not None
            and instance.occupied is not None
            and not instance.running.exited.done()
        ):
            instance.requested_exit = "stopped"
            instance.occupied.slot.kill(instance.info.id)

    def _order(
        self, instance: Instance, request: StartRequest, way: StartSource
    ) -> InstanceProcess:
        launch, occupied, name = request.launch, way.occupied, instance.info.id
        spot = None if way.in_place else self._prefork_pool.acquire(occupied)
        try:
            instance.group = (
                occupied.group
                if way.in_place
                else spot.group
                if spot
                else self._make_group(request, way)
            )
            counted_ns = occupied.cpu_ns() if way.in_place else instance.group.cpu_ns() or 0
            instance.info = replace(
                instance.info,
                cpu_file=instance.group.cpu_file,
                cpu_from_ns=counted_ns - occupied.charge_idle_ns(),
            )
            log_bytes = request.share.log_bytes if request.share is not None else None
            self._logs.register(
                name,
                labels=launch.labels,
                revision=launch.revision,
                now=self._clock(),
                log_bytes=log_bytes,
            )
            listener = sockets.listen(Path(instance.info.socket)).detach()
        except OSError as e:
            raise StartFailed(
                f"instance {name}: cannot create its socket, cgroup or log: {e}",
                {"log_tail": []},
            ) from e
        env, cgroup, note = (
            {**launch.env, **request.secret_env, **environment_of(occupied.gpus)},
            instance.group.entry_files(),
            instance.to_note(),
        )
        parked = spot.name if spot else None
        occupied.is_pristine = False
        try:
            running = occupied.slot.start(
                name,
                env=env,
                cgroup=cgroup,
                note=note,
                in_place=way.in_place,
                listener=listener,
                parked=parked,
            )
        except seqpacket.MessageTooLong as e:
            raise StartFailed(f"instance {name}: {e}", {"log_tail": []}) from e
        instance.occupied, instance.running = occupied, running
        return running

    def _make_group(self, request: StartRequest, way: StartSource) -> Group:
        group = self._cgroups.make(
            request.instance_id, memory_bytes=request.launch.memory_bytes, cpu=request.launch.cpu
        )
        if way.kind in BOOTED:
            seconds, part = cpu_priority.FORK
            group.weigh(part)
            asyncio.get_running_loop().call_later(seconds, group.weigh, 1)
        return group

    @staticmethod
    def _restore_cpu_priority(instance: Instance, occupied: OccupiedSlot) -> None:
        """Restore the CPU priority of the slot and the instance (`cpu_priority`)."""
        occupied.restore_cpu_priority()
        if instance.group is not None and instance.group != occupied.group:
            instance.group.weigh(1)

    async def _explain(
        self, instance: Instance, running: InstanceProcess
    ) -> StartFailed | TemplateLost:
        how, word = running.exited.result(), instance.info.exit_reason or "exited"
        await instance.cleared.wait()
        if word == "template_lost":
            return TemplateLost(instance.info.id)
        detail: dict[str, Any] = {
            "log_tail": await self._logs.tail(running.id),
            "exit_reason": word,
            **exits.detail(how.status),
        }
        message = exits.sentence(
            f"instance {running.id}", word, how.status, memory_bytes=instance.info.memory_bytes
        )
        if running.error is not None:
            detail["error"] = running.error
            message = (
                f"instance {running.id} did not start: {running.error.get('type')}: "
                f"{running.error.get('message')}"
            )
        return StartFailed(message, detail)
