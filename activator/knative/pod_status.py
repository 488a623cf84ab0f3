"""Interprets the status of a Pod object's worker: pure functions of its `metadata` and `status`.

Reasons are those of the kubelet, the scheduler and the disruption conditions (Kubernetes API
reference, core/v1 Pod, PodStatus)."""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]

SIDECAR = "queue-proxy"
_IMAGE = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
_FIRST_PULL = "ErrImagePull"
"""Reported after each attempt; the kubelet retries by itself."""
_CONFIG = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreCreateHookError",
        "PostStartHookError",
    }
)
_EVICTED = frozenset(
    {
        "Evicted",
        "EvictionByEvictionAPI",
        "PreemptionByScheduler",
        "TerminationByKubelet",
        "Preempting",
        "NodeShutdown",
        "Terminated",
    }
)
_NODE_LOST = frozenset({"NodeLost", "DeletionByTaintManager", "DeletionByPodGC"})
_KILLED = 137
"""128 + SIGKILL, as container runtimes report it."""


class Blocker(enum.Enum):
    """Why a pod does not become an instance."""

    UNSCHEDULABLE = "unschedulable"
    PULL = "pull"
    """An image that could not be pulled once; the kubelet retries."""
    IMAGE = "image"
    CONFIG = "config"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class PodBlocker:
    """What prevents the start, and the cluster's message about it."""

    bar: Blocker
    message: str


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended: `reason` as in InstanceInfo.exit_reason, `code` its exit status."""

    reason: str
    message: str
    code: int = 0


def pod_blocker(pod: Object) -> PodBlocker | None:
    """Why the pod does not start; None while there is no reason."""
    status = pod.get("status") or {}
    unscheduled = _condition(status, "PodScheduled")
    if unscheduled.get("status") == "False" and unscheduled.get("reason") == "Unschedulable":
        return PodBlocker(Blocker.UNSCHEDULABLE, str(unscheduled.get("message") or "no node fits"))
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        said = f"{reason}: {message}" if message else reason
        if reason in _IMAGE:
            return PodBlocker(
                Blocker.PULL if reason == _FIRST_PULL else Blocker.IMAGE,
                f"image {container.get('image') or '?'}: {said}",
            )
        if reason in _CONFIG:
            return PodBlocker(Blocker.CONFIG, said)
        if reason == "CrashLoopBackOff":
            return PodBlocker(Blocker.CRASH, _words(_terminated(container)) or said)
    return None


def worker_exit(pod: Object) -> WorkerExit | None:
    """How its worker ended; None while it has not. A restarted container is another life
    (`restarts_of`)."""
    status = pod.get("status") or {}
    phase = status.get("phase")
    user = user_container(pod)
    running = (user.get("state") or {}).get("terminated")
    if phase not in ("Failed", "Succeeded") and not running:
        return None
    disrupted = pod_disruption(pod)
    if disrupted is not None:
        return disrupted
    if running or (running := (user.get("lastState") or {}).get("terminated")):
        return _ended(running)
    return WorkerExit(
        "exited", str(status.get("message") or status.get("reason") or f"the pod is {phase}")
    )


def last_worker_exit(pod: Object) -> WorkerExit:
    """How the previous life ended, of a container that was restarted."""
    return _ended((user_container(pod).get("lastState") or {}).get("terminated") or {})


def pod_disruption(pod: Object) -> WorkerExit | None:
    """Why the cluster removed the pod, if it reports it: evicted, or its node is lost."""
    status = pod.get("status") or {}
    target = _condition(status, "DisruptionTarget")
    disruption = str(target.get("reason") or "") if target.get("status") == "True" else ""
    for reason, message in (
        (str(status.get("reason") or ""), status.get("message")),
        (disruption, target.get("message")),
    ):
        if reason in _NODE_LOST:
            return WorkerExit("node_lost", str(message or reason))
        if reason in _EVICTED:
            return WorkerExit("evicted", str(message or reason))
    return None


def restarts_of(pod: Object) -> int:
    """How often its worker's container was restarted."""
    return int(user_container(pod).get("restartCount") or 0)


def is_ready(pod: Object) -> bool:
    """Whether Kubernetes reports it ready."""
    return bool(_condition(pod.get("status") or {}, "Ready").get("status") == "True")


def stage_of(pod: Object) -> str:
    """The progress of its start, for error messages."""
    status = pod.get("status") or {}
    if (obstacle := pod_blocker(pod)) is not None:
        return f"{obstacle.bar.value}: {obstacle.message}"
    if _condition(status, "PodScheduled").get("status") != "True" and not status.get(
        "containerStatuses"
    ):
        return "it has no node yet"
    state = user_container(pod).get("state") or {}
    if "running" not in state:
        reason = (state.get("waiting") or {}).get("reason") or "ContainerCreating"
        return f"its node is creating the container ({reason})"
    return "Kubernetes reports it ready" if is_ready(pod) else "its worker is starting"


def user_container(pod: Object) -> Object:
    """Status of the function's container."""
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((container for container in containers if container.get("name") != SIDECAR), {})


def _containers(status: Object) -> Sequence[Object]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _condition(status: Object, kind: str) -> Object:
    return next(
        (
            condition
            for condition in status.get("conditions") or ()
            if condition.get("type") == kind
        ),
        {},
    )


def _terminated(container: Object) -> Object:
    for state in ("state", "lastState"):
        found = (container.get(state) or {}).get("terminated")
        if found:
            return dict(found)
    return {}


def _ended(terminated: Object) -> WorkerExit:
    code = int(terminated.get("exitCode") or 0)
    reason = (
        "out_of_memory"
        if terminated.get("reason") == "OOMKilled"
        else "killed"
        if code == _KILLED or terminated.get("signal") == 9
        else "exited"
    )
    return WorkerExit(reason, _words(terminated) or "its container was restarted", code)


def _words(terminated: Object) -> str:
    if not terminated:
        return ""
    text = str(terminated.get("message") or "").strip()
    how = f"{terminated.get('reason') or 'ended'}, exit status {terminated.get('exitCode', '?')}"
    return f"{how}: {text}" if text else how


def addresses_of(status: Object, field: str) -> frozenset[str]:
    """The addresses `<field>` and `<field>s` of a pod's status: `podIP`, `podIPs`, `hostIP`,
    `hostIPs`."""
    several = (str(one.get("ip") or "") for one in status.get(f"{field}s") or ())
    found = (str(status.get(field) or ""), *several)
    return frozenset(canonical(address) for address in found if address)


def canonical(address: str) -> str:
    """An IP address in one notation: IPv4 addresses in IPv6 (RFC 4291, 2.5.5.2) as IPv4."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
