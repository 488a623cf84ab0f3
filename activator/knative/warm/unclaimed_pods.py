"""Finds promoted pods that no activator has, and deletes them.

Such a pod was promoted by an activator that died, for a start that was given up, or its owner
could not reach the controller when it wanted to delete it. Each activator looks; the one that
claims a pod deletes it, so that no start takes it meanwhile. Until then the next start of its
revision may claim it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from activator.knative.forks import launcher_client
from activator.knative.leases.pod_leases import ClaimsUnreachable, PodLeaseStore
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import ReadinessProbe
from activator.knative.warm.source import WarmPodSource
from activator.routing.route_table import CallTarget
from pilotlight.core.background_tasks import BackgroundTasks

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Interval between looks: one question to the claim store for each revision with such pods."""
ENDING_S = 5.0
"""How long the claim of a deleted pod is kept until the watch reports its end."""
RELEASED_S = 2.0
"""How long a promoted pod that is not needed here is left to starts of other activators."""
NO_DOCUMENT_S = 10.0
"""How long a promoted pod may wait for its launch document, which its activator sends within two
deadlines of two seconds; after a late claim, three seconds later."""
ROUTELESS_S = 30.0
"""How long a pod of a revision without a route stays: routes arrive within moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclaimed:
    """A promoted pod that no activator has. `free_s`: for how long that was seen; `age_s`: since it
    was first seen at all; `running`: calls in it, None = its worker does not answer; `is_warm`: it
    was never sent its launch document."""

    free_s: float
    age_s: float
    running: int | None
    is_restarted: bool = False
    is_warm: bool = False


def is_due(pod: Unclaimed, target: CallTarget | None) -> bool:
    """Whether to delete it: its worker was restarted (a promoted pod is one start's only), its
    activator died before it sent the document, it did not serve within the startup time-out, or it
    was idle for the function's own window."""
    if pod.is_restarted:
        return True
    if pod.running:
        return False
    if pod.is_warm and pod.free_s >= NO_DOCUMENT_S:
        return True
    if target is None:
        return pod.free_s >= ROUTELESS_S
    if pod.running is None:
        return pod.age_s >= target.launch.startup_timeout_s
    return pod.free_s >= target.spec.scaling.window_s


class UnclaimedPods:
    """The loop. Owner: the event loop.

    Attributes:
        clock: monotonic time."""

    def __init__(
        self,
        pods: PodWatcher,
        *,
        claims: PodLeaseStore,
        readiness: ReadinessProbe,
        source: WarmPodSource,
        target_of: Callable[[Pod], CallTarget | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pods = pods
        self._claims = claims
        self._readiness = readiness
        self._source = source
        self._target_of = target_of
        self.clock = clock
        self._free_since: dict[str, float] = {}
        self._giving_up = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<UnclaimedPods {len(self._free_since)}>"

    async def run(self) -> None:
        """Look periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.poll_once()
            except ClaimsUnreachable as e:
                log.info("unclaimed pods not looked for error=%s", e)

    async def poll_once(self) -> None:
        """Look once. Raises ClaimsUnreachable."""
        by_key: dict[str, list[Pod]] = {}
        for pod in self._pods.promoted():
            if not pod.is_ending:
                by_key.setdefault(pod.key, []).append(pod)
        free = {
            pod.life: pod for key, pods in by_key.items() for pod in await self._free_of(key, pods)
        }
        now = self.clock()
        self._free_since = {life: self._free_since.get(life, now) for life in free}
        for life, pod in free.items():
            await self._check(pod, now, self._free_since[life])

    async def _free_of(self, key: str, pods: list[Pod]) -> list[Pod]:
        lives = await self._claims.free(key, [pod.life for pod in pods])
        return [pod for pod in pods if pod.life in lives]

    async def _check(self, pod: Pod, now: float, free_since: float) -> None:
        running = await self._readiness.running(pod)
        seen = Unclaimed(
            free_s=now - free_since,
            age_s=now - pod.seen_at,
            running=running,
            is_warm=running is None and await launcher_client.is_warm(pod),
            is_restarted=pod.restarts > 0 or pod.ending is not None,
        )
        if is_due(seen, self._target_of(pod)):
            await self.give_up(pod, "no activator has claimed it")

    def give_up_later(self, pod: Pod) -> None:
        """Delete a promoted pod that was released here, unless somebody claims it meanwhile."""
        self._giving_up.run(self._give_up_later(pod), name=f"give up {pod.name}")

    async def _give_up_later(self, pod: Pod) -> None:
        await asyncio.sleep(RELEASED_S)
        try:
            if self._pods.alive(pod.life) is not None:
                await self.give_up(pod, "it was idle")
        except ClaimsUnreachable as e:
            log.info("idle pod not given up pod=%s error=%s", pod.name, e)

    async def give_up(self, pod: Pod, reason: str) -> None:
        """Delete a promoted pod, unless somebody claims it before. Raises ClaimsUnreachable."""
        if await self._claims.claim(pod.key, f"end-{pod.uid}", [pod.life], pods=0) is None:
            return
        log.info("promoted pod given up pod=%s/%s why=%s", pod.namespace, pod.name, reason)
        try:
            if await self._source.delete(pod, reason):
                await self._wait_ending(pod)
        finally:
            await self._claims.release(pod.life)

    async def _wait_ending(self, pod: Pod) -> None:
        """Until the cluster's watch says that it is going: from then on no activator claims it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                while True:
                    changed = self._pods.changed(pod.key)
                    there = self._pods.alive(pod.life)
                    if there is None or there.is_ending:
                        return
                    await changed.wait()

    async def aclose(self) -> None:
        """Stop; a pod that was released is found by another activator."""
        await self._giving_up.cancel()
