"""Deletes pods of a fleet: those whose calls do not end, and those whose worker ended while it
served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from activator.knative.lazy_client import Access
from activator.knative.pod_watcher import Pod
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.kinds import POD

log = logging.getLogger(__name__)

REPLACEMENTS, REPLACED_S = 6, 60.0
"""How many pods of a revision are deleted, within that many seconds, because their worker ended
while it served. Beyond, the kubelet's own pauses between restarts protect the cluster."""
ENDED_GRACE_S = 1
"""Grace period of a pod whose worker has ended: nothing in it has anything left to do. For a pod
whose worker runs, a kubelet does not shorten the 30 s that Knative's queue-proxy takes."""


class PodDeletion:
    """Owner: the event loop."""

    def __init__(self, cluster: Access, *, on_failed: Callable[[Pod], None]) -> None:
        """`on_failed`: called when a pod that was to be replaced was not deleted."""
        self._cluster = cluster
        self._on_failed = on_failed
        self._replaced: set[str] = set()
        self._replacements: dict[str, deque[float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

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
        task = asyncio.create_task(self._delete_ended(pod), name=f"replace {pod.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete_ended(self, pod: Pod) -> None:
        log.warning("pod deleted, its worker ended pod=%s/%s", pod.namespace, pod.name)
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
        await asyncio.gather(*self._tasks, return_exceptions=True)
