"""Idle instances of one revision whose processes are frozen until the next call
(`activator.freeze_idle_s`).

A frozen instance keeps its slots and memory and is still billed; it uses no CPU. It stays in the
pool, takes no call, and is thawed as soon as a call waits, by one request to the node agent
(SIGCONT, signal(7)). Language models' engines are not frozen, because they work between calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from activator.balancing.fleet import Fleet
from activator.balancing.instance import Instance
from pilotlight.core.background_tasks import cancel_all
from snapshotter import errors as agent_errors

log = logging.getLogger(__name__)
_AGAIN_S = 0.1


class FrozenOwner(Protocol):
    """Owner of the frozen instances."""

    def thawed(self, instance: Instance) -> None:
        """The instance takes calls again."""
        ...

    def drain(self, instance: Instance) -> None:
        """The instance could not be thawed: stop it."""
        ...


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
