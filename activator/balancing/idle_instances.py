"""Idle instances of one revision that do not run until the next call: frozen ones, which keep their
slots, and suspended ones, which take no calls until they are resumed.

A frozen instance (`activator.freeze_idle_s`) keeps its slots and memory and is still billed; it
uses no CPU. It stays in the pool, takes no call, and is thawed as soon as a call waits, by one
request to the node agent (SIGCONT, signal(7)). Language models' engines are not frozen, because
they work between calls.

A suspended instance (`keep_asleep`) was idle for so long that it would have been stopped. It takes
no calls, uses no CPU and is not billed; its memory stays reserved on the node, so it is preempted
first for capacity, a quota or another activator. It is resumed before new instances are started,
and stopped when its time expires. A language model on a GPU releases GPU memory meanwhile, by its
engine's sleep mode: entered before the freeze, left after the resume."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from activator.balancing.fleet import Fleet
from activator.balancing.instance import Instance
from activator.routing.route_table import CallTarget
from activator.worker_client import engine_sleep
from pilotlight.core.background_tasks import BackgroundTasks, cancel_all
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceInfo, InstanceState

log = logging.getLogger(__name__)
_AGAIN_S = 0.1


class FrozenOwner(Protocol):
    """Owner of the frozen instances."""

    def thawed(self, instance: Instance) -> None:
        """The instance takes calls again."""

    def drain(self, instance: Instance) -> None:
        """The instance could not be thawed: stop it."""


class FrozenInstances:
    """Freezes and thaws instances. Owner: the InstancePool. Methods are synchronous; one task for
    each instance waits."""

    def __init__(self, *, fleet: Fleet, owner: FrozenOwner) -> None:
        self._fleet = fleet
        self._owner = owner
        self._thaw_requested: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<FrozenInstances {len(self._thaw_requested)}>"

    def __len__(self) -> int:
        return len(self._thaw_requested)

    def freeze(self, instance: Instance) -> None:
        """Freeze an idle instance. It takes no calls until it is thawed."""
        self._begin(instance, lambda: self._fleet.sleep(instance.info.id))

    def adopt(self, instance: Instance) -> None:
        """Adopt an instance that was frozen before this activator started: thaw it; it is frozen
        again when it is idle long enough."""
        self._begin(instance, lambda: asyncio.sleep(0))
        self.thaw([instance], 1)

    def thaw(self, instances: Iterable[Instance], most: int) -> None:
        """Thaw up to `most` of these instances, the most recently used first."""
        frozen = [
            instance
            for instance in instances
            if instance.is_frozen and not instance.is_gone and not instance.is_draining
        ]
        for instance in sorted(frozen, key=lambda instance: -instance.idle_since)[: max(0, most)]:
            self._thaw_requested[instance.id].set()

    def _begin(self, instance: Instance, freeze: Callable[[], Awaitable[object]]) -> None:
        instance.is_frozen = True
        self._thaw_requested[instance.id] = asyncio.Event()
        self._tasks[instance.id] = asyncio.create_task(
            self._freeze_until_thawed(instance, freeze), name=f"freeze {instance.id}"
        )

    async def _freeze_until_thawed(
        self, instance: Instance, freeze: Callable[[], Awaitable[object]]
    ) -> None:
        try:
            # the agent may have frozen it nevertheless
            with contextlib.suppress(agent_errors.AgentUnavailable):
                await freeze()
            await self._thaw_requested[instance.id].wait()
            await self._thaw(instance)
        except agent_errors.SnapshotterError as e:
            log.warning("cannot freeze or thaw instance instance=%s error=%s", instance.id, e)
            self._remove(instance)
            self._owner.drain(instance)
        else:
            self._remove(instance)
            instance.is_frozen = False
            self._owner.thawed(instance)

    async def _thaw(self, instance: Instance) -> None:
        """Thaw the instance, retrying while the node agent is unavailable: the instance stays
        frozen across a restart of the agent."""
        while True:
            try:
                await self._fleet.wake(instance.info.id)
                return
            except agent_errors.AgentUnavailable:
                await asyncio.sleep(_AGAIN_S)

    def untrack(self, instance: Instance) -> None:
        """Stop tracking an instance that exited or is being stopped; the node agent resumes it
        before it stops it."""
        if (task := self._tasks.get(instance.id)) is not None:
            task.cancel()
        self._remove(instance)

    def _remove(self, instance: Instance) -> None:
        self._thaw_requested.pop(instance.id, None)
        self._tasks.pop(instance.id, None)

    async def aclose(self) -> None:
        """Stop without thawing: frozen instances stay on the node, and the next process adopts
        them."""
        await cancel_all(self._tasks.values())


class ResumeListener(Protocol):
    """Owner of the suspended instances, notified of their state."""

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """An instance was resumed; `began`: when that was requested."""

    def resume_failed(self, instance: Instance) -> None:
        """An instance could not be resumed or suspended: stop it."""

    def request_scale_up(self, now: float) -> None:
        """An instance is suspended: waiting calls may have it resumed."""


@dataclass(slots=True)
class SuspendedInstance:
    """An instance suspended until `until` (monotonic seconds), unless it is resumed. `is_down`: the
    suspension is complete."""

    instance: Instance
    until: float
    is_down: bool = False


class SuspendedInstances:
    """Suspends and resumes instances. Owner: the InstancePool. Methods are synchronous; background
    tasks wait."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        owner: ResumeListener,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._owner = owner
        self._clock = clock
        self._suspended: dict[str, SuspendedInstance] = {}
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<SuspendedInstances {len(self._suspended)} asleep, {len(self._waking)} waking>"

    def __len__(self) -> int:
        return len(self._suspended)

    @property
    def waking(self) -> int:
        """Number of resumes in progress."""
        return len(self._waking)

    def has(self, instance_id: str) -> bool:
        """Return whether the instance is suspended or being resumed."""
        return instance_id in self._suspended or instance_id in self._waking

    def instances(self) -> list[Instance]:
        """Return the suspended instances, the longest suspended first."""
        return [suspended.instance for suspended in self._suspended.values()]

    # -- down --------------------------------------------------------------------------------------
    def suspend(self, target: CallTarget, instance: Instance) -> None:
        """Suspend an idle instance that takes no more calls."""
        instance.suspend_billing()
        suspended = self._suspended[instance.id] = SuspendedInstance(
            instance, self._clock() + target.spec.scaling.keep_asleep_s
        )
        self._tasks.run(self._suspend(target, suspended), f"sleep {instance.id}")

    def adopt(self, target: CallTarget, instance: Instance) -> None:
        """Adopt an instance that was suspended before this activator started."""
        instance.suspend_billing()
        self._suspended[instance.id] = SuspendedInstance(
            instance, self._clock() + target.spec.scaling.keep_asleep_s, is_down=True
        )

    async def _suspend(self, target: CallTarget, suspended: SuspendedInstance) -> None:
        instance = suspended.instance
        try:
            await engine_sleep.suspend(target.spec, instance.info.socket)
            instance.info = await self._fleet.sleep(instance.info.id)
        except agent_errors.SnapshotterError as e:
            log.warning("cannot suspend instance instance=%s error=%s", instance.id, e)
            if self._suspended.pop(instance.id, None) is not None:
                self._owner.resume_failed(instance)
            return
        suspended.is_down = True
        log.info("instance suspended instance=%s", instance.id)
        self._owner.request_scale_up(self._clock())

    # -- up ----------------------------------------------------------------------------------------
    def resume(self, target: CallTarget, most: int) -> int:
        """Resume up to `most` instances, the most recently suspended first, because their pages are
        the warmest. Returns how many."""
        ready = [
            suspended for suspended in reversed(self._suspended.values()) if suspended.is_down
        ][: max(0, most)]
        for suspended in ready:
            instance = self._suspended.pop(suspended.instance.id).instance
            task = asyncio.create_task(self._resume(target, instance), name=f"wake {instance.id}")
            self._waking[instance.id] = task
        return len(ready)

    async def _resume(self, target: CallTarget, instance: Instance) -> None:
        began = self._clock()
        instance.resume_billing()
        try:
            info = await self._fleet.wake(instance.info.id)
            await engine_sleep.resume(target.spec, info.socket)
        except agent_errors.SnapshotterError as e:
            log.warning("cannot resume instance instance=%s error=%s", instance.id, e)
            self._waking.pop(instance.id, None)
            self._owner.resume_failed(instance)
        except BaseException:
            self._waking.pop(instance.id, None)
            instance.settle_stopped(None)
            raise
        else:
            instance.settle_stopped(info.cpu_from_ns)
            if self._waking.pop(instance.id, None) is not None:
                self._owner.add(info, began)

    # -- out ---------------------------------------------------------------------------------------
    def remove(self, instance_id: str) -> Instance | None:
        """Remove a suspended instance that the caller stops; None when it is not suspended."""
        suspended = self._suspended.pop(instance_id, None)
        return suspended.instance if suspended is not None else None

    def record_exit(self, instance_id: str) -> Instance | None:
        """Remove an instance whose process exited."""
        task = self._waking.pop(instance_id, None)
        if task is not None:
            task.cancel()
        return self.remove(instance_id)

    def expired(self, now: float) -> list[Instance]:
        """Return the instances whose suspension has expired."""
        return [
            suspended.instance
            for suspended in self._suspended.values()
            if suspended.is_down and now >= suspended.until
        ]

    def settle_gpus(self) -> None:
        """Record the time of suspended instances' GPUs up to now."""
        for suspended in self._suspended.values():
            suspended.instance.settle_gpus()

    async def aclose(self) -> None:
        """Cancel operations in progress; suspended instances stay on the node."""
        await self._tasks.cancel()
        await cancel_all(self._waking.values())


def may_sleep(target: CallTarget, instance: Instance) -> bool:
    """Return whether an idle instance is suspended instead of stopped."""
    return (
        target.spec.scaling.keep_asleep_s > 0
        and instance.may_suspend
        and not instance.is_stuck
        and not instance.is_gone
        and instance.info.state is not InstanceState.ASLEEP
    )
