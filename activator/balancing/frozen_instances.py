"""Idle instances of one revision whose processes stand still until the next call, where the
operator says so (`activator.freeze_idle_s`).

A frozen instance keeps its slots, its memory and its bill; it has no processor. It stays among the
instances, takes no call, and is thawed as soon as a call waits: on one machine that is one order to
the node agent (SIGCONT, signal(7)). Language models' engines are not frozen: they work for their
scheduler between calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from activator.balancing.fleet import Fleet
from activator.balancing.instance import Instance
from snapshotter import errors as agent_errors

log = logging.getLogger(__name__)
_AGAIN_S = 0.1


class FrozenOwner(Protocol):
    """Whose instances they are."""

    def thawed(self, instance: Instance) -> None:
        """It takes calls again."""
        ...

    def drain(self, instance: Instance) -> None:
        """It could not be thawed: no calls for it, and it ends."""
        ...


class Frozen:
    """Owner: the InstancePool; its methods are synchronous, the waiting is in one task for each
    instance."""

    def __init__(self, *, fleet: Fleet, owner: FrozenOwner) -> None:
        self._fleet = fleet
        self._owner = owner
        self._wanted: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Frozen {len(self._wanted)}>"

    def __len__(self) -> int:
        return len(self._wanted)

    def freeze(self, instance: Instance) -> None:
        """An idle instance takes no call from now on, until it is thawed."""
        self._begin(instance, lambda: self._fleet.sleep(instance.info.id))

    def adopt(self, instance: Instance) -> None:
        """One was frozen when this activator came: it is thawed, and frozen again after its
        time."""
        self._begin(instance, lambda: asyncio.sleep(0))
        self.thaw([instance], 1)

    def thaw(self, instances: Iterable[Instance], most: int) -> None:
        """Have up to `most` of these go on, those that were used last first."""
        frozen = [
            instance
            for instance in instances
            if instance.is_frozen and not instance.is_gone and not instance.is_draining
        ]
        for instance in sorted(frozen, key=lambda instance: -instance.idle_since)[: max(0, most)]:
            self._wanted[instance.id].set()

    def _begin(self, instance: Instance, freeze: Callable[[], Awaitable[object]]) -> None:
        instance.is_frozen = True
        self._wanted[instance.id] = asyncio.Event()
        self._tasks[instance.id] = asyncio.create_task(
            self._hold(instance, freeze), name=f"freeze {instance.id}"
        )

    async def _hold(self, instance: Instance, freeze: Callable[[], Awaitable[object]]) -> None:
        try:
            # it may have done it all the same
            with contextlib.suppress(agent_errors.AgentUnavailable):
                await freeze()
            await self._wanted[instance.id].wait()
            await self._thaw(instance)
        except agent_errors.SnapshotterError as e:
            log.warning("instance is not frozen or thawed instance=%s error=%s", instance.id, e)
            self._forget(instance)
            self._owner.drain(instance)
        else:
            self._forget(instance)
            instance.is_frozen = False
            self._owner.thawed(instance)

    async def _thaw(self, instance: Instance) -> None:
        """Again and again while the node agent is away: it comes back and finds the instance as it
        was."""
        while True:
            try:
                await self._fleet.wake(instance.info.id)
                return
            except agent_errors.AgentUnavailable:
                await asyncio.sleep(_AGAIN_S)

    def leave(self, instance: Instance) -> None:
        """It is stopped, or gone: whoever ends it on the node has it go on first."""
        if (task := self._tasks.get(instance.id)) is not None:
            task.cancel()
        self._forget(instance)

    def _forget(self, instance: Instance) -> None:
        self._wanted.pop(instance.id, None)
        self._tasks.pop(instance.id, None)

    async def aclose(self) -> None:
        """Those that are frozen stay so: they belong to the node, and whoever comes next adopts
        them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
