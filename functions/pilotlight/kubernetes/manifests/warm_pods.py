"""Manifests of the pool: the namespace of warm and promoted pods, and a Deployment for each shape.

A warm pod holds the runtime image and no code of a tenant: its launcher waits for a promotion. It
is a Deployment's and no Knative Service's: no queue-proxy holds an ended pod for 30 s, no request
scales it, and a pod that loses the label that selects it leaves its ReplicaSet, which makes another
one at once.

A pod's namespace, account and uid cannot change, so these are the same for all tenants; what of a
pod is a tenant's follows from its labels, which its claim sets once (`promotion_patch`). The
network policies select them: until then, a pod reaches nothing, and only activators reach it."""

from __future__ import annotations

from typing import Any, Final

from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.manifests import network_policies, quantities
from pilotlight.kubernetes.manifests.labels import Manifest, object_manifest, ownership_labels
from pilotlight.kubernetes.manifests.placement import warm_placement
from pilotlight.kubernetes.manifests.pod import (
    CONTAINER,
    NODE_DIRECTORY,
    SCRATCH_BYTES,
    SCRATCH_DIRECTORY,
    SHARED_BYTES,
    security_context,
)
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.kubernetes.manifests.tenant_namespace import (
    RUNNER,
    namespace_manifest,
    role_binding,
    service_account,
)
from pilotlight.kubernetes.rbac import warm_role
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import Object
from pilotlight.protocol import POD_CONTROL_PORT
from pilotlight.spec.function import MIB
from pilotlight.spec.warm_shape import WarmShape

POOL_BINDING: Final = "pilotlight-pool"
"""The controller's RoleBinding; by the name of those in tenants' namespaces it would watch secrets,
and has no right to."""
_WHY: Final = (
    "warm pods, and those that were promoted to instances of functions: only the platform makes "
    "and changes them"
)
_EVICTABLE: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""A promoted pod has no controller, and cluster-autoscaler keeps the nodes of such pods."""


def pool_manifests(settings: ClusterSettings, *, platform: str) -> list[Manifest]:
    """The namespace and what is in it besides Deployments, in the order of application."""
    namespace, labels = names.warm_namespace(settings), ownership_labels(settings, platform)
    return [
        namespace_manifest(namespace, labels=labels, annotations={names.MADE_FOR: _WHY}),
        role_binding(
            POOL_BINDING,
            namespace,
            labels=labels,
            role=warm_role(settings),
            account=settings.controller_account,
            settings=settings,
        ),
        service_account(RUNNER, namespace, labels=labels, settings=settings),
        *network_policies.warm_policies(namespace, labels=labels, settings=settings),
    ]


def deployment(
    shape: WarmShape, settings: ClusterSettings, *, platform: str, replicas: int
) -> Manifest:
    """The Deployment of a shape. Raises InvalidInput without a runtime image."""
    if settings.runtime_image is None:
        raise InvalidInput(
            "cluster.warm_pods needs cluster.runtime_image",
            hint="Set it to the runtime image, by digest (docs/how-to/kubernetes.md).",
        )
    labels = {**ownership_labels(settings, platform), names.WARM_SHAPE: shape.name}
    # One new pod beside the old ones; with GPUs instead of one: there may be no further GPU.
    surge = {"maxSurge": 0 if shape.gpu_count else 1, "maxUnavailable": 1}
    metadata = {
        "labels": dict(sorted(labels.items())),
        "annotations": {names.MADE_FOR: _WHY, _EVICTABLE: "true"},
    }
    return object_manifest(
        kinds.DEPLOYMENT,
        shape.name,
        namespace=names.warm_namespace(settings),
        labels=labels,
        spec={
            "replicas": replicas,
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": {names.WARM_SHAPE: shape.name}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
            "template": {
                "metadata": metadata,
                "spec": _pod_spec(shape, settings, settings.runtime_image),
            },
        },
    )


def _pod_spec(shape: WarmShape, settings: ClusterSettings, image: str) -> dict[str, Any]:
    memory = quantities.size(shape.memory_bytes)
    limits = {"memory": memory}
    if shape.gpu_count:
        limits[settings.gpu_resource] = str(shape.gpu_count)
    container = {
        "name": CONTAINER,
        "image": image,
        "ports": [{"name": "control", "containerPort": POD_CONTROL_PORT}],
        "env": _environment(),
        "resources": {
            "requests": {"cpu": quantities.cores(shape.cpu), "memory": memory},
            "limits": limits,
        },
        # as Knative sets it: why a worker did not start is in its last words
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # of the launcher, which listens before any worker is there
        "readinessProbe": {"tcpSocket": {"port": POD_CONTROL_PORT}, "periodSeconds": 1},
        "securityContext": security_context(settings.warm_uid),
        "volumeMounts": [
            {"name": "node", "mountPath": NODE_DIRECTORY, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH_DIRECTORY},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    out: dict[str, Any] = {
        "serviceAccountName": RUNNER,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # an evicted pod may be a promoted one with calls in it; a warm one ends at once
        "terminationGracePeriodSeconds": settings.max_timeout_s,
        "containers": [container],
        "volumes": [
            {
                "name": "node",
                "hostPath": {
                    "path": names.warm_directory(settings),
                    "type": "DirectoryOrCreate",
                },
            },
            {"name": "scratch", "emptyDir": {"sizeLimit": quantities.size(SCRATCH_BYTES)}},
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": quantities.size(shared_bytes(shape))},
            },
        ],
    }
    if settings.image_pull_secrets:
        out["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return {**out, **warm_placement(shape, settings)}


def shared_bytes(shape: WarmShape) -> int:
    """Maximum size of `/dev/shm` in the pods of a shape, out of their memory."""
    return min(shape.memory_bytes // 2, SHARED_BYTES) // MIB * MIB


def _environment() -> list[dict[str, Any]]:
    """Variables for the launcher, which waits for a promotion."""
    fixed = {
        "PILOTLIGHT_WARM": "1",
        "PILOTLIGHT_NODE": NODE_DIRECTORY,
        "PILOTLIGHT_WORK": SCRATCH_DIRECTORY,
        "HOME": SCRATCH_DIRECTORY,
        "TMPDIR": SCRATCH_DIRECTORY,
    }
    own = {"PILOTLIGHT_POD": "metadata.name", "PILOTLIGHT_NAMESPACE": "metadata.namespace"}
    return [
        *({"name": name, "value": value} for name, value in fixed.items()),
        *(
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
            for name, path in own.items()
        ),
    ]


def promotion_patch(
    pod: Object, made: RevisionOf, *, attempt: str, at: str
) -> list[dict[str, Any]]:
    """The claim of a warm pod: a JSON patch (RFC 6902) that fails unless it is still warm.

    It takes the pod from its ReplicaSet also by its owner: a ReplicaSet that is deleted before it
    releases the pod (a rollout) would take it along.

    Args:
        at: time of the claim, RFC 3339.
    """
    metadata = pod["metadata"]
    shape = metadata["labels"][names.WARM_SHAPE]
    labels = {**made.pod_labels, names.PROMOTED: shape}
    annotations = {names.KEY: made.key, names.ATTEMPT: attempt, names.PROMOTED_AT: at}
    warm = _pointer("labels", names.WARM_SHAPE)
    return [
        {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
        {"op": "test", "path": warm, "value": shape},
        {"op": "remove", "path": warm},
        *(
            [{"op": "remove", "path": "/metadata/ownerReferences"}]
            * ("ownerReferences" in metadata)
        ),
        *(
            {"op": "add", "path": _pointer(where, key), "value": value}
            for where, values in (("labels", labels), ("annotations", annotations))
            for key, value in sorted(values.items())
        ),
    ]


def resize_patch(pod: Object, *, cpu: float, memory_bytes: int) -> list[dict[str, Any]]:
    """The JSON patch of a pod's subresource `resize` that gives its container another size, as
    `pod_spec` of the function's own pods has it; it fails for another pod of that name.

    Args:
        cpu: requested cores. memory_bytes: request, and limit.
    """
    containers = pod["spec"]["containers"]
    index = next(n for n, one in enumerate(containers) if one["name"] == CONTAINER)
    memory = quantities.size(memory_bytes)
    values = {
        "requests/cpu": quantities.cores(cpu),
        "requests/memory": memory,
        "limits/memory": memory,
    }
    resources = f"/spec/containers/{index}/resources"
    return [
        {"op": "test", "path": "/metadata/uid", "value": pod["metadata"]["uid"]},
        *(
            {"op": "replace", "path": f"{resources}/{where}", "value": value}
            for where, value in values.items()
        ),
    ]


def _pointer(where: str, key: str) -> str:
    """A label or annotation in a JSON pointer (RFC 6901)."""
    return f"/metadata/{where}/{key.replace('~', '~0').replace('/', '~1')}"
