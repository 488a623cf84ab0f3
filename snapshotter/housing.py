"""A slot with something in it: how a launch becomes a booted worker, and how nothing of it is left behind.

Boot: a slot from the nursery, the bundle, the image's layout, the weights' leases, a cgroup, the launch file, the worker up to its
snapshot point. End: the shim and everything in it, the cgroup, the leases, the directory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter import exits, launch, slots
from snapshotter.cgroups import Cgroups, Group
from snapshotter.errors import StartFailed, Unsupported
from snapshotter.launch import BundleStore, ImageStore, Sources, WeightSource
from snapshotter.logs import Logs
from snapshotter.nursery import Nursery
from snapshotter.running import Owner
from snapshotter.slots import BootFailed, Slot
from snapshotter.types import LaunchSpec

_log = logging.getLogger(__name__)
_RECORD = "housing.json"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where a fork is parked: its name, and the group that will be its instance's."""

    name: str
    group: Group


@dataclass(kw_only=True, eq=False)
class Housing:
    """One slot, what was launched in it, and what has to be given back. Owner: the event loop.

    Attributes:
        boot_ms: phases until the snapshot point, `slot` first.
        is_booting: before the snapshot point whoever boots it clears it, too.
        lease_ids: weights held for it.
        spots, parked_bytes, timer: forks that wait for an assignment, their PSS as last measured, and when they are next looked at;
            `parking.Parking` owns them.
    """

    slot: Slot
    launch: LaunchSpec
    group: Group
    lease_ids: tuple[str, ...] = ()
    boot_ms: Mapping[str, float] = field(default_factory=dict)
    is_booting: bool = False
    spots: list[Spot] = field(default_factory=list)
    parked_bytes: int = 0
    timer: asyncio.TimerHandle | None = None

    def record(self) -> dict[str, Any]:
        """What a restarted agent reads."""
        held = {"group": self.group.to_json(), "lease_ids": list(self.lease_ids)}
        return {"launch": self.launch.to_json(), "boot_ms": dict(self.boot_ms), **held}

    @classmethod
    def of(cls, slot: Slot) -> Housing | None:
        """The housing of a slot that an earlier agent left; None when nothing was launched in it."""
        try:
            body = json.loads((slot.directory / _RECORD).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return cls(
            slot=slot,
            launch=LaunchSpec.from_json(body["launch"]),
            group=Group.from_json(body["group"]),
            lease_ids=tuple(body["lease_ids"]),
            boot_ms=body["boot_ms"],
        )


class Housekeeper:
    """Boots and clears slots, and knows all that are in use. Owner: the event loop.

    Attributes:
        housings: slot id → what lives there.
    """

    def __init__(
        self,
        *,
        nursery: Nursery,
        bundles: BundleStore,
        images: ImageStore,
        weights: WeightSource,
        cgroups: Cgroups,
        logs: Logs,
        runtime: Mapping[str, Path],
    ) -> None:
        self._nursery = nursery
        self._bundles = bundles
        self._images = images
        self._weights = weights
        self._cgroups = cgroups
        self._logs = logs
        self._runtime = runtime
        self.housings: dict[str, Housing] = {}

    async def boot(self, spec: LaunchSpec, phase: Phase, owner: Owner) -> Housing:
        """A worker at its snapshot point. Raises StartFailed, BundleUnavailable, Unsupported; on every way out nothing is left."""
        began = time.perf_counter()
        phase.name = "slot"
        layout, code = self._images.layout(spec.image), await self._bundles.ensure(spec.bundle)
        slot = await self._nursery.take()
        slot.owner, phase.subject = owner, slot.id
        housing = Housing(slot=slot, launch=spec, group=self._cgroups.group(slot.id), is_booting=True)
        self.housings[slot.id] = housing
        try:
            leases = []
            for mount in spec.weights:
                lease = await self._weights.lease(mount.manifest, holder=slot.id)
                leases.append((mount.name, Path(lease.path)))
                housing.lease_ids += (lease.lease_id,)
            uid = self._uid(spec)
            housing.group = self._cgroups.make(slot.id, memory_bytes=spec.memory_bytes, cpu=spec.cpu)
            sources = Sources(layout=layout, code=code, weights=dict(leases), runtime=self._runtime)
            self._logs.register(slot.id, labels=spec.labels, revision=spec.revision, now=time.time())
            housing.boot_ms = {"slot": (time.perf_counter() - began) * 1000}
            self._launch(housing, sources, uid)
            phase.name = "boot"
            point = await slot.point
            housing.boot_ms = {**housing.boot_ms, **point.phases_ms}
            slots.write_json(slot.directory / _RECORD, housing.record())
            housing.is_booting = False
            return housing
        except BootFailed as e:
            failure = await self.explain(housing, e)
            await self.clear(housing)
            raise failure from e
        except BaseException:
            await asyncio.shield(asyncio.create_task(self.clear(housing), name=f"clear {slot.id}"))
            raise

    async def resume(self, housing: Housing) -> None:
        """Wait for the snapshot point of an adopted slot that was booting. Raises StartFailed; the slot is cleared then."""
        try:
            point = await housing.slot.point
        except BootFailed as e:
            failure = await self.explain(housing, e)
            await self.clear(housing)
            raise failure from e
        housing.boot_ms = {**housing.boot_ms, **point.phases_ms}
        housing.is_booting = False

    async def clear(self, housing: Housing) -> None:
        """End the slot; give back all it held."""
        await housing.slot.end()
        self.housings.pop(housing.slot.id, None)
        await housing.group.remove()
        for lease_id in housing.lease_ids:
            await self._weights.release(lease_id)

    async def explain(self, housing: Housing, failure: BootFailed) -> StartFailed:
        """A boot's failure with everything that helps: the user's error, or the exit's reason, and the last lines."""
        spec, oom_kills = housing.launch, housing.group.oom_kills()
        word = exits.reason(failure.status, asked=None, oom_kills=oom_kills)
        detail: dict[str, Any] = {"log_tail": await self._logs.tail(housing.slot.id), "exit_reason": word, **exits.detail(failure.status)}
        message = str(failure)
        if failure.error is not None:
            detail["error"] = failure.error
            message = f"{failure.error.get('type')}: {failure.error.get('message')}"
        elif failure.status is not None or oom_kills:
            message = exits.sentence("the worker", word, failure.status, memory_bytes=spec.memory_bytes)
        return StartFailed(f"revision {spec.revision} did not start: {message}", detail)

    def _uid(self, spec: LaunchSpec) -> int | None:
        if spec.uid is None and self._nursery.namespaced:
            raise Unsupported(
                f"revision {spec.revision} names no uid to run as, and user code never runs as root: it was deployed while the platform "
                "ran without root; deploy it again"
            )
        if spec.uid is None or self._nursery.namespaced:
            return spec.uid
        if self._nursery.why_not == "the agent is not root":
            return None
        refused = f"this machine refuses namespaces ({self._nursery.why_not})"
        raise Unsupported(f"revision {spec.revision} wants uid {spec.uid}, but {refused}: give the agent CAP_SYS_ADMIN")

    def _launch(self, housing: Housing, sources: Sources, uid: int | None) -> None:
        slot, spec = housing.slot, housing.launch
        limits = launch.limits(spec, uid=uid, limits_memory=self._cgroups.limits_memory, limits_pids=self._cgroups.limits_pids)
        plan = launch.plan(spec, sources, directory=slot.directory, uid=uid, namespaced=self._nursery.namespaced, limits=limits)
        slots.write_json(slot.directory / _RECORD, housing.record())
        slots.write_json(slot.directory / "launch.json", plan.launch_file, mode=0o444)
        if not self._nursery.namespaced:
            for name in ("work", "tmp", "runtime"):
                (slot.directory / name).mkdir(mode=0o700)
            for name, path in sources.runtime.items():
                (slot.directory / "runtime" / name).symlink_to(path)
        slot.boot(plan.order, housing.group.ways_in())


@dataclass
class Phase:
    """Where a start is, for the message of one that takes too long; `subject` is the slot, once there is one."""

    name: str = "slot"
    subject: str = ""
