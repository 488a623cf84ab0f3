"""Instances of one revision that sleep: put to rest where they would be stopped, woken before
anything is started, ended in time.

An instance that sleeps takes no calls and no processor, and owes nothing; its memory stays claimed
on the node, so it is the first to go where room, a quota or another activator wants it. A language
model on a GPU gives the GPU's memory up meanwhile, by its engine's own sleep mode: before it stands
still, and after it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from activator.balancing.fleet import Fleet
from activator.balancing.instance import Instance
from activator.llm.engine_sleep import EngineSleepMode
from activator.routing.route_table import CallTarget
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceInfo, InstanceState

log = logging.getLogger(__name__)


class ResumeListener(Protocol):
    """Whose instances they are: told of what becomes of them."""

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """One is awake, `began` when it was asked for."""
        ...

    def not_woken(self, instance: Instance) -> None:
        """One could not be woken, or put to sleep: it is to be ended."""
        ...

    def poke(self, now: float) -> None:
        """One has fallen asleep: whoever came meanwhile may have it woken."""
        ...


@dataclass(slots=True)
class SuspendedInstance:
    """One that sleeps until `until` (monotonic seconds), unless it is woken. `is_down`: it really
    stands still."""

    instance: Instance
    until: float
    is_down: bool = False


class SuspendedInstances:
    """Owner: the InstancePool; its methods are synchronous, the waiting is in tasks of its own."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        owner: ResumeListener,
        clock: Callable[[], float],
        naps: EngineSleepMode | None = None,
    ) -> None:
        self._fleet = fleet
        self._owner = owner
        self._clock = clock
        self._naps = naps or EngineSleepMode()
        self._sleepers: dict[str, SuspendedInstance] = {}
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<SuspendedInstances {len(self._sleepers)} asleep, {len(self._waking)} waking>"

    def __len__(self) -> int:
        return len(self._sleepers)

    @property
    def waking(self) -> int:
        """Starts by WAKE under way."""
        return len(self._waking)

    def has(self, instance_id: str) -> bool:
        """Whether it is one of these."""
        return instance_id in self._sleepers or instance_id in self._waking

    def instances(self) -> list[Instance]:
        """Those that sleep, the longest first."""
        return [sleeper.instance for sleeper in self._sleepers.values()]

    # -- down --------------------------------------------------------------------------------------
    def put(self, target: CallTarget, instance: Instance) -> None:
        """An idle instance, which takes no calls any more, goes to sleep."""
        sleeper = self._sleepers[instance.id] = SuspendedInstance(
            instance, self._clock() + target.spec.scaling.keep_asleep_s
        )
        self._run(self._lay_down(target, sleeper), f"sleep {instance.id}")

    def adopt(self, target: CallTarget, instance: Instance) -> None:
        """One was asleep when this activator came."""
        self._sleepers[instance.id] = SuspendedInstance(
            instance, self._clock() + target.spec.scaling.keep_asleep_s, is_down=True
        )

    async def _lay_down(self, target: CallTarget, sleeper: SuspendedInstance) -> None:
        instance = sleeper.instance
        try:
            await self._naps.suspend(target.spec, instance.info.socket)
            instance.info = await self._fleet.sleep(instance.info.id)
        except agent_errors.SnapshotterError as e:
            log.warning("instance does not sleep instance=%s error=%s", instance.id, e)
            if self._sleepers.pop(instance.id, None) is not None:
                self._owner.not_woken(instance)
            return
        sleeper.is_down = True
        log.info("instance sleeps instance=%s", instance.id)
        self._owner.poke(self._clock())

    # -- up ----------------------------------------------------------------------------------------
    def wake(self, target: CallTarget, most: int) -> int:
        """Wake up to `most` of them, those that fell asleep last first: their pages are the
        warmest. How many that are."""
        ready = [sleeper for sleeper in reversed(self._sleepers.values()) if sleeper.is_down][
            : max(0, most)
        ]
        for sleeper in ready:
            instance = self._sleepers.pop(sleeper.instance.id).instance
            task = asyncio.create_task(self._wake(target, instance), name=f"wake {instance.id}")
            self._waking[instance.id] = task
        return len(ready)

    async def _wake(self, target: CallTarget, instance: Instance) -> None:
        began = self._clock()
        try:
            info = await self._fleet.wake(instance.info.id)
            await self._naps.resume(target.spec, info.socket)
        except agent_errors.SnapshotterError as e:
            log.warning("instance does not wake instance=%s error=%s", instance.id, e)
            self._waking.pop(instance.id, None)
            self._owner.not_woken(instance)
        except BaseException:
            self._waking.pop(instance.id, None)
            instance.settle_cpu(None)
            raise
        else:
            instance.settle_cpu(info.cpu_from_ns)
            if self._waking.pop(instance.id, None) is not None:
                self._owner.add(info, began)

    # -- out ---------------------------------------------------------------------------------------
    def take(self, instance_id: str) -> Instance | None:
        """One of those that sleep is to be ended: it is its caller's from now on."""
        sleeper = self._sleepers.pop(instance_id, None)
        return sleeper.instance if sleeper is not None else None

    def gone(self, instance_id: str) -> Instance | None:
        """Its process ended unasked."""
        task = self._waking.pop(instance_id, None)
        if task is not None:
            task.cancel()
        return self.take(instance_id)

    def expired(self, now: float) -> list[Instance]:
        """Those whose time is over."""
        return [
            sleeper.instance
            for sleeper in self._sleepers.values()
            if sleeper.is_down and now >= sleeper.until
        ]

    def _run(self, work: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Abandon what is under way; those that sleep stay: they belong to the node."""
        tasks = [*self._tasks, *self._waking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def may_sleep(target: CallTarget, instance: Instance) -> bool:
    """Whether an idle instance sleeps rather than ends."""
    return (
        target.spec.scaling.keep_asleep_s > 0
        and instance.may_rest
        and not instance.is_stuck
        and not instance.is_gone
        and instance.info.state is not InstanceState.ASLEEP
    )
