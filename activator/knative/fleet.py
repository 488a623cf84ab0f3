"""`Fleet` on a cluster: instances are pods that Knative creates and deletes. This module finds,
claims and releases them.

A start claims a pod that is ready and unclaimed; otherwise it requests one
(`scale_request.ScaleRequester`) and waits for it. Where the cluster has warm pods, a start that a
call waits for is served by a promoted one, or by a fork in one (`warm.waiting_starts`), and
requests a pod of the revision's own only if there is none, or it takes long. Nothing on that path
calls the API server: all state comes from watches. A stop releases the pod, for the next start or
for the autoscaler to remove; a pod is deleted only if its calls do not end, or if its worker ended
while it served. The worker of a pod that is being deleted is ended as soon as no call runs in it.
While the API server is unreachable pods continue to serve: missing information never counts as a
missing pod.

Which instance (pod) a call goes to is decided by `balancing.throttler`, as on one machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, suppress

from activator.knative import start_failure
from activator.knative.forks.fork_loop import ForkLoop
from activator.knative.forks.pod_forks import PodForks
from activator.knative.lazy_client import Access
from activator.knative.leases.pod_leases import PodLeaseStore
from activator.knative.pod_claimer import PodClaim, PodClaimer
from activator.knative.pod_deletion import PodDeletion, PodEnding
from activator.knative.pod_registry import OwnedPod, PodClaims, PodRegistry, PodTargets
from activator.knative.pod_status import WorkerExit
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import ReadinessProbe
from activator.knative.scale_request import ScaleRequester
from activator.knative.start_failure import StartChecks
from activator.knative.unsupported import PodFleetLimits
from activator.knative.warm.unclaimed_pods import UnclaimedPods
from activator.knative.warm.waiting_starts import Promotions, WaitingStart, WaitingStarts
from activator.routing.route_table import CallTarget
from activator.worker_client.address import tcp_address
from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter import errors
from snapshotter.types import (
    AgentEvent,
    InstanceId,
    InstanceInfo,
    InstanceState,
    RevisionKey,
)

LOOK_S = 0.25
"""While a start waits: interval between attempts at pods that were claimed by others. Changes of
pods are events and not polled."""
ADOPT_S = 10.0
"""After a restart: how long to wait for the cluster's state before it is reported as
unavailable."""


class KnativeFleet(PodFleetLimits):
    """Instances that are pods. Owner: the event loop."""

    def __init__(
        self,
        *,
        cluster: Access,
        pods: PodWatcher,
        claims: PodLeaseStore,
        scale_requester: ScaleRequester,
        targets: PodTargets,
        member: str,
        grace_s: float,
        promotions: Promotions | None = None,
    ) -> None:
        """`grace_s`: see start_failure. `promotions`: None = the cluster has no warm pods."""
        self._cluster = cluster
        self.pods = pods
        self.scale_requester = scale_requester
        self._targets = targets
        self._member = member
        self._promotions = promotions
        self.grace_s = grace_s
        self.claimed = PodRegistry()
        self.claims = PodClaims(claims, pods, self.claimed, on_lost=self._on_lost)
        self._lease_store = claims
        self._events: asyncio.Queue[AgentEvent] = asyncio.Queue()
        self._tasks = BackgroundTasks()
        self.on_released: Callable[[Pod], None] = lambda _: None
        self.forks = promotions.forks if promotions is not None else PodForks()
        self.readiness = ReadinessProbe(
            port_of=targets.port_of, on_ready=lambda pod: pods.notify(pod.key)
        )
        self._deletion = PodDeletion(
            cluster,
            warm=promotions.source if promotions is not None else None,
            on_failed=lambda pod: pods.notify(pod.key),
        )
        self.unclaimed = self._unclaimed(promotions) if promotions is not None else None
        self.starts = WaitingStarts(
            pods, self.claimed, promotions, give_back=self._release_unneeded
        )
        self.claimer = PodClaimer(
            pods,
            self.claims,
            self.readiness,
            self.starts,
            targets=targets,
            deletion=self._deletion,
        )
        self._ending = PodEnding(pods, self.claimed, self.claims, self.readiness)
        self._checks = StartChecks(
            cluster,
            pods,
            self.claimed,
            self.readiness,
            targets=targets,
            deletion=self._deletion,
            grace_s=grace_s,
        )
        self._fork_loop = ForkLoop(
            pods,
            self.claimed,
            self.forks,
            emit=self._events.put_nowait,
            give_back=self._release_unneeded,
        )
        pods.listener = self._on_pod_change

    def _unclaimed(self, promotions: Promotions) -> UnclaimedPods:
        return UnclaimedPods(
            self.pods,
            claims=self._lease_store,
            readiness=self.readiness,
            source=promotions.source,
            target_of=self._targets.target_of,
        )

    def __repr__(self) -> str:
        return (
            f"<KnativeFleet {self._member}: {len(self.claimed)} pods, {len(self.starts)} starts "
            f"wait, {self.pods!r}>"
        )

    # -- starts ------------------------------------------------------------------------------------
    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """Start an instance in a pod, or a further one in a promoted pod. `secret_env` is for
        promoted pods; others have the Secrets of their own namespace.

        Raises StartFailed, StartTimeout, NoCapacity, Unavailable. If cancelled, it releases what it
        may have claimed."""
        if (held := self.claimed.of_instance(instance_id)) is not None:
            return self._info(target, instance_id, PodClaim(pod=held.pod))
        began = time.monotonic()
        try:
            with self.starts.waits(target, instance_id, secret_env) as start:
                async with asyncio.timeout(target.launch.startup_timeout_s):
                    return await self._start(target, start)
        except TimeoutError as e:
            waited_s = time.monotonic() - began
            stage = self._checks.stage(target, said=self.scale_requester.status(target.key))
            raise errors.StartTimeout(
                f"no pod was ready after {waited_s:.0f} s: {stage}",
                {"phase": stage, "log_tail": []},
            ) from e
        except BaseException:
            if (held := self.claimed.of_instance(instance_id)) is not None:
                self._tasks.run(self._release(held.pod.life), f"give back {instance_id}")
            raise
        finally:
            if not self.starts.are_waiting(target.key):
                for pod in self.pods.of(target.key):
                    self.readiness.stop(pod.life)

    async def _start(self, target: CallTarget, start: WaitingStart) -> InstanceInfo:
        while not self.pods.synced.is_set():
            self._checks.require_cluster()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.pods.synced.wait()
        others = set[str]()
        if (made := await self.claimer.claim_existing(target, start, others)) is not None:
            return self._info(target, start.instance, made)
        async with AsyncExitStack() as request:
            while True:
                changed = self.pods.changed(target.key)
                if (made := await self.claimer.claim(target, start, others)) is not None:
                    return self._info(target, start.instance, made)
                if (info := await self._fork(target, start)) is not None:
                    return info
                self.starts.promote(target.key)
                if not (start.has_requested or self.starts.is_promised(target.key, start)):
                    start.has_requested = True
                    await request.enter_async_context(self.scale_requester.requested(target))
                self._checks.require_possible(target, start.began, others)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await changed.wait()

    async def _fork(self, target: CallTarget, start: WaitingStart) -> InstanceInfo | None:
        """Fork an instance in a promoted pod of the revision that is claimed here."""
        pods = [
            held
            for held in self.claimed.of_revision(target.key)
            if not self._deletion.is_replaced(held.pod)
        ]
        start.is_forking = True
        try:
            made = await self.forks.start(target, start.instance, start.secrets, pods)
        finally:
            start.is_forking = False
        if made is None or self.claimed.get(made[0].pod.life) is not made[0]:
            return None  # none, or in a pod that has ended
        held, _, ready = made
        self.claimed.add_instance(held, start.instance)
        own_ms = sum(ready.phases_ms.values())
        pod_ms = max(0.0, (time.monotonic() - start.began) * 1000 - own_ms)
        phases_ms = {"pod": pod_ms, **ready.phases_ms}
        one = PodClaim(pod=held.pod, start_kind=ready.start_kind, phases_ms=phases_ms)
        return self._info(target, start.instance, one)

    def _info(self, target: CallTarget, instance_id: InstanceId, made: PodClaim) -> InstanceInfo:
        pod = made.pod
        held = self.claimed.get(pod.life)
        assert pod.ip is not None
        assert held is not None
        launch = target.launch
        return InstanceInfo(
            id=instance_id,
            revision=RevisionKey(pod.key),
            state=InstanceState.READY,
            socket=tcp_address(pod.ip, held.ports[instance_id]),
            start_kind=made.start_kind,
            phases_ms=made.phases_ms,
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
        """Release the pod, or stop one of its instances where it has others or keeps its Template.
        A pod whose calls have not ended after `grace_s` is deleted, and another one replaces it. A
        promoted pod, which no autoscaler removes, is deleted unless another activator
        takes it."""
        held = self.claimed.of_instance(instance_id)
        if held is None:
            return
        life = held.pod.life
        if len(held.ports) > 1 or self._fork_loop.may_keep_idle(held):
            await self.forks.stop(held, instance_id, grace_s=grace_s)
            self.claimed.forget_instance(instance_id)
            if held.ports or self.claimed.get(life) is not held or self._fork_loop.keep_idle(held):
                return
        held.is_told = True
        is_idle = await self._ending.is_idle(held, grace_s)
        if is_idle:
            self.on_released(held.pod)
        elif is_idle is False:
            await self._deletion.delete(held.pod)
        if is_idle:
            await self._release_unneeded(held)
        else:
            await self._release(life)

    async def _release_unneeded(self, held: OwnedPod) -> None:
        """Release a pod that is not needed here."""
        await self._release(held.pod.life)
        if held.pod.is_promoted and self.unclaimed is not None:
            self.unclaimed.give_up_later(held.pod)

    async def _release(self, life: str) -> None:
        held = self.claimed.remove(life)
        if held is not None:
            if held.pod.is_promoted and not self._has_template(held.pod.key):
                # the next start is not expected to be a fork
                gone = AgentEvent(
                    kind="template_gone",
                    subject=held.pod.key,
                    reason="released",
                    message="its pod was released",
                )
                self._events.put_nowait(gone)
            await self.claims.release(life)

    def _has_template(self, key: str) -> bool:
        """Whether instances of a revision can be forked in a pod that is claimed here."""
        return any(one.has_template for one in self.claimed.of_revision(key))

    # -- events ------------------------------------------------------------------------------------
    def _on_pod_change(
        self, before: Pod | None, after: Pod | None, ended: WorkerExit | None
    ) -> None:
        """Handle a change of a pod, see `pod_watcher.Listener`."""
        if before is not None and before.ending is None and (ended is not None or after is None):
            self._on_life_ended(before, ended or WorkerExit("deleted", "the pod was deleted"))
        if after is None:
            if before is not None:
                self._checks.forget(before)
                self._deletion.forget(before)
            return
        if (
            after.is_ending
            and not (before is not None and before.is_ending)
            and not self._deletion.is_replaced(after)
        ):
            self._ending.on_pod_ending(after)
        held = self.claimed.get(after.life)
        if held is None:
            if self.starts.are_waiting(after.key) and after.is_usable:
                self.readiness.probe(after)
            return
        held.pod = after
        if after.is_ending and not held.is_told:
            held.is_told = True
            self._emit(held, "instance_stopping", "stopping", "its pod is being deleted")

    def _on_life_ended(self, pod: Pod, ending: WorkerExit) -> None:
        """Handle the end of a pod's life."""
        # a claimed pod was ready, even if it was given up since, before Kubernetes reported it
        # (of a warm pod it says only that its launcher listens)
        was_ready = (
            (pod.is_ready and not pod.is_promoted)
            or self.readiness.of(pod.life) is not None
            or self.claims.had(pod.life)
        )
        self.claims.on_life_ended(pod)
        self.readiness.delete(pod.life)
        self.starts.on_ended(pod)
        held = self.claimed.get(pod.life)
        if (was_ready or held is not None) and ending.reason in start_failure.CRASHES:
            self._checks.on_crash_while_serving(pod)
            if held is not None:
                self._deletion.replace(pod)
        if held is not None:
            held.is_told = True
            reason = "deleted" if ending.reason == "exited" and pod.is_ending else ending.reason
            self._emit(held, "instance_gone", reason, ending.message)
            self._tasks.run(self._release(pod.life), f"forget {held.instance}")
        elif (
            not was_ready
            and not pod.is_ending
            and not (pod.is_promoted and ending.code in start_failure.LAUNCHER_EXITS)
            and (crash := start_failure.of_crash(ending, pod.name)) is not None
        ):
            self._checks.on_crash(pod, crash)
            self.pods.notify(pod.key)

    def _emit(self, held: OwnedPod, kind: str, reason: str, message: str) -> None:
        """Report what happens to all instances of a pod."""
        for instance in held.ports:
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
            tasks.create_task(self.claims.run(), name="claims")
            if self.unclaimed is not None:
                tasks.create_task(self.unclaimed.run(), name="unclaimed pods")
                tasks.create_task(self._fork_loop.run(), name="instances of promoted pods")

    def _on_lost(self, held: OwnedPod) -> None:
        self._emit(held, "instance_stopping", "lost", "another activator owns its pod")

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
        if not self.claims.restored.is_set():
            await self.claims.restore(port_of=self._targets.port_of, adopt=self.forks.adopt)
        infos = []
        for held in self.claimed:
            target = self._targets.target_of(held.pod)
            if (
                target is not None
                and held.pod.ip is not None
                and await self._are_gpus_known(target, held.pod)
            ):
                infos += [
                    self._info(target, instance, PodClaim(pod=held.pod)) for instance in held.ports
                ]
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

    def max_instances_of(self, key: str) -> int | None:
        """See Fleet: the autoscaler of the cluster decides how many pods there are."""
        counts = (
            len(held.ports) if (held := self.claimed.get(pod.life)) is not None else pod.is_ready
            for pod in self.pods.of(key)
            if pod.is_usable
        )
        return sum(counts)

    def owned(self, uid: str) -> OwnedPod | None:
        """The pod with this uid, if it is ours."""
        pod = self.pods.find(uid)
        held = self.claimed.get(pod.life) if pod is not None else None
        return held if held is not None and not held.is_lost else None

    async def aclose(self) -> None:
        """Stop all requests. Claims remain: when this member leaves for good, its pods become
        free."""
        await self.scale_requester.aclose()
        await self.readiness.aclose()
        await self._ending.aclose()
        if self.unclaimed is not None:
            await self.unclaimed.aclose()
        await self.starts.aclose()
        await self._tasks.aclose()
        await self._deletion.aclose()
        if self._promotions is not None:
            await self._promotions.source.aclose()
        await self._lease_store.aclose()
