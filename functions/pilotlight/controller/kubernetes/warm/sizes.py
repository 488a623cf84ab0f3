"""Which size a promoted pod gets, and what its kubelet says of the change. Pure.

A promoted pod asks for what pods of the function's own ask for, once for each instance that it has
room for: further instances are forked in it. Kubernetes changes CPU and memory of a running pod
without a restart (subresource `pods/resize`, stable in 1.35; "Resize CPU and Memory Resources
assigned to Containers"); its GPUs stay. The class of service stays, too, which the API server
demands: like a function's own pod, a warm one has a limit of memory, equal to its request, and none
of CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.kubernetes.pods import CONTAINER, quantity
from pilotlight.kubernetes.watch_events import Object
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.warm_shape import MAX_INSTANCES, WarmShape
from snapshotter.types import LaunchSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """CPU in cores that a pod requests, in thousandths as Kubernetes counts it, and its memory in
    bytes, request and limit."""

    cpu: float
    memory_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "cpu", round(self.cpu, 3))

    def exceeds(self, other: PodSize) -> bool:
        """Whether more is asked for, of either, than `other` has."""
        return self.cpu > other.cpu or self.memory_bytes > other.memory_bytes


def size_of_shape(shape: WarmShape) -> PodSize:
    """The size of a warm pod."""
    return PodSize(cpu=shape.cpu, memory_bytes=shape.memory_bytes)


def size_of(pod: Object) -> PodSize:
    """The size that a pod's spec asks for; beside the launcher's container the cluster's webhooks
    may have put others."""
    found = next(one for one in pod["spec"]["containers"] if one["name"] == CONTAINER)
    return _size((found.get("resources") or {}).get("requests") or {})


def wanted_size(spec: FunctionSpec, launch: LaunchSpec, shape: WarmShape) -> PodSize:
    """The size of a pod of a shape once it was promoted: that of the function's own pods, times the
    instances that the shape's memory holds, at least one. CPU of more than one instance is asked
    for within the shape's."""
    resources = spec.resources
    count = 1
    if launch.forkable and launch.engine is None and not resources.gpu_count:
        bounds = (
            shape.memory_bytes // resources.memory_bytes,
            spec.scaling.max_instances,
            MAX_INSTANCES,
            shape.instances or MAX_INSTANCES,
        )
        count = max(1, min(bounds))
    return PodSize(
        cpu=max(resources.cpu, min(count * resources.cpu, shape.cpu)),
        memory_bytes=count * resources.memory_bytes,
    )


def is_allocated(pod: Object, size: PodSize) -> bool:
    """Whether the kubelet has set this size aside for the pod; moments later, the runtime gives it
    to the container."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    found: Mapping[str, Any] = next((one for one in statuses if one.get("name") == CONTAINER), {})
    return not size.exceeds(_size(found.get("allocatedResources") or {}))


def refusal(pod: Object) -> str:
    """Why the kubelet does not give the pod its size: `Deferred` (no room now) or `Infeasible`
    (never on this node); "" while it does not say so."""
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one.get("type") == "PodResizePending" and one.get("status") == "True":
            return str(one.get("reason") or "Deferred")
    return ""


def _size(requests: Mapping[str, Any]) -> PodSize:
    return PodSize(
        cpu=quantity(str(requests.get("cpu", "0"))),
        memory_bytes=round(quantity(str(requests.get("memory", "0")))),
    )
