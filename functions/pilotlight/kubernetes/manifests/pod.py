"""The pod of an instance: one container, in which the launcher boots a worker with what the node's
agent shows it.

Whatever the tenant's code becomes in it: no root, no capability, no new privilege, the runtime's
seccomp profile, a root file system that cannot be written, no token, and of the node one directory,
its own tenant's, read-only (a hostPath in a Knative pod is so in any case)."""

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
"""What an instance may write to disk in all; the kubelet evicts a pod that exceeds it."""
SHARED_BYTES: Final = 16 << 30
"""At most, of `/dev/shm`: what tensor parallelism (NCCL) and torch's loaders use is far below."""


def pod_spec(
    spec: FunctionSpec, launch: LaunchSpec, tenancy: Tenancy, *, config_map: str
) -> dict[str, Any]:
    """A revision's `spec`. Raises InvalidInput for what the cluster cannot run."""
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
    if shared := _shared_memory(spec):
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
    return {**out, **placement(spec, launch, settings)}


def timeout(clocks: Clocks, settings: ClusterSettings) -> int:
    """`timeoutSeconds`: a start and an execution, for a wake waits through both, within the
    cluster's bound. Raises InvalidInput."""
    if clocks.execution_s > settings.max_timeout_s:
        raise InvalidInput(
            f"timeout = {clocks.execution_s:g}: this cluster ends requests after "
            f"{settings.max_timeout_s} s",
            parameter="timeout",
            hint="Lower timeout= of the function, or raise max-revision-timeout-seconds of "
            "Knative's config-defaults, and "
            "cluster.max_timeout_s of platform.yaml with it.",
        )
    return min(math.ceil(clocks.startup_s + clocks.execution_s), settings.max_timeout_s)


def image_of(launch: LaunchSpec, settings: ClusterSettings) -> str:
    """The reference of what a launch runs in. Raises InvalidInput with the way to one."""
    wanted = launch.image or launch.engine
    if wanted is None:
        if settings.runtime_image is None:
            raise InvalidInput(
                "this cluster has no image for functions without one of their own",
                parameter="image",
                hint="Set cluster.runtime_image of platform.yaml to the runtime image, by digest "
                "(docs/kubernetes.md).",
            )
        return settings.runtime_image
    for name, reference in settings.images.items():
        if name == wanted or (
            launch.image is not None and len(name) >= 12 and wanted.startswith(name)
        ):
            return reference
    if launch.image is None:
        raise InvalidInput(
            f"this cluster has no image for engines of environment {wanted!r}",
            parameter="image",
            hint=f"Set cluster.images.{wanted} of platform.yaml to an image that holds the "
            f"engine, by digest (docs/kubernetes.md).",
        )
    raise InvalidInput(
        f"its image {wanted[:12]} was described but not exported: pods need it in a registry",
        parameter="image",
        hint=f"Run `pilotlight image export`, push the result, and set "
        f"cluster.images.{wanted[:12]} of platform.yaml to its digest.",
    )


def _container(spec: FunctionSpec, launch: LaunchSpec, tenancy: Tenancy) -> dict[str, Any]:
    settings, resources = tenancy.settings, spec.resources
    memory = quantities.size(resources.memory_bytes)
    limits = {"memory": memory}
    if resources.gpu_count:
        limits[settings.gpu_resource] = str(resources.gpu_count)
    out: dict[str, Any] = {
        "name": CONTAINER,
        "image": image_of(launch, settings),
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
        # Cores are a share, not a pin: what is idle may be used, so there is no limit.
        "resources": {
            "requests": {"cpu": quantities.cores(resources.cpu), "memory": memory},
            "limits": limits,
        },
        # Without periodSeconds the queue-proxy asks every 50 ms; with one the kubelet would, once a
        # second at best.
        "readinessProbe": {
            "httpGet": {"path": STATUS_PATH, "port": WORKER_PORT},
            "successThreshold": 1,
        },
        "startupProbe": {
            "httpGet": {"path": STATUS_PATH, "port": WORKER_PORT},
            "periodSeconds": 1,
            "failureThreshold": math.ceil(spec.clocks.startup_s),
        },
        "securityContext": {
            "runAsUser": tenancy.uid,
            "runAsGroup": tenancy.uid,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "node", "mountPath": NODE_DIRECTORY, "readOnly": True},
            {"name": "launch", "mountPath": LAUNCH_DIRECTORY, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH_DIRECTORY},
            *([{"name": "shm", "mountPath": "/dev/shm"}] if _shared_memory(spec) else []),
        ],
    }


def _shared_memory(spec: FunctionSpec) -> int:
    """Bytes of `/dev/shm`, of the pod's own memory, for engines and whoever has several GPUs; 0:
    the 64 MiB that each container has do."""
    wants = spec.kind is FunctionKind.ENGINE or spec.resources.gpu_count > 1
    return min(spec.resources.memory_bytes // 2, SHARED_BYTES) // MIB * MIB if wants else 0


def _environment() -> dict[str, str]:
    """What the launcher reads; the function's own variables are in its launch document."""
    return {
        "PILOTLIGHT_LAUNCH": f"{LAUNCH_DIRECTORY}/{LAUNCH_FILE}",
        "PILOTLIGHT_NODE": NODE_DIRECTORY,
        "PILOTLIGHT_WORK": SCRATCH_DIRECTORY,
        "HOME": SCRATCH_DIRECTORY,
        "TMPDIR": SCRATCH_DIRECTORY,
    }
