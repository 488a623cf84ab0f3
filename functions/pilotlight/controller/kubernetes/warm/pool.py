"""Keeps the pool of warm pods: its namespace, a Deployment for each shape with the number of pods
that recent starts want, and no promoted pod that cannot serve any longer.

Level-triggered, as the reconciler: after any change of a pod the whole pool is compared, and
nothing is written when nothing differs. Without shapes, the namespace is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.namespaces import apply_binding
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.kubernetes.reconciler import Reconciler
from pilotlight.controller.kubernetes.warm import choice
from pilotlight.controller.kubernetes.warm.cache import PoolCache
from pilotlight.controller.kubernetes.warm.choice import label
from pilotlight.controller.kubernetes.warm.claims import PodClaims
from pilotlight.controller.kubernetes.warm.garbage import promoted_at, reason_to_delete
from pilotlight.controller.kubernetes.warm.resizing import PodResizer
from pilotlight.controller.kubernetes.warm.sizing import RecentStarts, wanted_pods
from pilotlight.controller.kubernetes.warm.status import PoolShape, WarmPods
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.kinds import DEPLOYMENT, NAMESPACE, POD
from pilotlight.kubernetes.manifests import warm_pods
from pilotlight.spec.warm_shape import WarmShape

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Interval of the comparison without a change of a pod: time alone lowers the wanted number."""
SETTLE_S = 0.2
"""Changes within this time are looked at together."""
SYNC_S = 5.0


class WarmPool:
    """Owner: its task, in the leading controller."""

    def __init__(
        self,
        cluster: Cluster,
        reconciler: Reconciler,
        *,
        nodes: NodeReports,
        pool: WarmPods,
        may_write: Callable[[], bool] = lambda: True,
        on_resize: Callable[[str], None] = lambda _: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`reconciler`: of the same leader; its desired state and informers are used once it has
        both. `pool`: where claims are offered and numbers of pods published. `on_resize`: see
        `PodResizer`."""
        self._settings = cluster.settings
        self._reconciler = reconciler
        self._pool = pool
        self._may_write = may_write
        self._wall = wall
        self._changed = asyncio.Event()
        self.starts = RecentStarts(on_add=self._changed.set)
        self._is_seeded = False
        self.cache = PoolCache(cluster, reconciler.mirror, on_change=self._changed.set)
        self.writer = Applier(
            cluster,
            self.cache,
            owns=reconciler.state.platform.owns,
            may_write=may_write,
        )
        self.resizer = PodResizer(self.cache, is_leading=self.is_leading, on_outcome=on_resize)
        self.claims = PodClaims(
            self.cache,
            self.writer,
            reconciler.state,
            nodes=nodes,
            starts=self.starts,
            resizer=self.resizer,
            is_leading=self.is_leading,
            wall=wall,
        )

    def __repr__(self) -> str:
        return f"<WarmPool {self.cache!r} {self.starts!r} {self.writer!r}>"

    def is_leading(self) -> bool:
        """Whether pods may be claimed: this controller leads, and knows functions and pods."""
        return self._may_write() and self._reconciler.may_change and self.cache.is_synced

    async def run(self) -> None:
        """Run until cancelled. Errors are logged, and the next round repeats what failed."""
        async with contextlib.AsyncExitStack() as stack:
            await self._reconciler.wait_synced()
            if self._settings.warm_pods:
                await stack.enter_async_context(self.cache)
                with contextlib.suppress(ClusterError):  # then the next round asks again
                    await self.cache.wait_synced(SYNC_S)
                self._pool.claimer = self.claims
                stack.push_async_callback(self.resizer.aclose)
                stack.callback(self._stop_leading)
            while True:
                self._changed.clear()
                try:
                    await self.update()
                except (ClusterError, InvalidInput) as e:
                    log.warning("event=pool_not_kept error=%s", e)
                except (AttributeError, KeyError, TypeError, ValueError):
                    # an object that someone else wrote, with an unexpected structure
                    log.exception("event=pool_not_understood")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._changed.wait()
                await asyncio.sleep(SETTLE_S)

    async def update(self) -> None:
        """Compare the pool with what it shall be, once. Raises ClusterError, InvalidInput."""
        if not self._settings.warm_pods:
            await self._remove()
        elif self.is_leading():
            self._seed()
            await self._apply()
            await self._collect()
            self._pool.shapes = self._with_counts()
            self._pool.trouble = self.resizer.trouble()

    def _stop_leading(self) -> None:
        self._pool.claimer, self._pool.shapes, self._pool.trouble = None, (), ""

    async def _remove(self) -> None:
        namespace = names.warm_namespace(self._settings)
        found = self._reconciler.mirror.get(NAMESPACE, namespace)
        if found is not None and self._reconciler.may_change:
            await self.writer.remove(NAMESPACE, found)

    def _seed(self) -> None:
        """Learn the starts that an earlier leader counted from the pods that they promoted."""
        if not self._is_seeded:
            self._is_seeded = True
            promoted = [pod for pod in self.cache.pods() if label(pod, names.PROMOTED)]
            for pod in sorted(promoted, key=promoted_at):
                self.starts.add(label(pod, names.PROMOTED), now=promoted_at(pod))

    async def _apply(self) -> None:
        platform = self._reconciler.state.platform.id
        for manifest in warm_pods.pool_manifests(self._settings, platform=platform):
            if manifest["kind"] == kinds.ROLE_BINDING.kind:
                await apply_binding(self.writer, manifest, grants=DEPLOYMENT)
            else:
                await self.writer.put(manifest)
        await self.cache.follow_deployments(SYNC_S)
        for shape in self._settings.warm_pods:
            await self.writer.put(
                warm_pods.deployment(
                    shape, self._settings, platform=platform, replicas=self._wanted(shape)
                )
            )
        kept = {shape.name for shape in self._settings.warm_pods}
        for item in list(self.cache.deployments()):
            if item["metadata"]["name"] not in kept:
                await self.writer.remove(DEPLOYMENT, item)

    def _wanted(self, shape: WarmShape) -> int:
        return wanted_pods(shape, self.starts.of(shape.name), now=self._wall())

    async def _collect(self) -> None:
        """Delete promoted pods that cannot serve, and warm ones whose container has ended once: a
        promoted pod whose container was restarted must not be taken for one that never was."""
        for pod in self.cache.pods():
            if pod["metadata"].get("deletionTimestamp"):
                continue
            if label(pod, names.PROMOTED):
                why = reason_to_delete(pod, self._reconciler.state, now=self._wall())
            else:  # one that is not ready is left to the kubelet, whose pauses grow
                why = (
                    "its container ended" if choice.is_over(pod) and choice.is_ready(pod) else None
                )
            if why is not None:
                log.info("event=pod_collected pod=%s reason=%s", pod["metadata"]["name"], why)
                await self.writer.remove(POD, pod)

    def _with_counts(self) -> tuple[PoolShape, ...]:
        pods = list(self.cache.pods())

        def counted(shape: WarmShape) -> PoolShape:
            warm = [
                pod
                for pod in pods
                if label(pod, names.WARM_SHAPE) == shape.name and choice.is_warm(pod)
            ]
            ready = sum(choice.is_ready(pod) for pod in warm)
            return PoolShape(
                shape=shape.name,
                wanted=self._wanted(shape),
                warm=ready,
                starting=len(warm) - ready,
                promoted=sum(label(pod, names.PROMOTED) == shape.name for pod in pods),
            )

        return tuple(counted(shape) for shape in self._settings.warm_pods)
