"""Placement of a revision's pods: required GPUs by the node's label, nodes dedicated to the tenant,
the priority of a tenant with a reservation, and preferred nodes that already hold the weights.

Our own affinity also replaces Knative's default, which spreads a revision's pods over nodes and
thereby defeats the cache. The scheduler spreads pods of a ReplicaSet over zones by itself
(PodTopologySpread's defaults)."""

from __future__ import annotations

from typing import Any

from pilotlight.kubernetes import names
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.identifiers import Isolation
from pilotlight.spec.warm_shape import WarmShape
from snapshotter.gpus.kinds import ANY
from snapshotter.types import LaunchSpec

_MIB = 1024**2
_MOST = 100
"""Maximum weight of a preference."""


def placement(spec: FunctionSpec, launch: LaunchSpec, tenancy: Tenancy) -> dict[str, Any]:
    """Placement fields of a pod's spec; unneeded ones are omitted, since each requires a feature
    flag of Knative."""
    settings, resources = tenancy.settings, spec.resources
    # one acceptable kind that is "any" needs no particular node
    kinds = () if ANY in resources.gpu else resources.gpu
    products = [settings.gpu_products.get(name, name) for name in kinds]
    has_gpu = bool(resources.gpu_count)
    out: dict[str, Any] = {}
    runtime = settings.gpu_runtime_class if has_gpu else settings.runtime_class
    if runtime is not None:
        out["runtimeClassName"] = runtime
    if tenancy.plan.isolation is Isolation.RESERVED and settings.reserved_priority_class:
        out["priorityClassName"] = settings.reserved_priority_class
    dedicated_key = (
        settings.dedicated_key if tenancy.plan.isolation is Isolation.DEDICATED else None
    )
    selector = {settings.gpu_label: products[0]} if has_gpu and len(products) == 1 else {}
    if dedicated_key is not None:
        selector[dedicated_key] = tenancy.name
    if selector:
        out["nodeSelector"] = selector
    if affinity := _affinity(products if len(products) > 1 else [], launch, settings):
        out["affinity"] = {"nodeAffinity": affinity}
    tolerations = _tolerations(
        settings.gpu_resource if has_gpu else None, dedicated_key, tenancy.name
    )
    if tolerations:
        out["tolerations"] = tolerations
    return out


def warm_placement(shape: WarmShape, settings: ClusterSettings) -> dict[str, Any]:
    """The same of warm pods of a shape: they run on nodes of all tenants."""
    out: dict[str, Any] = {}
    runtime = settings.gpu_runtime_class if shape.gpu_count else settings.runtime_class
    if runtime is not None:
        out["runtimeClassName"] = runtime
    if shape.gpu is not None:
        out["nodeSelector"] = {settings.gpu_label: settings.gpu_products.get(shape.gpu, shape.gpu)}
        out["tolerations"] = _tolerations(settings.gpu_resource, None, "")
    return out


def _tolerations(
    gpu_resource: str | None, dedicated_key: str | None, tenant: str
) -> list[dict[str, str]]:
    out = []
    if gpu_resource is not None:
        out.append({"key": gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    if dedicated_key is not None:
        equal = {"key": dedicated_key, "operator": "Equal", "value": tenant}
        out.append({**equal, "effect": "NoSchedule"})
    return out


def _affinity(products: list[str], launch: LaunchSpec, settings: ClusterSettings) -> dict[str, Any]:
    label = settings.gpu_label
    required = (
        {"nodeSelectorTerms": [{"matchExpressions": [_in(label, *products)]}]} if products else None
    )
    # Prefer GPUs that a language model fits on, GPUs in the user's order, then nodes that already
    # hold most of the weights.
    preferred = _large_enough(launch, settings)
    preferred += [
        (max(1, _MOST - 20 * rank), _in(label, product))
        for rank, product in enumerate(products[:-1])
    ]
    held = [names.weights_label(settings, mount.manifest) for mount in launch.weights]
    preferred += [
        (max(1, _MOST // (2 * len(held))), _in(key, names.HOT)) for key in sorted(set(held))
    ]
    if settings.restore_into_pods and launch.snapshot:
        label = names.snapshot_label(settings, launch.revision)
        preferred.append((_MOST // 2, _in(label, names.HOT)))
    out: dict[str, Any] = {}
    if required is not None:
        out["requiredDuringSchedulingIgnoredDuringExecution"] = required
    if preferred:
        out["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": weight, "preference": {"matchExpressions": [expression]}}
            for weight, expression in preferred
        ]
    return out


def _large_enough(
    launch: LaunchSpec, settings: ClusterSettings
) -> list[tuple[int, dict[str, Any]]]:
    """The preference for nodes whose GPUs have the memory that the launch needs, by the label that
    gpu-feature-discovery sets (MiB of one GPU)."""
    if not launch.gpu_memory_bytes or settings.gpu_memory_label is None:
        return []
    each_mib = -(-launch.gpu_memory_bytes // (max(1, launch.gpu_count) * _MIB))
    expression = {
        "key": settings.gpu_memory_label,
        "operator": "Gt",
        "values": [str(each_mib - 1)],
    }
    return [(_MOST, expression)]


def _in(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}
