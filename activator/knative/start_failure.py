"""When a start should stop waiting for a pod, and why: pure functions of the cluster's reports.

A problem that does not resolve by itself (a missing image, a worker that exits) ends a start at
once. A lack of room is tolerated for a grace period, because nodes may be starting. As long as one
pod may still become ready, a start waits until its deadline."""

from __future__ import annotations

import re
from collections.abc import Sequence

from activator.knative.pod_status import Blocker, WorkerExit
from activator.knative.pod_watcher import Pod
from snapshotter import errors

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
