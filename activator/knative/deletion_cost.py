"""Which pods a Deployment gives up first when it shrinks: the idle ones that nobody has, then idle
ones, the busiest last.

Kubernetes takes the lowest `controller.kubernetes.io/pod-deletion-cost` first (0 where nothing is
said), among pods that are equally ready. Written beside the request path, only where the order
changed, and never for the only pod of its revision."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from activator.knative.pods import COST, Pod, Pods
from pilotlight.cluster.errors import ClusterError
from pilotlight.cluster.kinds import POD, Kind

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between looks: a write for each pod that changed its rank is the most that this costs."""
GIVEN_BACK = "-100"
CLAIMED = 100
"""Of one that is claimed and idle; each doubling of its calls in flight adds STEP."""
STEP = 10


class Patching(Protocol):
    """The part of `pilotlight.cluster.api.Cluster` that is needed here."""

    async def patch(
        self, kind: Kind, name: str, namespace: str | None, body: Any
    ) -> Mapping[str, Any]:
        """A merge patch."""
        ...


def cost_of(in_flight: int | None) -> str:
    """`in_flight`: calls in it; None = nobody has it."""
    return GIVEN_BACK if in_flight is None else str(CLAIMED + STEP * in_flight.bit_length())


class Costs:
    """The loop. Owner: the event loop; `load_of`: calls in flight of each instance that is ours, by
    the pod's uid."""

    def __init__(
        self, pods: Pods, cluster: Patching, *, load_of: Callable[[], Mapping[str, tuple[str, int]]]
    ) -> None:
        """`load_of`: (revision key, calls) by uid."""
        self._pods = pods
        self._cluster = cluster
        self._load_of = load_of
        self._released: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Costs {len(self._released)} given back>"

    def given_back(self, pod: Pod) -> None:
        """It is nobody's for the moment."""
        self._released[pod.uid] = pod.key

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Write what changed. What cannot be written now is written later: nothing depends on it
        but an order."""
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
