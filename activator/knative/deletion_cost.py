"""Which pods a Deployment deletes first when it shrinks: idle pods that no activator has claimed,
then idle ones, the busiest last.

Kubernetes deletes the lowest `controller.kubernetes.io/pod-deletion-cost` first (default 0), among
pods that are equally ready. The cost is written outside the request path, only where it changed,
and never for the only pod of its revision."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from activator.knative.pod_watcher import COST, Pod, PodWatcher
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.kinds import POD, Kind

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Interval between updates; one costs at most a write for each pod whose rank changed."""
GIVEN_BACK = "-100"
CLAIMED = 100
"""Cost of a claimed, idle pod; each doubling of its calls in flight adds STEP."""
STEP = 10


class PodPatcher(Protocol):
    """The part of `pilotlight.kubernetes.cluster.Cluster` that is used here."""

    async def patch(
        self, kind: Kind, name: str, namespace: str | None, body: Any
    ) -> Mapping[str, Any]:
        """Send a merge patch."""


def cost_of(in_flight: int | None) -> str:
    """Deletion cost. `in_flight`: calls in the pod; None = no activator has claimed it."""
    return GIVEN_BACK if in_flight is None else str(CLAIMED + STEP * in_flight.bit_length())


class DeletionCosts:
    """Updates deletion costs. Owner: the event loop. `load_of`: calls in flight of each of our
    instances, by the pod's uid."""

    def __init__(
        self,
        pods: PodWatcher,
        cluster: PodPatcher,
        *,
        load_of: Callable[[], Mapping[str, tuple[str, int]]],
    ) -> None:
        """`load_of`: (revision key, calls) by uid."""
        self._pods = pods
        self._cluster = cluster
        self._load_of = load_of
        self._released: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<DeletionCosts {len(self._released)} released>"

    def on_released(self, pod: Pod) -> None:
        """Mark a pod as released."""
        self._released[pod.uid] = pod.key

    async def run(self) -> None:
        """Update the costs periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.update()

    async def update(self) -> None:
        """Write changed costs. A failed write is repeated later: only the order of deletion depends
        on it."""
        loads = self._load_of()
        wanted = {
            uid: (key, cost_of(None)) for uid, key in self._released.items() if uid not in loads
        }
        self._released = {uid: key for uid, (key, _) in wanted.items()}
        wanted |= {uid: (key, cost_of(calls)) for uid, (key, calls) in loads.items()}
        for uid, (key, cost) in wanted.items():
            siblings = {pod.uid: pod for pod in self._pods.of(key)}
            pod = siblings.get(uid)
            if pod is None or pod.is_ending or pod.cost == cost or len(siblings) < 2:
                continue
            if pod.is_promoted:
                continue  # no Deployment has it, and only the controller may change it
            try:
                await self._cluster.patch(
                    POD, pod.name, pod.namespace, {"metadata": {"annotations": {COST: cost}}}
                )
            except ClusterError as e:
                log.info("deletion cost not written pod=%s/%s error=%s", pod.namespace, pod.name, e)
                return
        self._released = {
            uid: key
            for uid, key in self._released.items()
            if any(pod.uid == uid for pod in self._pods.of(key))
        }
