"""Gives promoted pods the size of their functions, by one write of their subresource `resize`.

A pod that has to grow is the function's only once its kubelet has set the size aside; its launcher
then waits until the container has it. One that is too large shrinks in the background, while it
starts. What the cluster cannot do is not tried again with every start: without the subresource or
the right to it, nothing is resized for some minutes, and pods of a node that had no room do not
grow for a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pilotlight.controller.kubernetes.warm.cache import PoolCache
from pilotlight.controller.kubernetes.warm.sizes import PodSize, is_allocated, refusal, size_of
from pilotlight.core.background_tasks import BackgroundTasks
from pilotlight.kubernetes.errors import ClusterError, Forbidden, Invalid, KindMissing
from pilotlight.kubernetes.errors import NotFound as Gone
from pilotlight.kubernetes.kinds import POD
from pilotlight.kubernetes.manifests.warm_pods import resize_patch
from pilotlight.kubernetes.watch_events import Object

log = logging.getLogger(__name__)

Way = Literal["grow", "shrink"]
GROW_S = 1.0
"""From the write until the kubelet has set the size aside; starts without a pod take as long."""
NODE_PAUSE_S = 60.0
"""A node without room gets some when a pod ends; each attempt costs a warm pod."""
CLUSTER_PAUSE_S = 600.0
"""What a cluster does not serve, or refuses, changes with its version, rights and policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    until: float
    why: str


class PodResizer:
    """Owner: the leader's event loop."""

    def __init__(
        self,
        cache: PoolCache,
        *,
        is_leading: Callable[[], bool],
        on_outcome: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_leading`: whether this controller may change the cluster. `on_outcome`: called for
        each resize with `grown`, `shrunk`, or why it was not: `deferred`, `infeasible`,
        `unanswered`, `refused`, `failed`."""
        self._cluster = cache.cluster
        self._cache = cache
        self._is_leading = is_leading
        self._on_outcome = on_outcome
        self._clock = clock
        self._ways: dict[Way, _Pause] = {}
        self._nodes: dict[str, _Pause] = {}
        self._running = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<PodResizer {len(self._running)} running, {self.trouble() or 'no trouble'}>"

    def trouble(self) -> str:
        """What the cluster could not do lately, in words; "" if nothing is known."""
        now = self._clock()
        ways = [
            f"pods do not {way}: {one.why}" for way, one in self._ways.items() if one.until > now
        ]
        nodes = [
            f"pods of node {node} do not grow: {one.why}"
            for node, one in sorted(self._nodes.items())
            if one.until > now
        ]
        return "; ".join(ways + nodes)

    def may(self, way: Way) -> bool:
        """Whether the cluster is not known to refuse it."""
        return not _lasts(self._ways.get(way), self._clock())

    def may_grow_on(self, node: str) -> bool:
        """Whether the node is not known to have no room."""
        return not _lasts(self._nodes.get(node), self._clock())

    async def grow(self, pod: Object, size: PodSize) -> bool:
        """Give a pod its size; whether its kubelet has set it aside."""
        name, node = str(pod["metadata"]["name"]), str(pod["spec"].get("nodeName", ""))
        until = self._clock() + GROW_S
        if size_of(pod) != size and not await self._write(pod, size, "grow"):
            return False
        found = await self._cache.wait_pod(
            name,
            lambda seen: seen is None or is_allocated(seen, size) or bool(refusal(seen)),
            timeout_s=until - self._clock(),
        )
        if found is not None and is_allocated(found, size):
            self._on_outcome("grown")
            self._nodes.pop(node, None)
            return True
        why = refusal(found) if found is not None else "Gone"
        self._on_outcome(why.lower() if why in ("Deferred", "Infeasible") else "unanswered")
        if self.may_grow_on(node):
            log.warning("event=pod_not_grown pod=%s node=%s reason=%s", name, node, why or "none")
        now = self._clock()
        self._nodes = {name: one for name, one in self._nodes.items() if one.until > now}
        self._nodes[node] = _Pause(
            until=now + NODE_PAUSE_S, why=why or f"no answer within {GROW_S:g} s"
        )
        return False

    def shrink_later(self, pod: Object, size: PodSize) -> None:
        """Give a pod its size, while it starts. One that is not carried out costs its node the
        difference, until the pod ends."""
        self._running.run(self._shrink(pod, size), name=f"shrink {pod['metadata']['name']}")

    async def aclose(self) -> None:
        """End the writes in progress."""
        await self._running.cancel()

    async def _shrink(self, pod: Object, size: PodSize) -> None:
        if await self._write(pod, size, "shrink"):
            self._on_outcome("shrunk")

    async def _write(self, pod: Object, size: PodSize, way: Way) -> bool:
        """Ask for the size; whether the API server accepted it."""
        metadata = pod["metadata"]
        if not self._is_leading():
            return False
        try:
            found = await self._cluster.json_patch(
                POD,
                metadata["name"],
                metadata["namespace"],
                resize_patch(pod, cpu=size.cpu, memory_bytes=size.memory_bytes),
                subresource="resize",
                timeout_s=GROW_S,
            )
        except (KindMissing, Forbidden, Invalid) as e:
            self._on_outcome("refused")
            if self.may(way):
                log.warning("event=resize_refused way=%s error=%s", way, e)
            why = str(e).splitlines()[0][:300]
            self._ways[way] = _Pause(until=self._clock() + CLUSTER_PAUSE_S, why=why)
            return False
        except Gone:
            return False
        except ClusterError as e:
            self._on_outcome("failed")
            log.info("event=pod_not_resized pod=%s error=%s", metadata["name"], e)
            return False
        self._cache.note(POD, found)
        self._ways.pop(way, None)
        log.info(
            "event=resized pod=%s way=%s cpu=%g memory_bytes=%d",
            metadata["name"],
            way,
            size.cpu,
            size.memory_bytes,
        )
        return True


def _lasts(pause: _Pause | None, now: float) -> bool:
    return pause is not None and pause.until > now
