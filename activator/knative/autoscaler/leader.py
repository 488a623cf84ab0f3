"""The elected leader decides for all activators: it follows PodAutoscalers of class
`pilotlight.dev` and sets their Deployments' scale.

Each second the reports of activators are read and recorded. Each two seconds, and at once when an
activator requests it, a decision is made and every difference is written: the scale first (calls
wait for it), then the ServerlessService and the PodAutoscaler's status. Nothing is written without
a change or without the Lease. A new leader adopts the current state: it does not shrink anything
before it has listened for as long as a member may be silent. While the API server is unreachable,
everything stays as it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from activator.knative.autoscaler import conditions, podautoscalers, serverless
from activator.knative.autoscaler.load_aggregation import GONE_S, Members, RevisionLoad
from activator.knative.autoscaler.load_report_store import BoardUnreachable, LoadReportStore
from activator.knative.autoscaler.podautoscalers import Scalable
from activator.knative.autoscaler.scaling import Decision, RevisionScale, RevisionStatus, spec_of
from activator.knative.autoscaler.write_cache import Latest
from activator.knative.deletion_cost import CLAIMED, cost_of
from activator.knative.pod_status import Blocker
from activator.knative.pod_watcher import COST, Pod
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import AlreadyExists, ClusterError, NotFound
from pilotlight.kubernetes.kinds import DEPLOYMENT, POD, POD_AUTOSCALER, SERVERLESS_SERVICE
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.watch_events import WatchChange
from pilotlight.spec.function import FunctionSpec

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Length of a window's bucket. Decisions are made at every second tick (Knative: 2 s)."""
DECIDE_EVERY = 2
AT_ONCE = 16
"""Revisions processed concurrently at a tick; a request of an activator does not wait for them."""
SYNC_S = 60.0
WRITE_S = 5.0
"""Timeout of one write including retries. The next decision repeats it."""
SETTLED_S = 5.0
"""For this long after a write the written scale counts, even if the watch has not reported it."""

NamespacedName = tuple[str, str]
Object = Mapping[str, Any]


class Leading(Protocol):
    """The part of `pilotlight.kubernetes.leader_election.LeaderElection` that is used here."""

    @property
    def is_leader(self) -> bool:
        """Whether this process is the only one that can lead now."""

    async def wait_follower(self) -> None:
        """Wait until the leadership has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLister:
    """What this activator knows of functions, their pods and the other activators, without a
    request.

    Attributes:
        members: the activators that live, this one among them.
        pods_of: pods of a revision, by its key.
        has_function, spec_of: by tenant and key of a revision.
    """

    members: Callable[[], Iterable[str]]
    pods_of: Callable[[str], Iterable[Pod]]
    has_function: Callable[[str, str], bool]
    spec_of: Callable[[str, str], FunctionSpec | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderIntervals:
    """`settle_s`: time before anything shrinks; `tick_s`: length of a window's bucket."""

    settle_s: float = GONE_S
    tick_s: float = TICK_S


class Leader:
    """One term of leadership: created when it begins, closed when it ends. Owner: the event
    loop."""

    def __init__(
        self,
        cluster: Cluster,
        board: LoadReportStore,
        election: Leading,
        *,
        selector: str,
        functions: FunctionLister,
        intervals: LeaderIntervals | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`selector`: of our functions' objects."""
        self._cluster = cluster
        self._board = board
        self._election = election
        self._functions = functions
        self._intervals = intervals or LeaderIntervals()
        self._clock, self._wall = clock, wall
        self._may_shrink_at = clock() + self._intervals.settle_s
        self._members = Members()
        self._scales: dict[NamespacedName, RevisionScale] = {}
        self._locks: dict[NamespacedName, asyncio.Lock] = {}
        self._written: dict[NamespacedName, tuple[int, float]] = {}
        self._latest = Latest()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled: set[NamespacedName] = set()
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self.autoscalers = Reflector(
            cluster,
            POD_AUTOSCALER,
            selector=selector,
            on_change=self._changed,
            indexes={"key": lambda item: [podautoscalers.parsed(item).key]},
        )
        self.services = Reflector(
            cluster, SERVERLESS_SERVICE, selector=selector, on_change=self._changed
        )
        self.deployments = Reflector(
            cluster, DEPLOYMENT, selector=selector, on_change=self._changed
        )

    def __repr__(self) -> str:
        return f"<Leader of {len(self._scales)} revisions, {self._members!r}>"

    # -- lifecycle ---------------------------------------------------------------------------------
    async def run(self) -> None:
        """Lead until the Lease is lost. Raises ClusterError when the cluster's state cannot be
        read."""
        async with AsyncExitStack() as stack:
            for reflector in (self.autoscalers, self.services, self.deployments):
                await stack.enter_async_context(reflector)
            for reflector in (self.autoscalers, self.services, self.deployments):
                await reflector.wait_synced(SYNC_S)
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (("ticks", self._ticks()), ("pokes", self._pokes()))
            ]
            over = asyncio.create_task(self._election.wait_follower(), name="leadership")
            try:
                done, _ = await asyncio.wait({*tasks, over}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (*tasks, over, *self._tasks):
                    task.cancel()
                await asyncio.gather(*tasks, over, *self._tasks, return_exceptions=True)

    async def _ticks(self) -> None:
        tick = 0
        while True:
            await self.read_reports()
            self.record()
            if tick % DECIDE_EVERY == 0:
                await asyncio.gather(*(self._reconcile_in_turn(place) for place in self._places()))
            tick += 1
            await asyncio.sleep(self._intervals.tick_s)

    async def _pokes(self) -> None:
        async with aclosing(self._board.pokes()) as pokes:
            async for key in pokes:
                await self.read_reports()
                for item in self.autoscalers.by("key", key):
                    self._schedule(_place(item))

    def _changed(self, change: WatchChange) -> None:
        """Handle a change of an object: our PodAutoscalers, or objects that they depend on."""
        if change.type == "SYNCED" or not all(
            one.is_synced for one in (self.autoscalers, self.services, self.deployments)
        ):
            return
        for place in _concerned(change.object):
            if change.type == "DELETED":
                self._latest.delete(place)
            if self.autoscalers.get(place[1], place[0]) is not None:
                self._schedule(place)
            else:
                self._delete(place)

    def _schedule(self, place: NamespacedName) -> None:
        """Schedule one reconciliation of a revision. A scheduled one that has not begun covers all
        changes until it begins."""
        if place not in self._scheduled:
            self._scheduled.add(place)
            self._start_task(self.reconcile(place), f"reconcile {place[1]}")

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reconcile_in_turn(self, place: NamespacedName) -> None:
        async with self._at_once:
            await self.reconcile(place)

    def _places(self) -> list[NamespacedName]:
        return [_place(item) for item in self.autoscalers.items() if self._is_ours(item)]

    def _is_ours(self, item: Object) -> bool:
        """Whether to scale it: it has our class, and this platform has its function. Another
        platform under the same name, whose database is elsewhere, may have made it."""
        if not podautoscalers.is_ours(item):
            return False
        scalable = podautoscalers.parsed(item)
        return self._functions.has_function(scalable.tenant, scalable.key)

    def _delete(self, place: NamespacedName) -> None:
        self._scales.pop(place, None)
        self._written.pop(place, None)
        self._latest.delete(place)
        if (lock := self._locks.get(place)) is not None and not lock.locked():
            del self._locks[place]

    # -- reports of activators ---------------------------------------------------------------------
    async def read_reports(self) -> None:
        """Read the latest reports; an unreadable store counts as silence. When all members were
        silent, the first report may not be the only one, so the leader listens again as at the
        beginning."""
        try:
            reports = await self._board.read()
            self._members.record(reports, self._clock(), living=self._functions.members())
        except BoardUnreachable as e:
            log.warning("cannot read the reports of activators error=%s", e)
        self._members.drop_gone(self._clock())
        if self._members.is_empty:
            self._may_shrink_at = self._clock() + self._intervals.settle_s

    def record(self) -> None:
        """Record one second's loads in the windows."""
        now = self._clock()
        for place in self._places():
            scale = self._scales.get(place)
            item = self.autoscalers.get(place[1], place[0])
            if scale is not None and item is not None:
                scale.record(
                    now, self._members.merged(podautoscalers.parsed(item).key, now).concurrency
                )

    # -- one revision ------------------------------------------------------------------------------
    async def reconcile(self, place: NamespacedName) -> None:
        """Decide on one revision and write what differs. A write that the cluster rejects is
        repeated with the next decision."""
        async with self._locks.setdefault(place, asyncio.Lock()):
            self._scheduled.discard(place)
            item = self._latest.get(POD_AUTOSCALER, place, self.autoscalers.get(place[1], place[0]))
            if item is None or not self._is_ours(item) or not self._election.is_leader:
                return
            try:
                async with asyncio.timeout(WRITE_S):
                    await self._reconcile(podautoscalers.parsed(item), item)
            except TimeoutError:
                log.warning("revision not written in time revision=%s/%s", *place)
            except NotFound:
                pass  # it was deleted meanwhile: its event follows
            except ClusterError as e:
                log.warning("revision not written revision=%s/%s error=%s", *place, e)

    async def _reconcile(self, scalable: Scalable, item: Object) -> None:
        now = self._clock()
        merged = self._members.merged(scalable.key, now)
        deployment = self.deployments.get(scalable.target, scalable.namespace)
        if deployment is None:  # Knative creates it; until then nothing can be scaled
            await self._report(
                scalable, item, Decision(wanted=scalable.floor, why="initial"), ready=0
            )
            return
        pods = list(self._functions.pods_of(scalable.key)) if scalable.key else []
        status = self._status_of(scalable, deployment, pods, now)
        scale = self._scale_of(scalable, status, now)
        decision = scale.decide(
            now, scalable, merged, status, may_shrink=now >= self._may_shrink_at
        )
        if decision.wanted != status.replicas:
            await self._set_scale(scalable, status, decision, merged, pods)
        await self._report(
            scalable,
            item,
            decision,
            ready=min(status.ready, max(decision.wanted, 0)) if decision.wanted else 0,
        )

    def _status_of(
        self, scalable: Scalable, deployment: Object, pods: list[Pod], now: float
    ) -> RevisionStatus:
        status, spec = deployment.get("status") or {}, deployment.get("spec") or {}
        replicas = int(spec.get("replicas", 1))
        written, at = self._written.get(scalable.place, (replicas, now))
        if written != replicas and now - at < SETTLED_S:
            replicas = written
        else:
            self._written.pop(scalable.place, None)
        is_crowded = any(
            pod.obstacle is not None and pod.obstacle.bar is Blocker.UNSCHEDULABLE for pod in pods
        )
        return RevisionStatus(
            replicas=replicas,
            ready=min(replicas, int(status.get("readyReplicas") or 0)),
            is_crowded=is_crowded,
        )

    def _scale_of(self, scalable: Scalable, status: RevisionStatus, now: float) -> RevisionScale:
        spec = spec_of(
            scalable,
            self._functions.spec_of(scalable.tenant, scalable.key) if scalable.key else None,
        )
        scale = self._scales.get(scalable.place)
        if scale is None:
            scale = self._scales[scalable.place] = RevisionScale(spec, now, ready=status.ready)
        scale.respec(spec)
        return scale

    async def _set_scale(
        self,
        scalable: Scalable,
        status: RevisionStatus,
        decision: Decision,
        merged: RevisionLoad,
        pods: list[Pod],
    ) -> None:
        if decision.wanted < status.replicas and decision.wanted:
            await self._guard(merged, pods)
        if not self._election.is_leader:
            return
        log.info(
            "scale revision=%s/%s pods=%d wanted=%d why=%s",
            *scalable.place,
            status.replicas,
            decision.wanted,
            decision.why,
        )
        body = {"spec": {"replicas": decision.wanted}}
        await self._cluster.patch(
            DEPLOYMENT,
            scalable.target,
            scalable.namespace,
            body,
            subresource="scale",
            timeout_s=WRITE_S,
        )
        self._written[scalable.place] = (decision.wanted, self._clock())

    async def _guard(self, merged: RevisionLoad, pods: list[Pod]) -> None:
        """Raise the deletion cost of claimed pods before shrinking. Their activators do that
        themselves (`deletion_cost`), but a few seconds later, and a scale does not wait for that.

        Raises ClusterError; then nothing shrinks."""
        for pod in pods:
            calls = merged.held.get(pod.uid)
            if calls is None or pod.is_ending or _rank(pod) >= CLAIMED:
                continue
            try:
                await self._cluster.patch(
                    POD,
                    pod.name,
                    pod.namespace,
                    {"metadata": {"annotations": {COST: cost_of(calls)}}},
                    timeout_s=WRITE_S,
                )
            except NotFound:
                continue

    # -- objects for Knative -----------------------------------------------------------------------
    async def _report(
        self, scalable: Scalable, item: Object, decision: Decision, *, ready: int
    ) -> None:
        sks = await self._apply_service(scalable, item, is_served=ready > 0)
        is_foreign = sks is not None and not serverless.is_of(sks, scalable)
        seen = conditions.Seen(
            wanted=decision.wanted,
            ready=ready,
            has_timed_out=decision.has_timed_out,
            not_owned=is_foreign,
        )
        now = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = conditions.status_of(scalable, item, None if is_foreign else sks, seen, now=now)
        old = item.get("status") or {}
        if any(old.get(key) != value for key, value in status.items()) and self._election.is_leader:
            answer = await self._cluster.patch(
                POD_AUTOSCALER,
                scalable.name,
                scalable.namespace,
                {"status": status},
                subresource="status",
                timeout_s=WRITE_S,
            )
            self._latest.store(
                POD_AUTOSCALER, self.autoscalers.get(scalable.name, scalable.namespace), answer
            )

    async def _apply_service(
        self, scalable: Scalable, item: Object, *, is_served: bool
    ) -> Object | None:
        """Create or update the ServerlessService of that name, if it is ours."""
        watched = self.services.get(scalable.name, scalable.namespace)
        sks = self._latest.get(SERVERLESS_SERVICE, scalable.place, watched)
        if not self._election.is_leader:
            return sks
        if sks is None:
            try:
                answer = await self._cluster.create(
                    serverless.manifest_of(item, scalable, is_served=is_served), timeout_s=WRITE_S
                )
            except AlreadyExists:  # the watch has not reported it yet, or it is not ours
                return await self._cluster.get(
                    SERVERLESS_SERVICE, scalable.name, scalable.namespace, timeout_s=WRITE_S
                )
        else:
            differing = serverless.difference(
                sks, serverless.spec_of(item, scalable, is_served=is_served)
            )
            if not differing or not serverless.is_of(sks, scalable):
                return sks
            answer = await self._cluster.patch(
                SERVERLESS_SERVICE,
                scalable.name,
                scalable.namespace,
                {"spec": differing},
                timeout_s=WRITE_S,
            )
        self._latest.store(SERVERLESS_SERVICE, watched, answer)
        return answer


def _place(item: Object) -> NamespacedName:
    return str(item["metadata"]["namespace"]), str(item["metadata"]["name"])


def _rank(pod: Pod) -> int:
    """The pod's deletion cost; 0 if it is not a number."""
    try:
        return int(pod.cost or 0)
    except ValueError:
        return 0


def _concerned(item: Object) -> list[NamespacedName]:
    """PodAutoscalers that depend on an object. They have the name of their Revision, which owns
    Deployments."""
    namespace, name = _place(item)
    if item.get("kind") == DEPLOYMENT.kind:
        return [
            (namespace, str(owner["name"]))
            for owner in item["metadata"].get("ownerReferences") or ()
            if owner.get("kind") == "Revision"
        ]
    return [(namespace, name)]
