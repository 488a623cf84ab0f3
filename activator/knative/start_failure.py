"""When a start should stop waiting for a pod, and why: pure functions of the cluster's reports, and
the checks of a fleet (`StartChecks`).

A problem that does not resolve by itself (a missing image, a worker that exits) ends a start at
once. A lack of room is tolerated for a grace period, because nodes may be starting. As long as one
pod may still become ready, a start waits until its deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence

from activator.knative.lazy_client import Access
from activator.knative.pod_deletion import PodDeletion
from activator.knative.pod_registry import PodRegistry, PodTargets
from activator.knative.pod_status import Blocker, WorkerExit
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import ReadinessProbe
from activator.routing.route_table import CallTarget
from pilotlight.errors import Unavailable
from snapshotter import errors

AWAY_RETRY_S = 5
"""When to call again while no pod can be made."""

PULL_S = 5.0
"""The kubelet retries an image pull after ten seconds, and then reports that it backs off: a single
failed attempt is not a failure yet."""
CRASHES = frozenset({"exited", "killed", "out_of_memory"})
"""Endings caused by the worker itself; a pod that was evicted, or lost with its node, is
replaced."""


LAUNCHER_EXITS = frozenset({69, 75, 78})
"""Exit statuses of the launcher itself (sysexits.h): the node agent refused, the time was up, the
pod is misplaced. Where a promoted pod says so, a pod of the revision's own may still start."""


def of_crash(ending: WorkerExit, where: str) -> errors.StartFailed | None:
    """The error for a worker that ended before it was ready; None when it is not the worker's
    failure."""
    if ending.reason not in CRASHES:
        return None
    tail = ending.message.splitlines()
    return errors.StartFailed(
        f"the worker ended in its pod {where}: {ending.message}",
        {"log_tail": tail, "reason": ending.reason},
    )


def of_pods(pods: Sequence[Pod], *, grace_s: float, now: float) -> errors.SnapshotterError | None:
    """The error for the unclaimed pods of a revision. None: one of them may still become ready, or
    there is none."""
    verdicts: list[errors.SnapshotterError] = []
    for pod in pods:
        if not pod.is_coming:
            continue
        verdict = _of_pod(pod, grace_s=grace_s, now=now)
        if verdict is None:
            return None
        verdicts.append(verdict)
    return next(
        (v for v in verdicts if isinstance(v, errors.StartFailed)),
        verdicts[0] if verdicts else None,
    )


def of_failure(
    failure: tuple[str, float] | None, *, grace_s: float, now: float
) -> errors.SnapshotterError | None:
    """The error for a revision whose pods cannot be created. `failure`: the cluster's message, and
    since when."""
    if failure is None or now - failure[1] < grace_s:
        return None
    message = failure[0]
    if "quota" in message:
        return errors.NoCapacity(
            f"the namespace's quota is used up: {message}", {"resource": "quota"}
        )
    return errors.StartFailed(
        f"the cluster refuses its pods: {message}", {"log_tail": [message], "reason": "refused"}
    )


def stage(pods: Sequence[Pod], *, said: str, worker_said: str) -> str:
    """The progress of a start, for the error when it times out. `said`: result of the request for a
    pod; `worker_said`: of probing its worker."""
    coming = [pod for pod in pods if pod.is_coming]
    if not coming:
        return f"no pod was created{f' ({said})' if said else ''}"
    furthest = max(coming, key=lambda pod: (pod.is_ready, pod.ip is not None, pod.obstacle is None))
    worker_part = f"; {worker_said}" if worker_said else ""
    return f"pod {furthest.name}: {furthest.stage}{worker_part}"


def _of_pod(pod: Pod, *, grace_s: float, now: float) -> errors.SnapshotterError | None:
    obstacle = pod.obstacle
    if obstacle is None:
        return None
    age_s = now - pod.obstacle_since
    if obstacle.bar is Blocker.UNSCHEDULABLE:
        if age_s < grace_s:
            return None
        return errors.NoCapacity(
            f"no node can run its pod: {obstacle.message}",
            {"resource": _lacking(obstacle.message), "pod": pod.name},
        )
    if obstacle.bar is Blocker.PULL and age_s < PULL_S:
        return None
    detail = {
        "log_tail": obstacle.message.splitlines(),
        "reason": obstacle.bar.value,
        "pod": pod.name,
    }
    if obstacle.bar in (Blocker.PULL, Blocker.IMAGE):
        return errors.BundleUnavailable(f"its image cannot be pulled: {obstacle.message}", detail)
    what = (
        "the worker exits repeatedly"
        if obstacle.bar is Blocker.CRASH
        else "its container cannot be created"
    )
    return errors.StartFailed(f"{what}: {obstacle.message}", detail)


def _lacking(message: str) -> str:
    """The resource that the scheduler lacks, from its message: `0/3 nodes are available: 1
    Insufficient memory, 2 Insufficient nvidia.com/gpu.`"""
    named = {name.rstrip(".,") for name in re.findall(r"Insufficient (\S+)", message)}
    if any("gpu" in name for name in named):
        return "gpu"
    return next((name for name in ("memory", "cpu") if name in named), "unschedulable")


class StartChecks:
    """Whether the starts of a fleet can still succeed. Owner: the event loop."""

    def __init__(
        self,
        cluster: Access,
        pods: PodWatcher,
        claimed: PodRegistry,
        readiness: ReadinessProbe,
        *,
        targets: PodTargets,
        deletion: PodDeletion,
        grace_s: float,
    ) -> None:
        self._cluster = cluster
        self._pods = pods
        self._claimed = claimed
        self._readiness = readiness
        self._targets = targets
        self._deletion = deletion
        self._grace_s = grace_s
        self._crashes: dict[str, tuple[float, errors.StartFailed]] = {}
        self._served: set[str] = set()

    def __repr__(self) -> str:
        return f"<StartChecks: {len(self._crashes)} crashes>"

    def on_crash(self, pod: Pod, crash: errors.StartFailed) -> None:
        """Record that the worker of a pod ended before it was ready."""
        self._crashes[pod.key] = (time.monotonic(), crash)

    def on_crash_while_serving(self, pod: Pod) -> None:
        """Record that the worker of a pod ended while it served."""
        self._served.add(pod.uid)

    def forget(self, pod: Pod) -> None:
        """Handle the end of a pod."""
        self._served.discard(pod.uid)

    def require_possible(self, target: CallTarget, began: float, others: Collection[str]) -> None:
        """Raises where waiting cannot help a start that began at that monotonic time. `others`:
        lives that other activators have claimed."""
        crashed_at, crash = self._crashes.get(target.key, (-1.0, None))
        if crash is not None and crashed_at >= began:
            raise crash
        pods = [
            pod
            for pod in self._pods.of(target.key)
            if pod not in self._claimed and pod.life not in others
        ]
        for pod in pods:
            if pod.uid in self._served and _keeps_ending(pod):
                self._deletion.replace(pod)
        pods = [pod for pod in pods if not self._deletion.is_replaced(pod)]
        now = time.monotonic()
        why = of_pods(pods, grace_s=self._grace_s, now=now)
        is_one_coming = any(pod.is_coming for pod in pods)
        if not is_one_coming:
            self.require_cluster()
        if why is None and not is_one_coming:
            why = of_failure(
                self._pods.failure(*self._targets.revision_name_of(target)),
                grace_s=self._grace_s,
                now=now,
            )
        if why is not None:
            raise why

    def require_cluster(self) -> None:
        """Raises Unavailable while the API server is away for longer than the grace: until it is
        back no pod is made."""
        away_s = self._cluster.away_s
        if away_s > self._grace_s:
            raise Unavailable(
                f"the cluster's API server has not answered for {away_s:.0f} s, and without it no "
                "pod is made; pods that exist continue to serve",
                retry_after_s=AWAY_RETRY_S,
            )

    def stage(self, target: CallTarget, *, said: str) -> str:
        """The progress of a start, as `stage`."""
        if not self._pods.synced.is_set():
            return "the cluster's API server does not answer"
        pods = [pod for pod in self._pods.of(target.key) if pod not in self._claimed]
        for pod in pods:
            if pod.is_usable and not self._targets.gpus.is_known(target, pod):
                return self._targets.gpus.describe(pod)
        worker_said = next(
            (error for pod in pods if (error := self._readiness.last_error(pod.life))), ""
        )
        return stage(pods, said=said, worker_said=worker_said)


def _keeps_ending(pod: Pod) -> bool:
    """Whether the kubelet pauses before it restarts the pod's worker."""
    return pod.obstacle is not None and pod.obstacle.bar is Blocker.CRASH
