"""The pods of all tenants' functions, as reported by the cluster.

Pods contain their revision (annotation `pilotlight.dev/key`) and what prevents them from starting.
EndpointSlices of the revisions' private services contain the addresses, ready or not. Deployments
contain why no pod could be created. All are watched. While the API server is unreachable the last
state stays: missing information never counts as a missing pod.

A pod whose container was restarted is another *life*: the state of its worker is void, and its
claim is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from activator.knative import pod_status
from activator.knative.pod_status import Blocker, Object, PodBlocker, WorkerExit
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.watch_events import WatchChange

log = logging.getLogger(__name__)

PRIVATE = "networking.internal.knative.dev/serviceType=Private"
"""Selects the slices of the service whose endpoints are the revision's pods."""
COST = "controller.kubernetes.io/pod-deletion-cost"
REFUSED_S = 5.0
"""Interval between attempts at a watch that was refused."""
Key = tuple[str, str]


class PodListener(Protocol):
    """The part of `pilotlight.kubernetes.cluster.Cluster` that is used here."""

    def watch(
        self, kind: Kind, namespace: str | None = None, selector: str = ""
    ) -> AsyncGenerator[WatchChange, None]:
        """List objects, then yield changes, forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod, in one life.

    Attributes:
        life: identifies this life: `<uid>.<restarts>`.
        key: key of the revision: `<function id>@<revision>`.
        ip: None until it has an address.
        node: the node that it runs on; "" until it has one.
        node_addresses: those of that node.
        is_ending: it is being deleted, and gets no more calls.
        ending: how its worker ended; None while it lives.
        obstacle: why it does not start.
        obstacle_since: monotonic time since which that is so.
        seen_at: monotonic time at which this life was first seen.
        cost: its annotation for the order of pod deletion; None = none."""

    uid: str
    life: str
    namespace: str
    name: str
    key: str
    ip: str | None
    node: str
    node_addresses: frozenset[str]
    is_ready: bool
    is_ending: bool
    ending: WorkerExit | None
    obstacle: PodBlocker | None
    obstacle_since: float
    restarts: int
    stage: str
    seen_at: float
    labels: Mapping[str, str]
    cost: str | None

    @property
    def is_promoted(self) -> bool:
        """Whether it was a warm pod, which the controller claimed for the revision."""
        return names.PROMOTED in self.labels

    @property
    def is_usable(self) -> bool:
        """Whether it can be, or become, an instance."""
        return self.ip is not None and self.is_coming

    @property
    def is_coming(self) -> bool:
        """Whether it may become an instance. A promoted pod is of one life: its container does not
        know what to run when it is started again."""
        is_over = self.ending is not None or (self.is_promoted and self.restarts > 0)
        return not self.is_ending and not is_over


Listener = Callable[[Pod | None, Pod | None, WorkerExit | None], None]
"""Called with each change: the pod before and after (None: it did not or does not exist), and how
the previous life ended, if it did."""


def _ignore(_before: Pod | None, _after: Pod | None, _ending: WorkerExit | None) -> None:
    """Default listener: do nothing."""


class PodWatcher:
    """The current pods. Owner: the event loop; `apply_*` are synchronous.

    Attributes:
        synced: set once the initial lists are complete.
        listener: see Listener."""

    def __init__(self, *, selector: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`selector`: labels of our functions' objects."""
        self._selector = selector
        self._clock = clock
        self._pods: dict[str, Pod] = {}
        self._by_key: dict[str, dict[str, Pod]] = {}
        self._slices: dict[Key, dict[str, str]] = {}
        self._failures: dict[Key, tuple[str, float]] = {}
        self._unsynced = {"pods", "slices", "deployments"}
        self._changed: dict[str, asyncio.Event] = {}
        self.synced = asyncio.Event()
        self.listener: Listener = _ignore

    def __repr__(self) -> str:
        missing = f", {', '.join(sorted(self._unsynced))} not synced" if self._unsynced else ""
        return f"<PodWatcher {len(self._pods)} of {len(self._by_key)} revisions{missing}>"

    # -- queries -----------------------------------------------------------------------------------
    def of(self, key: str) -> list[Pod]:
        """Pods of a revision, in the order in which they were first seen."""
        return sorted(self._by_key.get(key, {}).values(), key=lambda pod: (pod.seen_at, pod.name))

    def alive(self, life: str) -> Pod | None:
        """The pod in that life; None when the life is over."""
        pod = self._pods.get(life.rpartition(".")[0])
        return pod if pod is not None and pod.life == life and pod.ending is None else None

    def promoted(self) -> list[Pod]:
        """All promoted pods, of any revision."""
        return [pod for pod in self._pods.values() if pod.is_promoted]

    def find(self, uid: str) -> Pod | None:
        """The pod with this uid, in its current life."""
        return self._pods.get(uid)

    def failure(self, namespace: str, revision: str) -> tuple[str, float] | None:
        """Why no pod of a revision (its name in the cluster) could be created, and since when
        (monotonic); None when there is no such report."""
        return self._failures.get((namespace, revision))

    def changed(self, key: str) -> asyncio.Event:
        """An event that is set by the next change of that revision's pods. Get it before reading
        the pods, wait for it afterwards."""
        return self._changed.setdefault(key, asyncio.Event())

    def notify(self, key: str) -> None:
        """Wake the tasks that wait for a change."""
        event = self._changed.pop(key, None)
        if event is not None:
            event.set()

    # -- changes -----------------------------------------------------------------------------------
    def apply_pod(self, change: WatchChange) -> None:
        """Apply a change of a Pod."""
        uid = str(change.object["metadata"]["uid"])
        before = self._pods.get(uid)
        if change.type == "DELETED":
            if before is not None:
                self._remove(
                    before,
                    pod_status.pod_disruption(change.object)
                    or pod_status.worker_exit(change.object),
                )
            return
        after = self._parsed(change.object, before)
        if after is None:
            return
        ended = None
        if before is not None and before.life != after.life and before.ending is None:
            ended = pod_status.last_worker_exit(change.object)
        elif after.ending is not None and (before is None or before.ending is None):
            ended = after.ending
        self._put(before, after, ended)

    def apply_slice(self, change: WatchChange) -> None:
        """Apply a change of an EndpointSlice."""
        metadata = change.object["metadata"]
        place = (str(metadata["namespace"]), str(metadata["name"]))
        before = self._slices.pop(place, {})
        now = {} if change.type == "DELETED" else _addresses(change.object)
        if now:
            self._slices[place] = now
        for uid in before.keys() | now.keys():
            pod = self._pods.get(uid)
            if pod is not None and pod.ip is None and uid in now:
                self._put(pod, replace(pod, ip=now[uid]), None)

    def apply_deployment(self, change: WatchChange) -> None:
        """Apply a change of a Deployment."""
        metadata = change.object["metadata"]
        revision = str((metadata.get("labels") or {}).get(names.KNATIVE_REVISION) or "")
        place = (str(metadata["namespace"]), revision)
        message = _failure(change.object) if change.type != "DELETED" else ""
        if not message:
            self._failures.pop(place, None)
        elif self._failures.get(place, ("", 0.0))[0] != message:
            self._failures[place] = (message, self._failures.get(place, ("", self._clock()))[1])

    def _remove(self, pod: Pod, ending: WorkerExit | None) -> None:
        del self._pods[pod.uid]
        siblings = self._by_key[pod.key]
        del siblings[pod.uid]
        if not siblings:
            del self._by_key[pod.key]
        self.listener(
            pod, None, ending or pod.ending or WorkerExit("deleted", "the pod was deleted")
        )
        self.notify(pod.key)

    def _put(self, before: Pod | None, after: Pod, ended: WorkerExit | None) -> None:
        if before == after:
            return
        self._pods[after.uid] = after
        self._by_key.setdefault(after.key, {})[after.uid] = after
        self.listener(before, after, ended)
        self.notify(after.key)

    def _parsed(self, body: Object, before: Pod | None) -> Pod | None:
        """Parse a Pod object. None when it is not a function's pod."""
        metadata, status = body["metadata"], body.get("status") or {}
        annotations = metadata.get("annotations") or {}
        key = annotations.get(names.KEY)
        if not key:
            return None
        uid, restarts, now = str(metadata["uid"]), pod_status.restarts_of(body), self._clock()
        life = f"{uid}.{restarts}"
        same = before if before is not None and before.life == life else None
        obstacle = _remembered(pod_status.pod_blocker(body), before)
        is_old = (
            before is not None
            and obstacle is not None
            and before.obstacle is not None
            and before.obstacle.bar is obstacle.bar
        )
        return Pod(
            uid=uid,
            life=life,
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            key=str(key),
            ip=status.get("podIP")
            or (before.ip if before is not None else None)
            or self._ip_in_slices(uid),
            node=str((body.get("spec") or {}).get("nodeName") or ""),
            node_addresses=pod_status.addresses_of(status, "hostIP"),
            is_ready=pod_status.is_ready(body),
            is_ending=bool(metadata.get("deletionTimestamp")),
            ending=pod_status.worker_exit(body),
            obstacle=obstacle,
            obstacle_since=before.obstacle_since if is_old and before is not None else now,
            restarts=restarts,
            stage=pod_status.stage_of(body),
            seen_at=same.seen_at if same is not None else now,
            labels=dict(metadata.get("labels") or {}),
            cost=annotations.get(COST),
        )

    def _ip_in_slices(self, uid: str) -> str | None:
        return next(
            (addresses[uid] for addresses in self._slices.values() if uid in addresses), None
        )

    # -- watching ----------------------------------------------------------------------------------
    async def follow(self, cluster: PodListener) -> None:
        """Watch the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, kind, selector, apply in (
                ("pods", kinds.POD, self._selector, self.apply_pod),
                ("slices", kinds.ENDPOINT_SLICE, f"{PRIVATE},{self._selector}", self.apply_slice),
                ("deployments", kinds.DEPLOYMENT, self._selector, self.apply_deployment),
            ):
                tasks.create_task(
                    self._watch(cluster, name, kind, selector, apply), name=f"watch {name}"
                )

    async def _watch(
        self,
        cluster: PodListener,
        name: str,
        kind: Kind,
        selector: str,
        apply: Callable[[WatchChange], None],
    ) -> None:
        while True:
            try:
                async with aclosing(cluster.watch(kind, selector=selector)) as changes:
                    async for change in changes:
                        if change.type == "SYNCED":
                            self._is_synced(name)
                        else:
                            apply(change)
            except ClusterError as e:
                log.error("%s of the cluster cannot be watched error=%s", name, e)
            await asyncio.sleep(REFUSED_S)

    def _is_synced(self, name: str) -> None:
        self._unsynced.discard(name)
        if not self._unsynced & {"pods", "slices"} and not self.synced.is_set():
            self.synced.set()
            for key in list(self._changed):
                self.notify(key)


def _remembered(obstacle: PodBlocker | None, before: Pod | None) -> PodBlocker | None:
    """Keep the message of a failed pull: while the kubelet backs off it no longer reports the
    reason."""
    known = before.obstacle if before is not None else None
    if (
        obstacle is not None
        and obstacle.bar is Blocker.IMAGE
        and known is not None
        and known.bar in (Blocker.PULL, Blocker.IMAGE)
    ):
        return PodBlocker(Blocker.IMAGE, max(known.message, obstacle.message, key=len))
    return obstacle


def _addresses(body: Object) -> dict[str, str]:
    """Addresses by pod uid, ready or not."""
    found: dict[str, str] = {}
    for endpoint in body.get("endpoints") or ():
        uid, addresses = (
            (endpoint.get("targetRef") or {}).get("uid"),
            endpoint.get("addresses") or (),
        )
        if uid and addresses:
            found[str(uid)] = str(addresses[0])
    return found


def _failure(body: Object) -> str:
    for condition in (body.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(
                condition.get("message") or condition.get("reason") or "its pods cannot be created"
            )
    return ""
