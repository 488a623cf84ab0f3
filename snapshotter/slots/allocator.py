"""How a launch becomes a worker at its snapshot point in a slot, and how everything is cleaned up.

Provisioning acquires a slot from the slot pool, leases of its weights, the bundle, the image's
layout and a cgroup; once the weights are on the node it writes the launch file, and a worker is
booted or restored (`snapshots.restores`). Clearing removes the shim and everything in it, the
cgroup, the leases and the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.errors import StartFailed, Unsupported
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.linux.slot_network import Network
from snapshotter.shim import cpu_priority
from snapshotter.shim.sandbox import mounts
from snapshotter.slots import exit_reason, launch_plan, sockets
from snapshotter.slots.boot_limiter import BootLimiter
from snapshotter.slots.launch_plan import NodeFiles, Sources
from snapshotter.slots.logs import Logs
from snapshotter.slots.occupied_slot import RECORD, OccupiedSlot, StartPhase
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.replies import BootFailed
from snapshotter.slots.slot import SlotListener
from snapshotter.slots.slot_devices import SlotDevices
from snapshotter.slots.weights import Opening, Weights
from snapshotter.types import LaunchSpec, RevisionKey

_AT_ONCE_MS = 1.0


@dataclass(frozen=True, kw_only=True)
class SlotPreparation:
    """A provisioned slot: its occupancy, how to launch in it, and for which uid (None: the agent's
    own)."""

    occupied: OccupiedSlot
    plan: launch_plan.Plan
    uid: int | None


class SlotAllocator:
    """Boots and clears slots, and tracks all slots in use. Owner: the event loop.

    Attributes:
        occupied_slots: slot id → its occupancy.
    """

    def __init__(
        self,
        *,
        slot_pool: SlotPool,
        files: NodeFiles,
        cgroups: Cgroups,
        logs: Logs,
        network: Network = Network.HOST,
        log_refused: bool = False,
        records_imports: bool = False,
    ) -> None:
        """`network`: of functions that need no network of their own. `log_refused`: the kernel logs
        denied system calls (`seccomp_log`). `records_imports`: workers report what they import
        (`environments`)."""
        self._network, self._log_refused = network, log_refused
        self._records_imports = records_imports
        platform = files.platform
        self._platform = platform if platform is not None and platform.is_dir() else None
        self._slot_pool = slot_pool
        self._files = files
        self._weights = Weights(files.weights)
        self._cgroups = cgroups
        self._logs = logs
        self._boot_limiter = BootLimiter.for_processors()
        self.occupied_slots: dict[str, OccupiedSlot] = {}

    async def boot(
        self,
        spec: LaunchSpec,
        phase: StartPhase,
        owner: SlotListener,
        *,
        network: bool = False,
        transient: bool = False,
    ) -> OccupiedSlot:
        """Boot a worker to its snapshot point. Raises StartFailed, BundleUnavailable, Unsupported;
        cleans up on every failure.

        network: needs its own network namespace; transient: as `OccupiedSlot.transient`.
        """
        async with self.provision(
            spec, phase, owner, network=network, transient=transient
        ) as preparation:
            occupied, phase.name = preparation.occupied, "queue"
            async with self._boot_limiter.acquire(phase.share) as queued_ms:
                phase.name = "boot"
                occupied.lower_cpu_priority(
                    cpu_priority.BACKGROUND if phase.is_background else cpu_priority.BOOT
                )
                is_nice = not occupied.group.has_cpu_group and os.geteuid() == 0
                occupied.slot.boot(
                    preparation.plan.order, {**occupied.group.entry_files(), "is_nice": is_nice}
                )
                point = await occupied.slot.point
            occupied.boot_ms = {
                **occupied.boot_ms,
                **({"queue": queued_ms} if queued_ms > _AT_ONCE_MS else {}),
                **point.phases_ms,
            }
        return occupied

    def boot_turn(self, phase: StartPhase) -> contextlib.AbstractAsyncContextManager[float]:
        """A permit to boot a restored process (`BootLimiter.acquire`)."""
        return self._boot_limiter.acquire(phase.share)

    def store_record(self, occupied: OccupiedSlot) -> None:
        """Write what a restarted agent needs to know of the slot."""
        sockets.write_json(occupied.slot.directory / RECORD, occupied.record())

    def is_listening(self, revision: RevisionKey) -> bool:
        """Whether a live worker of this revision listens on TCP: in the same network another one
        would find its port in use."""
        points = [
            occupied.slot.point
            for occupied in self.occupied_slots.values()
            if occupied.launch.revision == revision
        ]
        reached = [
            p.result() for p in points if p.done() and not p.cancelled() and p.exception() is None
        ]
        return any(point.listens for point in reached)

    def has_instances(self, revision: RevisionKey) -> bool:
        """Whether any instance of this revision runs here."""
        return any(
            occupied.slot.running
            for occupied in self.occupied_slots.values()
            if occupied.launch.revision == revision
        )

    @contextlib.asynccontextmanager
    async def provision(
        self,
        spec: LaunchSpec,
        phase: StartPhase,
        owner: SlotListener,
        *,
        network: bool = False,
        transient: bool = False,
    ) -> AsyncIterator[SlotPreparation]:
        """A slot with everything that a worker of `spec` needs; the caller creates the worker
        within the context. Cleans up on failure.

        Raises StartFailed for a BootFailed inside, BundleUnavailable, Unsupported, errors of the
        weight cache.
        """
        began = time.perf_counter()
        assert not spec.gpu or phase.gpus is not None, f"{spec.revision}: no GPUs were granted"
        phase.name = "slot"
        layout = self._files.images.layout_of(spec)
        occupied = await self._occupy(
            spec, phase, owner, self._network_of(spec, network), transient=transient
        )
        slot = occupied.slot
        opening = self._weights.open(spec.weights, holder=slot.id, pid=slot.shim_pid or None)
        occupied.lease_ids = opening.lease_ids
        try:
            await asyncio.sleep(0)  # send the requests to the cache, which works concurrently
            if spec.egress:
                await self._slot_pool.open_egress(slot, spec.egress)
            uid, code = self._uid(spec), await self._code_of(occupied)
            devices = self._devices_of(occupied)
            occupied.group = self._make_group(occupied, devices)
            if phase.is_background or transient:
                occupied.lower_cpu_priority(
                    cpu_priority.BACKGROUND if phase.is_background else cpu_priority.BOOT
                )
            self._logs.register(
                slot.id, labels=spec.labels, revision=spec.revision, now=time.time()
            )
            waited_ms = await self._wait_for_weights(occupied, opening, phase)
            volumes_ms = await self._wait_for_volumes(occupied, phase)
            sources = self._sources(occupied, layout, code)
            preparation = SlotPreparation(
                occupied=occupied,
                plan=self._write_launch(occupied, sources, uid, devices),
                uid=uid,
            )
            occupied.boot_ms = {
                **phase.before_ms,
                "slot": _since_ms(began) - waited_ms - volumes_ms,
                **({"weights": waited_ms} if occupied.weights else {}),
                **({"volumes": volumes_ms} if occupied.volumes else {}),
            }
            yield preparation
            waited_ms += volumes_ms
            occupied.took_ms = _since_ms(began) - waited_ms - occupied.boot_ms.get("queue", 0.0)
            self.store_record(occupied)
            occupied.is_booting = transient
        except BootFailed as e:
            phase.count_failed(occupied)
            await opening.cancel()
            failure = await self.explain(occupied, e)
            await self.clear(occupied)
            raise failure from e
        except BaseException:
            phase.count_failed(occupied)
            await asyncio.shield(
                asyncio.create_task(self._abandon(occupied, opening), name=f"clear {slot.id}")
            )
            raise

    async def _occupy(
        self,
        spec: LaunchSpec,
        phase: StartPhase,
        owner: SlotListener,
        network: Network,
        *,
        transient: bool,
    ) -> OccupiedSlot:
        slot = await self._slot_pool.acquire(network)
        slot.owner, phase.subject = owner, slot.id
        occupied = self.occupied_slots[slot.id] = OccupiedSlot(
            slot=slot,
            launch=spec,
            group=self._cgroups.group(slot.id),
            is_booting=True,
            transient=transient,
            gpus=phase.gpus,
        )
        return occupied

    async def _code_of(self, occupied: OccupiedSlot) -> Path:
        """The unpacked bundle; of a launch without code an empty directory."""
        if occupied.launch.bundle:
            return await self._files.bundles.ensure(occupied.launch.bundle)
        code = occupied.slot.directory / "code"
        code.mkdir(mode=0o755)
        return code

    def _sources(self, occupied: OccupiedSlot, layout: launch_plan.Layout, code: Path) -> Sources:
        """Where the parts of a slot are, whose weights are there."""
        platform = None if occupied.launch.offline else self._platform
        calls = (
            sockets.make_calls_directory(
                occupied.slot.directory, is_shown=self._slot_pool.namespaced
            )
            if platform is not None
            else None
        )
        return Sources(
            layout=layout,
            code=code,
            weights={name: served.path for name, served in occupied.weights.items()},
            volumes=occupied.volumes,
            runtime=self._files.runtime,
            criu=self._files.criu,
            platform=platform,
            calls=calls,
        )

    def _network_of(self, spec: LaunchSpec, needs_own: bool) -> Network:
        if not self._slot_pool.namespaced:
            return Network.of(needs_own)
        if spec.offline or self._network is Network.NONE:
            return Network.NONE
        return Network.OWN if needs_own else self._network

    async def _abandon(self, occupied: OccupiedSlot, opening: Opening) -> None:
        await opening.cancel()
        await self.clear(occupied)

    async def _wait_for_weights(
        self, occupied: OccupiedSlot, opening: Opening, phase: StartPhase
    ) -> float:
        """Wait for the weights; returns the idle waiting time in ms, which does not count as part
        of the start strategy."""
        began, before = time.perf_counter(), phase.name
        if opening.is_done:
            occupied.weights = await opening.ready()
            return 0.0
        phase.name = "weights"
        async with phase.patience.paused():
            occupied.weights = await opening.ready()
        phase.name = before
        return _since_ms(began)

    async def _wait_for_volumes(self, occupied: OccupiedSlot, phase: StartPhase) -> float:
        """Provide the volumes; returns the waiting time in ms, as `_wait_for_weights`."""
        spec = occupied.launch
        if not spec.volumes:
            return 0.0
        if self._files.volumes is None or not self._slot_pool.namespaced:
            raise Unsupported(
                f"revision {spec.revision} mounts volumes, which needs an agent that is root on "
                f"one machine: slots have mounts of their own only there"
            )
        began, before = time.perf_counter(), phase.name
        phase.name = "volumes"
        async with phase.patience.paused():
            occupied.volumes = await self._files.volumes.prepare(spec)
        phase.name = before
        return _since_ms(began)

    async def resume(self, occupied: OccupiedSlot) -> None:
        """Wait for the snapshot point of a reattached slot that was booting. Raises StartFailed
        after clearing the slot."""
        occupied.lower_cpu_priority(cpu_priority.BOOT)
        try:
            point = await occupied.slot.point
        except BootFailed as e:
            failure = await self.explain(occupied, e)
            await self.clear(occupied)
            raise failure from e
        occupied.boot_ms = {**occupied.boot_ms, **point.phases_ms}
        occupied.is_booting = False

    async def clear(self, occupied: OccupiedSlot) -> None:
        """End the slot and release everything that it holds."""
        occupied.cancel_priority_timer()
        await occupied.slot.end()
        self.occupied_slots.pop(occupied.slot.id, None)
        occupied.cleared.set()
        await occupied.group.remove()
        await self._weights.close(occupied.lease_ids)

    async def last_lines(self, revision: RevisionKey, names: Sequence[str]) -> list[str]:
        """Log tail of the first of `names` (instances, slots) that has one, or of a slot of this
        revision."""
        booting = [
            slot_id
            for slot_id, occupied in self.occupied_slots.items()
            if occupied.launch.revision == revision
        ]
        for name in (*names, *booting):
            if name and (lines := await self._logs.tail(name)):
                return lines
        return []

    async def explain(self, occupied: OccupiedSlot, failure: BootFailed) -> StartFailed:
        """A boot failure with diagnostics: the user's error, or the exit reason, and the last log
        lines."""
        spec, oom_kills = occupied.launch, occupied.group.oom_kills()
        word = exit_reason.reason(failure.status, requested=None, oom_kills=oom_kills)
        detail: dict[str, Any] = {
            "log_tail": await self._logs.tail(occupied.slot.id),
            "exit_reason": word,
            **exit_reason.detail(failure.status),
        }
        message = str(failure)
        if failure.error is not None:
            detail["error"] = failure.error
            message = f"{failure.error.get('type')}: {failure.error.get('message')}"
        if oom_kills or (failure.error is None and failure.status is not None):
            sentence = exit_reason.sentence(
                "the worker", word, failure.status, memory_bytes=spec.memory_bytes
            )
            message = sentence if failure.error is None else f"{sentence}; {message}"
        return StartFailed(f"revision {spec.revision} did not start: {message}", detail)

    def _uid(self, spec: LaunchSpec) -> int | None:
        if spec.uid is None and self._slot_pool.namespaced:
            raise Unsupported(
                f"revision {spec.revision} has no uid, and user code never runs as "
                f"root: it was deployed while the platform "
                "ran without root; deploy it again"
            )
        if spec.uid is None or self._slot_pool.namespaced:
            return spec.uid
        if self._slot_pool.why_not == "the agent is not root":
            return None
        refused = f"this machine does not allow namespaces ({self._slot_pool.why_not})"
        raise Unsupported(
            f"revision {spec.revision} requires uid {spec.uid}, but {refused}: give the agent "
            f"CAP_SYS_ADMIN"
        )

    def _make_group(self, occupied: OccupiedSlot, devices: SlotDevices) -> Group:
        """Create its control group. Raises StartFailed, such as where the agent's own group may not
        open the devices."""
        spec = occupied.launch
        try:
            return self._cgroups.make(
                occupied.slot.id,
                memory_bytes=spec.memory_bytes,
                cpu=spec.cpu,
                devices=devices.rules,
            )
        except OSError as e:
            raise StartFailed(
                f"revision {spec.revision}: cannot create its control group: {e}", {"log_tail": []}
            ) from e

    def _devices_of(self, occupied: OccupiedSlot) -> SlotDevices:
        """The devices of its grant. Without namespaces a slot shares the machine's nodes, and only
        CUDA_VISIBLE_DEVICES is its own. Raises Unsupported."""
        grant = occupied.gpus
        if self._slot_pool.namespaced or grant is None:
            return self._files.gpus.devices_of(grant)
        return SlotDevices(visible_devices=grant.visible_devices)

    def _write_launch(
        self, occupied: OccupiedSlot, sources: Sources, uid: int | None, devices: SlotDevices
    ) -> launch_plan.Plan:
        """Write the record and the launch file, and without namespaces create the directories that
        it names."""
        slot, spec = occupied.slot, occupied.launch
        limits = launch_plan.limits(
            spec,
            uid=uid,
            limits_memory=self._cgroups.limits_memory,
            limits_pids=self._cgroups.limits_pids,
        )
        plan = launch_plan.plan(
            spec,
            sources,
            directory=slot.directory,
            uid=uid,
            namespaced=self._slot_pool.namespaced,
            limits=limits,
            devices=devices,
            log_refused=self._log_refused,
            records_imports=self._records_imports,
        )
        self.store_record(occupied)
        sockets.write_json(slot.directory / "launch.json", plan.launch_file, mode=0o444)
        if not self._slot_pool.namespaced:
            for name in ("work", "tmp", "runtime", "bin"):
                (slot.directory / name).mkdir(mode=0o700)
            for name in mounts.PYTHONS:
                (slot.directory / "bin" / name).symlink_to(plan.order["python"])
            for name, path in sources.runtime.items():
                (slot.directory / "runtime" / name).symlink_to(path)
        return plan


def _since_ms(began: float) -> float:
    return (time.perf_counter() - began) * 1000
