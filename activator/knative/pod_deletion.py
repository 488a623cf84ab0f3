"""The end of pods of a fleet: ends the workers of pods that are being deleted, and deletes pods
whose calls do not end, or whose worker ended while it served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from activator.knative.lazy_client import Access
from activator.knative.leases.pod_leases import ClaimsUnreachable
from activator.knative.pod_registry import OwnedPod, PodClaims, PodRegistry
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import ReadinessProbe
from activator.knative.warm.source import WarmPodSource
from pilotlight.core.background_tasks import BackgroundTasks, cancel_all
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.kinds import POD

log = logging.getLogger(__name__)

REPLACEMENTS, REPLACED_S = 6, 60.0
"""How many pods of a revision are deleted, within that many seconds, because their worker ended
while it served. Beyond, the kubelet's own pauses between restarts protect the cluster."""
ENDED_GRACE_S = 1
"""Grace period of a pod whose worker has ended: nothing in it has anything left to do. For a pod
whose worker runs, a kubelet does not shorten the 30 s that Knative's queue-proxy takes."""

RUNNING_S = 0.5
"""Interval between checks whether the last calls of a pod have ended, before it is released."""


class PodDeletion:
    """Owner: the event loop."""

    def __init__(
        self,
        cluster: Access,
        *,
        warm: WarmPodSource | None,
        on_failed: Callable[[Pod], None],
    ) -> None:
        """`warm`: deletes promoted pods. `on_failed`: called when a pod that was to be replaced was
        not deleted."""
        self._cluster = cluster
        self._warm = warm
        self._on_failed = on_failed
        self._replaced: set[str] = set()
        self._replacements: dict[str, deque[float]] = {}
        self._tasks = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<PodDeletion {len(self._replaced)} pods replaced>"

    def is_replaced(self, pod: Pod) -> bool:
        """Whether `pod` is being replaced by another."""
        return pod.uid in self._replaced

    def forget(self, pod: Pod) -> None:
        """Handle the end of a pod."""
        self._replaced.discard(pod.uid)

    async def delete(self, pod: Pod) -> None:
        """Delete a pod whose calls do not end; a failure is logged."""
        log.warning("pod deleted, its calls do not end pod=%s/%s", pod.namespace, pod.name)
        if self._warm is not None and pod.is_promoted:
            await self._warm.delete(pod, "its calls do not end")
            return
        try:
            await self._cluster.delete(POD, pod.name, pod.namespace, uid=pod.uid)
        except ClusterError as e:
            log.error("pod not deleted pod=%s/%s error=%s", pod.namespace, pod.name, e)

    def replace(self, pod: Pod) -> None:
        """Delete a pod whose worker ended while it served, so that its Deployment makes another at
        once: the kubelet would restart it after a pause that grows up to five minutes, and the
        calls that come meanwhile did nothing to it."""
        if pod.uid in self._replaced or pod.is_ending:
            return
        now = time.monotonic()
        self._replacements = {
            key: times for key, times in self._replacements.items() if now - times[-1] < REPLACED_S
        }
        recent = self._replacements.setdefault(pod.key, deque(maxlen=REPLACEMENTS))
        if len(recent) == REPLACEMENTS and now - recent[0] < REPLACED_S:
            return
        recent.append(now)
        self._replaced.add(pod.uid)
        self._tasks.run(self._delete_ended(pod), name=f"replace {pod.name}")

    async def _delete_ended(self, pod: Pod) -> None:
        log.warning("pod deleted, its worker ended pod=%s/%s", pod.namespace, pod.name)
        if self._warm is not None and pod.is_promoted:
            if not await self._warm.delete(pod, "its worker ended"):
                self._replaced.discard(
                    pod.uid
                )  # it is found again among those that no activator has claimed
            return
        try:
            await self._cluster.delete(
                POD, pod.name, pod.namespace, uid=pod.uid, grace_s=ENDED_GRACE_S
            )
        except ClusterError as e:
            log.error("pod not deleted pod=%s/%s error=%s", pod.namespace, pod.name, e)
            self._replaced.discard(pod.uid)  # the kubelet restarts its worker
            self._on_failed(pod)

    async def aclose(self) -> None:
        """Wait for deletions in progress."""
        await self._tasks.aclose()


class PodEnding:
    """Ends workers once no call runs in them. Owner: the event loop."""

    def __init__(
        self,
        pods: PodWatcher,
        claimed: PodRegistry,
        claims: PodClaims,
        readiness: ReadinessProbe,
    ) -> None:
        self._pods = pods
        self._claimed = claimed
        self._claims = claims
        self._readiness = readiness
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<PodEnding {len(self._tasks)} pods>"

    async def is_idle(self, held: OwnedPod, grace_s: float) -> bool | None:
        """Wait until its calls have ended and return whether they have. None: the pod has ended, or
        another activator has it."""
        until = time.monotonic() + grace_s
        while (
            not (held.is_lost or held.pod.is_ending) and self._pods.alive(held.pod.life) is not None
        ):
            running = await self._readiness.running(held.pod)
            if running is None:
                self._readiness.delete(held.pod.life)  # the next start must probe it again
            if not running:
                return True
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(RUNNING_S)
        return None

    def on_pod_ending(self, pod: Pod) -> None:
        """Handle the beginning of a pod's deletion."""
        task = asyncio.create_task(self._end_idle(pod), name=f"end {pod.name}")
        self._tasks[pod.uid] = task
        task.add_done_callback(lambda _: self._tasks.pop(pod.uid, None))

    async def _end_idle(self, pod: Pod) -> None:
        """End the worker of a pod that is being deleted once no call runs in it. queue-proxy, which
        would hold the pod and its GPUs for 30 s, is then ended by the node agent. The activator
        that has claimed the pod does it; of an unclaimed one the first to claim it, so that no
        other sends it a call."""
        await asyncio.sleep(RUNNING_S)  # a call that was sent has arrived by then
        await self._claims.restored.wait()
        if pod not in self._claimed:
            try:
                if await self._claims.claim(pod.key, f"end-{pod.uid}", [pod.life], pods=0) is None:
                    return
            except ClaimsUnreachable:
                return
        try:
            # one that was deleted while it came up gets its address only now
            while (there := self._pods.alive(pod.life)) is not None:
                if await self._readiness.running(there) == 0 and await self._readiness.end(there):
                    return
                await asyncio.sleep(RUNNING_S)
        finally:
            if pod not in self._claimed:
                await self._claims.release(pod.life)

    async def aclose(self) -> None:
        """Stop."""
        await cancel_all(self._tasks.values())
