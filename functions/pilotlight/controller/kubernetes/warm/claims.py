"""Claims of warm pods for revisions, and deletions of promoted ones, for activators: these have no
rights in the pool's namespace.

A claim is one write, a JSON patch (RFC 6902) that tests the pod's uid and its label of a warm pod,
and takes that label away: of any number of claims of a pod, also of two leaders, the API server
carries out one. The pod's labels then say whose it is; nothing changes them again. It is idempotent
by the start that it is for, which an annotation of the pod names: the answer to a claim that was
lost is found again, also by the next leader.

Right after its claim a pod gets the size of its function (`resizing`): one that is too small grows
before it is handed out, or is deleted."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import time
from collections.abc import Callable, Sequence

from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.kubernetes.warm import choice
from pilotlight.controller.kubernetes.warm.cache import PoolCache
from pilotlight.controller.kubernetes.warm.choice import annotation, label
from pilotlight.controller.kubernetes.warm.resizing import PodResizer
from pilotlight.controller.kubernetes.warm.sizes import size_of, size_of_shape, wanted_size
from pilotlight.controller.kubernetes.warm.sizing import RecentStarts
from pilotlight.controller.kubernetes.warm.status import (
    RETRY_S,
    NoWarmPod,
    PromotedPod,
    PromotionRequest,
)
from pilotlight.errors import Conflict, NotFound, Unavailable
from pilotlight.kubernetes import names
from pilotlight.kubernetes.errors import ClusterError, ClusterUnreachable, Invalid
from pilotlight.kubernetes.errors import Conflict as Stale
from pilotlight.kubernetes.errors import NotFound as Gone
from pilotlight.kubernetes.kinds import POD
from pilotlight.kubernetes.manifests import warm_pods
from pilotlight.kubernetes.manifests.revisions import RevisionOf, promoted_launch
from pilotlight.kubernetes.manifests.tenant_namespace import PODS_PER_INSTANCE
from pilotlight.kubernetes.watch_events import Object
from pilotlight.spec.identifiers import Isolation
from pilotlight.spec.warm_shape import WarmShape

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Pods that one request tries to claim. A start costs three writes at most, the pod's deletion
included: the claim and the pod's size, or two claims. The second pod keeps the size of its
shape."""
CLAIM_S = 1.5
"""Deadline of a claim's write; activators wait 2 s for an answer, and another start is as quick."""
MAX_RUNNING = 256
"""Promotions at once; the client's connections to the API server are fewer."""
REFILL_RETRY_S = 2.0
MAX_LAUNCH_BYTES = 192 << 10
"""A launcher reads 256 KiB from an activator: the document, and the values of secrets."""


class PodClaims:
    """Implementation of `status.PodClaimer`. Owner: the leader's event loop.

    Between the choice of a pod and its claim nothing is awaited but the write, and the pod is
    reserved for that time: the limits of a tenant hold for claims at once, too."""

    def __init__(
        self,
        cache: PoolCache,
        writer: Applier,
        state: DesiredState,
        *,
        nodes: NodeReports,
        starts: RecentStarts,
        resizer: PodResizer,
        is_leading: Callable[[], bool],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`is_leading`: whether this controller may change the cluster, and knows its objects."""
        self._cluster = cache.cluster
        self._cache = cache
        self._writer = writer
        self._state = state
        self._nodes = nodes
        self._starts = starts
        self._resizer = resizer
        self._is_leading = is_leading
        self._wall = wall
        self._running: dict[str, tuple[PromotionRequest, asyncio.Task[PromotedPod]]] = {}
        self._reserved: dict[str, RevisionOf] = {}

    def __repr__(self) -> str:
        return f"<PodClaims {len(self._running)} running>"

    async def promote(self, wanted: PromotionRequest) -> PromotedPod:
        """Claim a warm pod for a start; the same start gets the same pod.

        Raises:
            NoWarmPod: none can be claimed, with the reason.
            NotFound: the tenant has no such revision.
            Conflict: the attempt is another revision's.
            Unavailable: this controller does not lead, or the API server does not answer; its
                detail `may_be_done` says whether a pod may have been claimed.
        """
        self._require_leading()
        first, task = self._running.get(wanted.attempt, (wanted, None))
        if task is None:
            if len(self._running) >= MAX_RUNNING:
                raise Unavailable(f"{MAX_RUNNING} promotions run already", retry_after_s=RETRY_S)
            task = asyncio.create_task(self._promote(wanted), name=f"promote {wanted.attempt}")
            self._running[wanted.attempt] = (wanted, task)
            task.add_done_callback(lambda done: self._on_done(wanted.attempt, done))
        elif (first.tenant, first.revision) != (wanted.tenant, wanted.revision):
            raise _other_revision(wanted, first.revision)
        # a caller that goes away must not leave a write half observed
        return await asyncio.shield(task)

    async def delete(self, *, namespace: str, name: str, uid: str, reason: str) -> None:
        """Delete a promoted pod; one that is gone counts as deleted. Raises Conflict for any other
        pod, Unavailable."""
        self._require_leading()
        if namespace != self._cache.namespace:
            raise Conflict(f"pods are deleted in namespace {self._cache.namespace} only")
        pod = self._cache.get(POD, name, namespace)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        if not label(pod, names.PROMOTED):
            raise Conflict(f"pod {name} was not promoted: warm pods are the controller's")
        log.info("event=pod_ended pod=%s reason=%r", name, reason)
        try:
            await self._writer.remove(POD, pod)
        except ClusterError as e:
            raise _unavailable(e) from e

    def _on_done(self, attempt: str, task: asyncio.Task[PromotedPod]) -> None:
        del self._running[attempt]
        if not task.cancelled():
            task.exception()  # seen, also if all who asked have gone

    # -- steps -------------------------------------------------------------------------------------
    async def _promote(self, wanted: PromotionRequest) -> PromotedPod:
        made = self._revision(wanted)
        pod, is_first = self._cache.of_attempt(wanted.attempt, exclude=wanted.exclude), True
        if pod is None and wanted.claimed_only:
            raise NoWarmPod(f"no pod is claimed for {wanted.attempt}", reason="not-claimed")
        if pod is None:
            pod, is_first = await self._claim(wanted, made)
        elif annotation(pod, names.KEY) != wanted.revision:
            raise _other_revision(wanted, annotation(pod, names.KEY))
        if is_first:
            await self._resize(pod, made)
        metadata = pod["metadata"]
        return PromotedPod(
            namespace=self._cache.namespace,
            name=metadata["name"],
            uid=metadata["uid"],
            ip=pod["status"]["podIP"],
            node=pod["spec"]["nodeName"],
            launch=promoted_launch(made, pod=metadata["uid"]).to_json(),
        )

    def _revision(self, wanted: PromotionRequest) -> RevisionOf:
        """The revision, of that very tenant. Raises NotFound, NoWarmPod, InvalidInput."""
        function, _, revision = wanted.revision.partition("@")
        route, tenant = self._state.functions.get(function), self._state.tenants.get(wanted.tenant)
        tenancy = self._state.tenancy(wanted.tenant, route.environment) if route else None
        if (
            route is None
            or tenant is None
            or tenancy is None
            or route.tenant != wanted.tenant
            or revision not in route.revisions
        ):
            raise NotFound(f"tenant {wanted.tenant} has no revision {wanted.revision} in traffic")
        if route.stopped or tenant.suspended:
            raise NoWarmPod("the app is stopped, or its tenant suspended", reason="stopped")
        if tenancy.plan.isolation is Isolation.DEDICATED:
            raise NoWarmPod(
                "the tenant has nodes of its own, and warm pods run on others", reason="isolation"
            )
        made = self._state.revision(route, tenancy, revision)
        if (reason := _environment(made)) and not made.tenancy.settings.restore_into_pods:
            raise NoWarmPod(
                f"the {reason} of a function is shown in pods with cluster.restore_into_pods only",
                reason=reason,
            )
        if (size := len(json.dumps(made.launch.to_json()))) > MAX_LAUNCH_BYTES:
            raise NoWarmPod(
                f"its launch document has {size} bytes, more than {MAX_LAUNCH_BYTES}",
                reason="document",
            )
        return made

    async def _claim(self, wanted: PromotionRequest, made: RevisionOf) -> tuple[Object, bool]:
        """Claim one of the pods that fit, or may grow; returns it, and whether it was the first one
        that was tried. Raises NoWarmPod, Unavailable."""
        all_shapes = self._cluster.settings.warm_pods
        holding = choice.fitting(all_shapes, made.spec.resources)
        growing = choice.growable(all_shapes, made.spec) if self._resizer.may("grow") else []
        shapes = [*holding, *growing]
        if not shapes:
            raise NoWarmPod(
                f"no shape of cluster.warm_pods holds {made.key}: it needs {made.spec.resources}",
                reason="no-shape",
            )
        self._starts.add(shapes[0].name, now=self._wall())
        exclude, smaller = set(wanted.exclude), {shape.name for shape in growing}
        for attempt in range(ATTEMPTS):
            self._require_room(made)
            pod = choice.pick(
                [
                    pod
                    for pod in self._cache.pods()
                    if label(pod, names.WARM_SHAPE) not in smaller
                    or self._resizer.may_grow_on(str(pod["spec"].get("nodeName", "")))
                ],
                holding if attempt else shapes,
                launch=made.launch,
                nodes=self._nodes.fresh(now=self._wall()),
                exclude=exclude | self._reserved.keys(),
            )
            if pod is None:
                break
            uid = str(pod["metadata"]["uid"])
            exclude.add(uid)
            self._reserved[uid] = made
            try:
                claimed = await self._write(pod, made, wanted)
            except ClusterError as e:
                raise _unavailable(e) from e
            finally:
                del self._reserved[uid]
            if claimed is not None:
                return claimed, not attempt
        raise self._none(shapes, made, exclude=exclude)

    async def _resize(self, pod: Object, made: RevisionOf) -> None:
        """Give a claimed pod the size of its function. Raises NoWarmPod where it is too small and
        does not grow: it is deleted then."""
        name = label(pod, names.PROMOTED)
        shapes = self._cluster.settings.warm_pods
        shape = next((one for one in shapes if one.name == name), None)
        if shape is None:  # the operator has removed it since
            return
        size = wanted_size(made.spec, made.launch, shape)
        if not size.exceeds(size_of_shape(shape)):
            if size_of(pod) != size and self._resizer.may("shrink"):
                self._resizer.shrink_later(pod, size)
        elif not await self._resizer.grow(pod, size):
            try:
                await self._writer.remove(POD, pod)
            except ClusterError as e:  # then an activator deletes it
                log.warning("event=pod_not_deleted pod=%s error=%s", pod["metadata"]["name"], e)
            raise NoWarmPod(
                f"a pod of {name} does not grow to {size.cpu:g} CPU and {size.memory_bytes} bytes "
                f"on its node",
                reason="not-resized",
            )

    def _require_room(self, made: RevisionOf) -> None:
        """Raise NoWarmPod if one pod more would exceed the tenant's plan or the function's
        `max_instances`. As in the quota of its namespace, a pod that ends and one that follows it
        count both, so that of pods twice the plan's instances may be there; the activators keep the
        exact limit."""
        plan, resources = made.tenancy.plan, made.spec.resources
        there = self._cache.pods_of(made.tenancy.id)
        coming = [one for one in self._reserved.values() if one.tenancy.id == made.tenancy.id]
        used = choice.usage_of(there, self._cluster.settings)
        pods = used.pods + len(coming)
        gpus = used.gpus + sum(one.spec.resources.gpu_count for one in coming)
        if plan.instances is not None and pods >= plan.instances * PODS_PER_INSTANCE:
            raise NoWarmPod(f"plan: {plan.instances} instances, {pods} pods", reason="quota")
        if plan.gpus is not None and gpus + resources.gpu_count > plan.gpus:
            raise NoWarmPod(f"plan: {plan.gpus} GPUs, {gpus} are used", reason="quota")
        promoted = sum(
            bool(label(pod, names.PROMOTED)) and annotation(pod, names.KEY) == made.key
            for pod in there
            if not choice.has_ended(pod)
        ) + sum(one.key == made.key for one in coming)
        if promoted >= made.spec.scaling.max_instances:
            raise NoWarmPod(
                f"max_instances = {made.spec.scaling.max_instances}, {promoted} pods are promoted",
                reason="max-instances",
            )

    async def _write(
        self, pod: Object, made: RevisionOf, wanted: PromotionRequest
    ) -> Object | None:
        """The claim; None if the pod was claimed or deleted by others: a ReplicaSet may delete one
        at that very moment, to have fewer. Raises ClusterError."""
        name = str(pod["metadata"]["name"])
        at = dt.datetime.fromtimestamp(self._wall(), dt.UTC).isoformat(timespec="milliseconds")
        patch = warm_pods.promotion_patch(
            pod, made, attempt=wanted.attempt, at=at.replace("+00:00", "Z")
        )
        self._require_leading()
        try:
            found: Object | None = await self._cluster.json_patch(
                POD, name, self._cache.namespace, patch, timeout_s=CLAIM_S
            )
        except (Invalid, Stale, Gone):
            # also if an earlier attempt at this write was carried out and its answer lost
            found = await self._cluster.get(POD, name, self._cache.namespace, timeout_s=CLAIM_S)
        if found is None:
            return None
        self._cache.note(POD, found)
        if annotation(found, names.ATTEMPT) != wanted.attempt or choice.is_over(found):
            log.info("event=claim_lost pod=%s attempt=%s", name, wanted.attempt)
            return None
        log.info(
            "event=promoted pod=%s node=%s revision=%s attempt=%s member=%s",
            name,
            found["spec"].get("nodeName", ""),
            made.key,
            wanted.attempt,
            wanted.member,
        )
        return found

    def _none(
        self, shapes: Sequence[WarmShape], made: RevisionOf, *, exclude: set[str]
    ) -> NoWarmPod:
        names_of = [shape.name for shape in shapes]
        is_there = any(
            label(pod, names.WARM_SHAPE) in names_of
            and choice.is_warm(pod)
            and choice.is_ready(pod)
            and pod["metadata"]["uid"] not in exclude | self._reserved.keys()
            for pod in self._cache.pods()
        )
        if is_there and (reason := _environment(made)):
            return NoWarmPod(f"no node with a warm pod has its {reason} (yet)", reason=reason)
        starting = sum(
            choice.is_warm(pod) and not choice.is_ready(pod)
            for pod in self._cache.pods()
            if label(pod, names.WARM_SHAPE) in names_of
        )
        said = f"no warm pod of {', '.join(names_of)} is ready; {starting} start"
        return NoWarmPod(said, reason="empty", retry_after_s=REFILL_RETRY_S if starting else None)

    def _require_leading(self) -> None:
        if not self._is_leading():
            raise Unavailable(
                "this controller does not lead the cluster (yet): ask again", retry_after_s=RETRY_S
            )


def _environment(made: RevisionOf) -> str:
    """What the pool's image lacks for the revision, as a reason; "" if it lacks nothing."""
    if made.launch.image is not None:
        return "image"
    return "engine" if made.launch.engine is not None else ""


def _other_revision(wanted: PromotionRequest, other: str) -> Conflict:
    return Conflict(f"attempt {wanted.attempt} is a start of {other}, not of {wanted.revision}")


def _unavailable(error: ClusterError) -> Unavailable:
    log.warning("event=pool_not_written error=%s", error)
    return Unavailable(
        f"the cluster does not answer or refuses ({error.reason or error.status}): see the "
        f"controller's log",
        retry_after_s=error.retry_after_s or RETRY_S,
        may_be_done=isinstance(error, ClusterUnreachable) and error.sent,
    )
