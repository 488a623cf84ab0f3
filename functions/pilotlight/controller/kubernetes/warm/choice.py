"""Which warm pod a start gets, and why it gets none. Pure: of pods as the API server describes
them, and of nodes as their agents report them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pilotlight.controller.kubernetes.pods import quantity, restarts
from pilotlight.kubernetes import names
from pilotlight.kubernetes.manifests.pod import shared_memory
from pilotlight.kubernetes.manifests.warm_pods import shared_bytes
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import Object
from pilotlight.spec.function import FunctionSpec, Resources
from pilotlight.spec.warm_shape import WarmShape
from snapshotter.gpus.kinds import ANY
from snapshotter.node_reports import NodeReport
from snapshotter.types import LaunchSpec

SNAPSHOT_SCORE = 2.0
MAX_GROWTH = 4.0
"""A shape with less than this part of a function's CPU or memory does not serve it: its node was
chosen for a small pod, and rarely has room for one that is so much larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What a tenant's pods use, promoted ones and those of its namespaces together."""

    pods: int = 0
    gpus: int = 0


def label(pod: Object, name: str) -> str:
    """A label's value; "" if it is missing."""
    return str((pod["metadata"].get("labels") or {}).get(name) or "")


def annotation(pod: Object, name: str) -> str:
    """An annotation's value; "" if it is missing."""
    return str((pod["metadata"].get("annotations") or {}).get(name) or "")


def is_ready(pod: Object) -> bool:
    """Whether the kubelet says that the pod is ready, and it has a node and an address."""
    status = pod.get("status") or {}
    conditions = status.get("conditions") or ()
    return bool(
        status.get("podIP")
        and (pod.get("spec") or {}).get("nodeName")
        and any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    )


def has_ended(pod: Object) -> bool:
    """Whether the pod runs no more."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_over(pod: Object) -> bool:
    """Whether the pod is being deleted, or its container has ended, which the kubelet may have
    restarted since."""
    return bool(pod["metadata"].get("deletionTimestamp") or has_ended(pod) or restarts(pod))


def is_warm(pod: Object) -> bool:
    """Whether the pod waits for its promotion, ready or not."""
    return bool(
        label(pod, names.WARM_SHAPE) and not label(pod, names.PROMOTED) and not is_over(pod)
    )


def usage_of(pods: Iterable[Object], settings: ClusterSettings) -> TenantUsage:
    """What these pods use, terminating ones included, as a ResourceQuota counts."""
    there = [pod for pod in pods if not has_ended(pod)]
    gpus = sum(
        quantity(
            str(
                ((container.get("resources") or {}).get("limits") or {}).get(
                    settings.gpu_resource, "0"
                )
            )
        )
        for pod in there
        for container in (pod.get("spec") or {}).get("containers") or ()
    )
    return TenantUsage(pods=len(there), gpus=round(gpus))


def fitting(shapes: Iterable[WarmShape], resources: Resources) -> list[WarmShape]:
    """The shapes that hold the resources, in the order of preference: the function's order of GPUs,
    then the smallest first. A GPU is never given to a function without one."""
    found = [
        shape
        for shape in shapes
        if shape.cpu >= resources.cpu
        and shape.memory_bytes >= resources.memory_bytes
        and _gpu_rank(shape, resources) is not None
    ]

    def preference(shape: WarmShape) -> tuple[int, int, float, str]:
        return _gpu_rank(shape, resources) or 0, shape.memory_bytes, shape.cpu, shape.name

    return sorted(found, key=preference)


def growable(shapes: Iterable[WarmShape], spec: FunctionSpec) -> list[WarmShape]:
    """The shapes that are too small for a function, and near enough to grow, in the order of
    preference: the function's order of GPUs, then the largest first. GPUs cannot be added to a pod,
    nor can the size of its `/dev/shm` be changed."""
    resources = spec.resources
    found = [
        shape
        for shape in shapes
        if (shape.cpu < resources.cpu or shape.memory_bytes < resources.memory_bytes)
        and shape.cpu * MAX_GROWTH >= resources.cpu
        and shape.memory_bytes * MAX_GROWTH >= resources.memory_bytes
        and shared_bytes(shape) >= shared_memory(spec)
        and _gpu_rank(shape, resources) is not None
    ]

    def preference(shape: WarmShape) -> tuple[int, int, float, str]:
        return _gpu_rank(shape, resources) or 0, -shape.memory_bytes, -shape.cpu, shape.name

    return sorted(found, key=preference)


def _gpu_rank(shape: WarmShape, resources: Resources) -> int | None:
    """The place of a shape's GPUs in a function's order of them; None if they are not what the
    function needs."""
    kinds: list[str | None] = list(resources.gpu) if resources.gpu_count else [None]
    if shape.gpu_count != resources.gpu_count:
        return None
    if shape.gpu in kinds:
        return kinds.index(shape.gpu)
    return len(kinds) if shape.gpu is not None and ANY in kinds else None


def node_score(report: NodeReport | None, launch: LaunchSpec) -> float:
    """How much of a launch a node holds: SNAPSHOT_SCORE for the revision's snapshot, and up to 1
    for its weights. 0 without a report."""
    if report is None:
        return 0.0
    has_snapshot = any(one.revision == launch.revision for one in report.snapshots)
    there = set(report.weights)
    held = sum(mount.manifest in there for mount in launch.weights)
    return SNAPSHOT_SCORE * has_snapshot + held / max(1, len(launch.weights))


def has_environment(report: NodeReport | None, launch: LaunchSpec) -> bool:
    """Whether a node shows a promoted pod what a launch runs in: it has the function's container
    image, or the engine's environment, which not every node does. The pool's own image has the
    platform's."""
    if launch.image is not None:
        return report is not None and launch.image_of_node in report.images
    if launch.engine is not None:
        return report is not None and (
            launch.engine in report.engines or node_score(report, launch) >= SNAPSHOT_SCORE
        )
    return True


def pick(
    pods: Iterable[Object],
    shapes: Sequence[WarmShape],
    *,
    launch: LaunchSpec,
    nodes: Mapping[str, NodeReport],
    exclude: Collection[str],
) -> Object | None:
    """The pod to claim: of the first shape that has one, on the node that holds most of the launch,
    of those that have its environment.

    Args:
        shapes: those that fit, in the order of preference.
        exclude: uids of pods that are claimed already, or failed for the caller.
    """
    rank = {shape.name: number for number, shape in enumerate(shapes)}

    def score(pod: Object) -> float:
        return node_score(nodes.get(pod["spec"]["nodeName"]), launch)

    found = [
        pod
        for pod in pods
        if label(pod, names.WARM_SHAPE) in rank
        and is_warm(pod)
        and is_ready(pod)
        and pod["metadata"]["uid"] not in exclude
        and has_environment(nodes.get(pod["spec"]["nodeName"]), launch)
    ]

    def preference(pod: Object) -> tuple[int, float, str]:
        return rank[label(pod, names.WARM_SHAPE)], -score(pod), str(pod["metadata"]["name"])

    return min(found, key=preference, default=None)
