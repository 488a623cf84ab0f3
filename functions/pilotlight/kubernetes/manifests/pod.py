"""The pod of an instance: one container, in which the launcher boots a worker with the files that
the node agent provides.

The tenant's code is confined to: no root, no capabilities, no new privileges, the runtime's seccomp
profile, a read-only root file system, no token, and a single directory of the node, its own
tenant's, read-only (as a hostPath in a Knative pod always is)."""

from __future__ import annotations

import math
from typing import Any, Final

from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import names
from pilotlight.kubernetes.manifests import quantities
from pilotlight.kubernetes.manifests.autoscaling import concurrency
from pilotlight.kubernetes.manifests.network_policies import WORKER_PORT
from pilotlight.kubernetes.manifests.placement import placement
from pilotlight.kubernetes.manifests.tenant_namespace import RUNNER, Tenancy
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import MIB, Clocks, FunctionKind, FunctionSpec
from snapshotter.types import LaunchSpec

CONTAINER: Final = "user"
STATUS_PATH: Final = "/pilotlight/health"
LAUNCH_DIRECTORY, LAUNCH_FILE = "/etc/pilotlight", "launch.json"
NODE_DIRECTORY: Final = "/pilotlight"
SCRATCH_DIRECTORY: Final = "/scratch"
SCRATCH_BYTES: Final = 20 << 30
"""Disk limit of an instance; the kubelet evicts a pod that exceeds it."""
SHARED_BYTES: Final = 16 << 30
"""Maximum size of `/dev/shm`; tensor parallelism (NCCL) and torch's loaders use far less."""


def pod_spec(
    spec: FunctionSpec, launch: LaunchSpec, tenancy: Tenancy, *, config_map: str
) -> dict[str, Any]:
    """A revision's `spec`. Raises InvalidInput for a function that the cluster cannot run."""
    settings = tenancy.settings
    timeout_s = timeout(spec.clocks, settings)
    volumes: list[dict[str, Any]] = [
        {
            "name": "node",
            "hostPath": {
                "path": names.tenant_directory(settings, tenancy.id),
                "type": "DirectoryOrCreate",
            },
        },
        {"name": "launch", "configMap": {"name": config_map}},
        {"name": "scratch", "emptyDir": {"sizeLimit": quantities.size(SCRATCH_BYTES)}},
    ]
    if shared := shared_memory(spec):
        volumes.append(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantities.size(shared)}}
        )
    out: dict[str, Any] = {
        "containerConcurrency": concurrency(spec),
        "timeoutSeconds": timeout_s,
        "responseStartTimeoutSeconds": timeout_s,
        "idleTimeoutSeconds": timeout_s,
        "serviceAccountName": RUNNER,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_container(spec, launch, tenancy)],
        "volumes": volumes,
    }
    if settings.image_pull_secrets:
        out["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return {**out, **placement(spec, launch, tenancy)}


def timeout(clocks: Clocks, settings: ClusterSettings) -> int:
    """`timeoutSeconds`: a start plus an execution, which a wake both includes, at most the
    cluster's limit. Raises InvalidInput."""
    if clocks.execution_s > settings.max_timeout_s:
        raise InvalidInput(
            f"timeout = {clocks.execution_s:g}: this cluster ends requests after "
            f"{settings.max_timeout_s} s",
            parameter="timeout",
            hint="Lower timeout= of the function, or raise max-revision-timeout-seconds of "
            "Knative's config-defaults together with "
            "cluster.max_timeout_s of platform.yaml.",
        )
    return min(math.ceil(clocks.startup_s + clocks.execution_s), settings.max_timeout_s)


def image_of(spec: FunctionSpec, launch: LaunchSpec, settings: ClusterSettings) -> str:
    """The image reference of a revision. Raises InvalidInput with a hint if there is none."""
    if spec.image is not None and spec.container_image is not None:
        return spec.container_image
    if spec.image is not None:
        raise InvalidInput(
            f"its image {spec.image[:12]} is not in a registry",
            parameter="image",
            hint="Set cluster.registry of platform.yaml and deploy it again: `pilotlight deploy` "
            "makes the image and pushes it.",
        )
    if launch.engine is not None:
        if (reference := settings.images.get(launch.engine)) is not None:
            return reference
        raise InvalidInput(
            f"this cluster has no image for engines of environment {launch.engine!r}",
            parameter="image",
            hint=f"Set cluster.images.{launch.engine} of platform.yaml to an image that contains "
            f"the engine, by digest (docs/how-to/kubernetes.md).",
        )
    if settings.runtime_image is None:
        raise InvalidInput(
            "this cluster has no image for functions without their own",
            parameter="image",
            hint="Set cluster.runtime_image of platform.yaml to the runtime image, by digest "
            "(docs/how-to/kubernetes.md).",
        )
    return settings.runtime_image


def _container(spec: FunctionSpec, launch: LaunchSpec, tenancy: Tenancy) -> dict[str, Any]:
    settings, resources = tenancy.settings, spec.resources
    memory = quantities.size(resources.memory_bytes)
    limits = {"memory": memory}
    if resources.gpu_count:
        limits[settings.gpu_resource] = str(resources.gpu_count)
    out: dict[str, Any] = {
        "name": CONTAINER,
        "image": image_of(spec, launch, settings),
        "ports": [{"name": "http1", "containerPort": WORKER_PORT}],
        "env": [{"name": name, "value": value} for name, value in _environment().items()],
    }
    if spec.secrets:
        out["envFrom"] = [
            {"secretRef": {"name": names.secret_name(name), "optional": False}}
            for name in sorted(spec.secrets)
        ]
    return {
        **out,
        # CPU has a request but no limit: idle cores may be used.
        "resources": {
            "requests": {"cpu": quantities.cores(resources.cpu), "memory": memory},
            "limits": limits,
        },
        # Without periodSeconds the queue-proxy probes every 50 ms; with it the kubelet probes, at
        # most once a second.
        "readinessProbe": {
            "httpGet": {"path": STATUS_PATH, "port": WORKER_PORT},
            "successThreshold": 1,
        },
        "startupProbe": {
            "httpGet": {"path": STATUS_PATH, "port": WORKER_PORT},
            "periodSeconds": 1,
            "failureThreshold": math.ceil(spec.clocks.startup_s),
        },
        "securityContext": security_context(tenancy.uid),
        "volumeMounts": [
            {"name": "node", "mountPath": NODE_DIRECTORY, "readOnly": True},
            {"name": "launch", "mountPath": LAUNCH_DIRECTORY, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH_DIRECTORY},
            *([{"name": "shm", "mountPath": "/dev/shm"}] if shared_memory(spec) else []),
        ],
    }


def security_context(uid: int) -> dict[str, Any]:
    """Of the container in which a tenant's code runs."""
    return {
        "runAsUser": uid,
        "runAsGroup": uid,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def shared_memory(spec: FunctionSpec) -> int:
    """Bytes of `/dev/shm`, out of the pod's memory, that engines and functions with several GPUs
    need; 0: a container's default of 64 MiB suffices."""
    wants = spec.kind is FunctionKind.ENGINE or spec.resources.gpu_count > 1
    return min(spec.resources.memory_bytes // 2, SHARED_BYTES) // MIB * MIB if wants else 0


def _environment() -> dict[str, str]:
    """Variables for the launcher; the function's own variables are in its launch document."""
    return {
        "PILOTLIGHT_LAUNCH": f"{LAUNCH_DIRECTORY}/{LAUNCH_FILE}",
        "PILOTLIGHT_NODE": NODE_DIRECTORY,
        "PILOTLIGHT_WORK": SCRATCH_DIRECTORY,
        "HOME": SCRATCH_DIRECTORY,
        "TMPDIR": SCRATCH_DIRECTORY,
    }
