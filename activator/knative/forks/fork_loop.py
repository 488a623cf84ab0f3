"""Follows the instances of promoted pods that this activator has claimed: reports those that have
ended, and gives up pods that were idle for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from activator.knative.forks.pod_forks import PodForks
from activator.knative.pod_registry import OwnedPod, PodRegistry
from activator.knative.pod_watcher import PodWatcher
from snapshotter.types import AgentEvent

LOOK_S = 1.0
"""Interval between questions to a pod's launcher."""


class ForkLoop:
    """The loop. Owner: the event loop."""

    def __init__(
        self,
        pods: PodWatcher,
        claimed: PodRegistry,
        forks: PodForks,
        *,
        emit: Callable[[AgentEvent], None],
        give_back: Callable[[OwnedPod], Awaitable[None]],
    ) -> None:
        """`emit`: reports the end of an instance. `give_back`: releases a pod that is not needed
        here."""
        self._pods = pods
        self._claimed = claimed
        self._forks = forks
        self._emit = emit
        self._give_back = give_back

    def __repr__(self) -> str:
        return f"<ForkLoop {self._claimed!r} {self._forks!r}>"

    def may_keep_idle(self, held: OwnedPod) -> bool:
        """Whether a pod may stay for its Template alone; not once the revision has pods of its
        own."""
        has_own = any(pod.is_usable and not pod.is_promoted for pod in self._pods.of(held.pod.key))
        return not has_own and self._forks.keeps_idle(held, self._claimed)

    def keep_idle(self, held: OwnedPod) -> bool:
        """Keep a pod without instances for its Template, if that is allowed."""
        if not self.may_keep_idle(held):
            return False
        self._forks.mark_idle(held)
        return True

    async def run(self) -> None:
        """Look each second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.gather(*(self._inspect(held) for held in self._claimed))
            for held in self._forks.overdue(self._claimed):
                await self._give_back(held)

    async def _inspect(self, held: OwnedPod) -> None:
        for event in await self._forks.ended(held):
            self._claimed.forget_instance(event.subject)
            self._emit(event)
            if not (held.ports or held.is_told or held.is_lost or self.keep_idle(held)):
                await self._give_back(held)
