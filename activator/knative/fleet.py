"""`Fleet` on a cluster: instances are pods that Knative creates and deletes. This module finds,
claims and releases them.

A start claims a pod that is ready and unclaimed; otherwise it requests one
(`scale_request.ScaleRequester`) and waits for it. Nothing on that path calls the API server: all
state comes from watches. A stop releases the pod, for the next start or for the autoscaler to
remove; a pod is deleted only if its calls do not end, or if its worker ended while it served. The
worker of a pod that is being deleted is ended as soon as no call runs in it. While the API server
is unreachable pods continue to serve: missing information never counts as a missing pod.

Which instance (pod) a call goes to is decided by `balancing.throttler`, as on one machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from activator.knative import start_failure
from activator.knative.activation_requests import Whereabouts
from activator.knative.lazy_client import Access
from activator.knative.node_gpus import NodeGpus
from activator.knative.pod_deletion import PodDeletion
from activator.knative.pod_leases import ClaimsUnreachable, PodLeaseStore
from activator.knative.pod_registry import OwnedPod, PendingStart
from activator.knative.pod_status import Blocker, WorkerExit
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import ReadinessListener, ReadinessProbe
from activator.knative.scale_request import ScaleRequester
from activator.knative.unsupported import PodFleetLimits
from activator.routing.route_table import CallTarget
from activator.worker_client.address import tcp_address
from pilotlight.core.background_tasks import cancel_all
from pilotlight.errors import Unavailable
from snapshotter import errors
from snapshotter.types import (
    AgentEvent,
    InstanceId,
    InstanceInfo,
    InstanceState,
    RevisionKey,
    StartKind,
)

log = logging.getLogger(__name__)

AWAY_RETRY_S = 5
"""When to call again while no pod can be made."""
BEAT_S = 1.0
"""Interval between statements of our claims; a fifteenth of a membership."""
LOOK_S = 0.25
"""While a start waits: interval between attempts at pods that were claimed by others. Changes of
pods are events and not polled."""
FIRST_ANSWER_S = 0.25
"""How long the worker of a pod that Kubernetes reports ready may take to answer, before another pod
is requested."""
RUNNING_S = 0.5
"""Interval between checks whether the last calls of a pod have ended, before it is released."""
ADOPT_S = 10.0
"""After a restart: how long to wait for the cluster's state before it is reported as
unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTargets:
    """Which target a pod belongs to (None: it has no route), where a target's pods are made, and
    which GPUs a pod has."""

    target_of: Callable[[Pod], CallTarget | None]
    whereabouts: Whereabouts
    gpus: NodeGpus


class KnativeFleet(PodFleetLimits):
    """Instances that are pods. Owner: the event loop."""

    def __init__(
        self,
        *,
        cluster: Access,
        pods: PodWatcher,
        claims: PodLeaseStore,
        summons: ScaleRequester,
        targets: PodTargets,
        member: str,
        port: int,
        grace_s: float,
    ) -> None:
        """`port`: of pods, where calls go. `grace_s`: see start_failure."""
        self._cluster = cluster
        self.pods = pods
        self._claims = claims
        self.scale_requester = summons
        self._targets = targets
        self._member = member
        self._port = port
        self.grace_s = grace_s
        self._held: dict[str, OwnedPod] = {}
        self._by_instance: dict[str, str] = {}
        self._crashes: dict[str, tuple[float, errors.StartFailed]] = {}
        self._claimed_lives: set[str] = set()
        self._served: set[str] = set()
        self._waiting: dict[str, PendingStart] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[AgentEvent] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._are_claims_reachable = True
        self._restored = asyncio.Event()
        self.on_released: Callable[[Pod], None] = lambda _: None
        self.readiness = ReadinessProbe(port=port, on_ready=lambda pod: pods.notify(pod.key))
        self._deletion = PodDeletion(cluster, on_failed=lambda pod: pods.notify(pod.key))
        pods.listener = self._on_pod_change

    def __repr__(self) -> str:
        starts = sum(waiting.starts for waiting in self._waiting.values())
        return (
            f"<KnativeFleet {self._member}: {len(self._held)} pods, {starts} starts wait, "
            f"{self.pods!r}>"
        )

    # -- starts ------------------------------------------------------------------------------------
    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """Start an instance in a pod. Secrets reach a pod through its own namespace's Secrets;
        `secret_env` is ignored.

        Raises StartFailed, StartTimeout, NoCapacity, Unavailable. If cancelled, it releases what it
        may have claimed."""
        if (life := self._by_instance.get(instance_id)) is not None:
            return self._info(target, self._held[life].pod, instance_id, StartKind.WARM, {})
        began = time.monotonic()
        waiting = self._waiting.setdefault(target.key, PendingStart())
        waiting.starts += 1
        try:
            async with asyncio.timeout(target.launch.startup_timeout_s):
                return await self._start(target, instance_id, began)
        except TimeoutError as e:
            waited_s = time.monotonic() - began
            stage = self._stage(target)
            raise errors.StartTimeout(
                f"no pod was ready after {waited_s:.0f} s: {stage}",
                {"phase": stage, "log_tail": []},
            ) from e
        except BaseException:
            if (life := self._by_instance.get(instance_id)) is not None:
                self._run(self._release(life), f"give back {instance_id}")
            raise
        finally:
            waiting.starts -= 1
            if not waiting.starts:
                del self._waiting[target.key]
                for pod in self.pods.of(target.key):
                    self.readiness.stop(pod.life)

    async def _start(
        self, target: CallTarget, instance_id: InstanceId, began: float
    ) -> InstanceInfo:
        while not self.pods.synced.is_set():
            self._check_present()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.pods.synced.wait()
        others: set[str] = set()
        if (info := await self._claim_existing(target, instance_id, began, others)) is not None:
            return info
        async with self.scale_requester.requested(target):
            while True:
                changed = self.pods.changed(target.key)
                if (info := await self._claim_pod(target, instance_id, began, others)) is not None:
                    return info
                self._check(target, began, others)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await changed.wait()

    async def _claim_existing(
        self, target: CallTarget, instance_id: InstanceId, began: float, others: set[str]
    ) -> InstanceInfo | None:
        """Claim an existing pod. A pod that Kubernetes reports ready, but that was not probed yet,
        gets a moment to answer."""
        changed = self.pods.changed(target.key)
        info = await self._claim_pod(target, instance_id, began, others)
        unasked = [
            pod
            for pod in self.pods.of(target.key)
            if pod.is_ready and pod.is_usable and self.readiness.of(pod.life) is None
        ]
        if info is not None or not unasked:
            return info
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_S):
                await changed.wait()
        return await self._claim_pod(target, instance_id, began, others)

    async def _claim_pod(
        self, target: CallTarget, instance_id: InstanceId, began: float, others: set[str]
    ) -> InstanceInfo | None:
        """Claim a pod that is ready and unclaimed. Adds the lives that others have claimed to
        `others`."""
        async with self._waiting[target.key].lock:
            pods = self.pods.of(target.key)
            candidates = {
                pod.life: pod
                for pod in pods
                if pod.is_usable
                and pod.life not in self._held
                and not self._deletion.is_replaced(pod)
                and self._targets.gpus.is_known(target, pod)
            }
            for pod in candidates.values():
                self.readiness.probe(pod)
            ready = [life for life in candidates if self.readiness.of(life) is not None]
            if not ready:
                return None
            asked_at = time.monotonic()
            try:
                life = await self._claims.claim(
                    target.key, instance_id, ready, pods=sum(pod.is_coming for pod in pods)
                )
            except ClaimsUnreachable as e:
                self._on_claims_unreachable(e)
                return None
            self._are_claims_reachable = True
            if life is None:
                others |= set(ready)
                return None
            found = self.pods.alive(life)
            if found is None or not found.is_usable:  # it ended during the claim
                await self._claims.release(life)
                return None
            return self._register(
                target, found, instance_id, began, asked_at, was_others=life in others
            )

    def _register(
        self,
        target: CallTarget,
        pod: Pod,
        instance_id: InstanceId,
        began: float,
        asked_at: float,
        *,
        was_others: bool,
    ) -> InstanceInfo:
        self._held[pod.life] = OwnedPod(pod, instance_id)
        self._by_instance[instance_id] = pod.life
        self._claimed_lives.add(pod.life)
        now = time.monotonic()
        ready = self.readiness.of(pod.life) or ReadinessListener(start_kind=StartKind.COLD)
        is_fresh = not was_others and (
            pod.seen_at >= began or (ready.asks > 1 and ready.at >= began)
        )
        claim_ms = {"claim": (now - asked_at) * 1000}
        if not is_fresh:
            return self._info(target, pod, instance_id, StartKind.WARM, claim_ms)
        pod_ms = max(0.0, (now - began) * 1000 - claim_ms["claim"] - sum(ready.phases_ms.values()))
        return self._info(
            target,
            pod,
            instance_id,
            ready.start_kind,
            {"pod": pod_ms, **ready.phases_ms, **claim_ms},
        )

    def _check(self, target: CallTarget, began: float, others: set[str]) -> None:
        """Raises where waiting cannot help."""
        crashed_at, crash = self._crashes.get(target.key, (-1.0, None))
        if crash is not None and crashed_at >= began:
            raise crash
        pods = [
            pod
            for pod in self.pods.of(target.key)
            if pod.life not in self._held and pod.life not in others
        ]
        for pod in pods:
            if pod.uid in self._served and _keeps_ending(pod):
                self._deletion.replace(pod)
        pods = [pod for pod in pods if not self._deletion.is_replaced(pod)]
        now = time.monotonic()
        why = start_failure.of_pods(pods, grace_s=self.grace_s, now=now)
        is_one_coming = any(pod.is_coming for pod in pods)
        if not is_one_coming:
            self._check_present()
        if why is None and not is_one_coming:
            why = start_failure.of_failure(
                self.pods.failure(*self._targets.whereabouts(target)),
                grace_s=self.grace_s,
                now=now,
            )
        if why is not None:
            raise why

    def _check_present(self) -> None:
        """Raises Unavailable while the API server is away for longer than the grace: until it is
        back no pod is made."""
        away_s = self._cluster.away_s
        if away_s > self.grace_s:
            raise Unavailable(
                f"the cluster's API server has not answered for {away_s:.0f} s, and without it no "
                "pod is made; pods that exist continue to serve",
                retry_after_s=AWAY_RETRY_S,
            )

    def _stage(self, target: CallTarget) -> str:
        if not self.pods.synced.is_set():
            return "the cluster's API server does not answer"
        pods = [pod for pod in self.pods.of(target.key) if pod.life not in self._held]
        for pod in pods:
            if pod.is_usable and not self._targets.gpus.is_known(target, pod):
                return self._targets.gpus.describe(pod)
        worker_said = next(
            (error for pod in pods if (error := self.readiness.last_error(pod.life))), ""
        )
        return start_failure.stage(
            pods, said=self.scale_requester.status(target.key), worker_said=worker_said
        )

    def _info(
        self,
        target: CallTarget,
        pod: Pod,
        instance_id: InstanceId,
        kind: StartKind,
        phases_ms: Mapping[str, float],
    ) -> InstanceInfo:
        assert pod.ip is not None
        launch = target.launch
        return InstanceInfo(
            id=instance_id,
            revision=RevisionKey(pod.key),
            state=InstanceState.READY,
            socket=tcp_address(pod.ip, self._port),
            start_kind=kind,
            phases_ms=phases_ms,
            lessee=self._member,
            started_at=time.time(),
            pid=0,
            memory_bytes=launch.memory_bytes,
            cpu=launch.cpu,
            labels=launch.labels,
            gpus=self._targets.gpus.grant(target, pod),
        )

    # -- stops -------------------------------------------------------------------------------------
    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Release the pod. A pod whose calls have not ended after `grace_s` is deleted, and another
        one replaces it."""
        life = self._by_instance.get(instance_id)
        held = self._held.get(life) if life is not None else None
        if life is None or held is None:
            return
        held.is_told = True
        is_idle = await self._is_idle(held, grace_s)
        if is_idle:
            self.on_released(held.pod)
        elif is_idle is False:
            await self._deletion.delete(held.pod)
        await self._release(life)

    async def _is_idle(self, held: OwnedPod, grace_s: float) -> bool | None:
        """Wait until its calls have ended and return whether they have. None: the pod has ended, or
        another activator has it."""
        until = time.monotonic() + grace_s
        while (
            not (held.is_lost or held.pod.is_ending) and self.pods.alive(held.pod.life) is not None
        ):
            running = await self.readiness.running(held.pod)
            if running is None:
                self.readiness.delete(held.pod.life)  # the next start must probe it again
            if not running:
                return True
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(RUNNING_S)
        return None

    def _on_pod_ending(self, pod: Pod) -> None:
        """Handle the beginning of a pod's deletion."""
        task = asyncio.create_task(self._end_idle(pod), name=f"end {pod.name}")
        self._ending[pod.uid] = task
        task.add_done_callback(lambda _: self._ending.pop(pod.uid, None))

    async def _end_idle(self, pod: Pod) -> None:
        """End the worker of a pod that is being deleted once no call runs in it. queue-proxy, which
        would hold the pod and its GPUs for 30 s, is then ended by the node agent. The activator
        that has claimed the pod does it; of an unclaimed one the first to claim it, so that no
        other sends it a call."""
        await asyncio.sleep(RUNNING_S)  # a call that was sent has arrived by then
        await self._restored.wait()
        if pod.life not in self._held:
            pods = sum(sibling.is_coming for sibling in self.pods.of(pod.key))
            try:
                if (
                    await self._claims.claim(pod.key, f"end-{pod.uid}", [pod.life], pods=pods)
                    is None
                ):
                    return
            except ClaimsUnreachable as e:
                self._on_claims_unreachable(e)
                return
        try:
            while self.pods.alive(pod.life) is not None:
                if await self.readiness.running(pod) == 0 and await self.readiness.end(pod):
                    return
                await asyncio.sleep(RUNNING_S)
        finally:
            if pod.life not in self._held:
                await self._claims.release(pod.life)

    async def _release(self, life: str) -> None:
        held = self._held.pop(life, None)
        if held is not None:
            self._by_instance.pop(held.instance, None)
            await self._claims.release(life)

    # -- events ------------------------------------------------------------------------------------
    def _on_pod_change(
        self, before: Pod | None, after: Pod | None, ended: WorkerExit | None
    ) -> None:
        """Handle a change of a pod, see `pod_watcher.Listener`."""
        if before is not None and before.ending is None and (ended is not None or after is None):
            self._on_life_ended(before, ended or WorkerExit("deleted", "the pod was deleted"))
        if after is None:
            if before is not None:
                self._served.discard(before.uid)
                self._deletion.forget(before)
            return
        if (
            after.is_ending
            and not (before is not None and before.is_ending)
            and not self._deletion.is_replaced(after)
        ):
            self._on_pod_ending(after)
        held = self._held.get(after.life)
        if held is None:
            if self._waiting.get(after.key) and after.is_usable:
                self.readiness.probe(after)
            return
        held.pod = after
        if after.is_ending and not held.is_told:
            held.is_told = True
            self._emit("instance_stopping", held.instance, "stopping", "its pod is being deleted")

    def _on_life_ended(self, pod: Pod, ending: WorkerExit) -> None:
        """Handle the end of a pod's life."""
        # a claimed pod was ready, even if it was given up since, before Kubernetes reported it
        was_ready = (
            pod.is_ready
            or self.readiness.of(pod.life) is not None
            or pod.life in self._claimed_lives
        )
        self._claimed_lives.discard(pod.life)
        self.readiness.delete(pod.life)
        held = self._held.get(pod.life)
        if (was_ready or held is not None) and ending.reason in start_failure.CRASHES:
            self._served.add(pod.uid)
            if held is not None:
                self._deletion.replace(pod)
        if held is not None:
            held.is_told = True
            reason = "deleted" if ending.reason == "exited" and pod.is_ending else ending.reason
            self._emit("instance_gone", held.instance, reason, ending.message)
            self._run(self._release(pod.life), f"forget {held.instance}")
        elif (
            not was_ready
            and not pod.is_ending
            and (crash := start_failure.of_crash(ending, pod.name)) is not None
        ):
            self._crashes[pod.key] = (time.monotonic(), crash)
            self.pods.notify(pod.key)

    def _emit(self, kind: str, instance: str, reason: str, message: str) -> None:
        self._events.put_nowait(
            AgentEvent(kind=kind, subject=instance, reason=reason, message=message)
        )

    async def watch(self) -> AsyncIterator[AgentEvent]:
        """Yield events of instances."""
        while True:
            yield await self._events.get()

    async def run(self) -> None:
        """Follow the cluster and state our claims periodically, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pods.follow(self._cluster), name="pods")
            tasks.create_task(self._targets.gpus.follow(self._cluster), name="GPUs of nodes")
            tasks.create_task(self._run_heartbeat(), name="claims")

    async def _run_heartbeat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self.state()

    async def state(self) -> None:
        """State our claims once. Pods that others claimed meanwhile get no more calls here. Does
        nothing before our claims are restored: that would release them."""
        if not self._restored.is_set():
            return
        try:
            lost = await self._claims.state()
        except ClaimsUnreachable as e:
            self._on_claims_unreachable(e)
            return
        self._are_claims_reachable = True
        for life in lost:
            held = self._held.get(life)
            if held is None:
                continue
            held.is_lost = True
            if not held.is_told:
                held.is_told = True
                log.warning(
                    "another activator claimed our pod instance=%s pod=%s",
                    held.instance,
                    held.pod.name,
                )
                self._emit(
                    "instance_stopping", held.instance, "lost", "another activator owns its pod"
                )

    def _on_claims_unreachable(self, error: ClaimsUnreachable) -> None:
        if self._are_claims_reachable:
            log.warning("pods cannot be claimed; claimed pods continue to serve error=%s", error)
        self._are_claims_reachable = False

    # -- state -------------------------------------------------------------------------------------
    async def adopt(self) -> list[InstanceInfo]:
        """Return our instances. Raises AgentUnavailable while the cluster, or the claim store, does
        not answer."""
        try:
            async with asyncio.timeout(ADOPT_S):
                await self.pods.synced.wait()
        except TimeoutError as e:
            raise errors.AgentUnavailable(
                "the cluster's API server does not answer: its pods are unknown"
            ) from e
        if not self._restored.is_set():
            await self._restore_claims()
        infos = []
        for held in list(self._held.values()):
            target = self._targets.target_of(held.pod)
            if (
                target is not None
                and held.pod.ip is not None
                and await self._are_gpus_known(target, held.pod)
            ):
                infos.append(self._info(target, held.pod, held.instance, StartKind.WARM, {}))
            else:
                await self._release(held.pod.life)
        return infos

    async def _are_gpus_known(self, target: CallTarget, pod: Pod) -> bool:
        """Whether a pod can be billed, once the cluster's nodes are known."""
        if not self._targets.gpus.is_known(target, pod):
            with suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_S):
                    await self._targets.gpus.synced.wait()
        return self._targets.gpus.is_known(target, pod)

    async def _restore_claims(self) -> None:
        """Restore the claims of this member from before its restart."""
        try:
            claims = await self._claims.mine()
        except ClaimsUnreachable as e:
            raise errors.AgentUnavailable(str(e)) from e
        self._restored.set()
        for claim in claims:
            if claim.life in self._held:
                continue  # already claimed by a start
            pod = self.pods.alive(claim.life)
            if pod is None or not pod.is_usable:
                await self._claims.release(claim.life)
            else:
                self._held[claim.life] = OwnedPod(pod, InstanceId(claim.instance))
                self._by_instance[claim.instance] = claim.life
                self._claimed_lives.add(claim.life)

    def max_instances_of(self, key: str) -> int | None:
        """See Fleet: the autoscaler of the cluster decides how many pods there are."""
        return sum(
            pod.is_usable and (pod.is_ready or pod.life in self._held) for pod in self.pods.of(key)
        )

    def owned(self, uid: str) -> OwnedPod | None:
        """The pod with this uid, if it is ours."""
        pod = self.pods.find(uid)
        held = self._held.get(pod.life) if pod is not None else None
        return held if held is not None and not held.is_lost else None

    def held(self) -> Mapping[str, tuple[str, str]]:
        """Instance and revision key of each of our pods, by its uid."""
        return {held.pod.uid: (held.instance, held.pod.key) for held in self._held.values()}

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Stop all requests. Claims remain: when this member leaves for good, its pods become
        free."""
        await self.scale_requester.aclose()
        await self.readiness.aclose()
        await cancel_all(self._ending.values())
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._deletion.aclose()
        await self._claims.aclose()


def _keeps_ending(pod: Pod) -> bool:
    """Whether the kubelet pauses before it restarts the pod's worker."""
    return pod.obstacle is not None and pod.obstacle.bar is Blocker.CRASH
