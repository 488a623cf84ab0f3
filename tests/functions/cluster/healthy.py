"""Facts of a cluster on which everything is as it should be: two GPU nodes, a node without,
Knative, and the platform."""

from __future__ import annotations

from typing import Any

from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.doctor.facts import Facts
from pilotlight.kubernetes.doctor.knative_config import needs
from pilotlight.kubernetes.manifests.knative_features import BY_FIELD
from pilotlight.kubernetes.settings import ClusterSettings

SETTINGS = ClusterSettings(
    runtime_image="registry.example/runtime@sha256:" + "0" * 64,
    gpu_products={"H100": "NVIDIA-H100-80GB-HBM3"},
    runtime_class="gvisor",
)
PLATFORM = "p-00000000000000aa"
KNATIVE = {"app.kubernetes.io/version": "1.23.0"}


def node(
    name: str,
    *,
    gpus: int = 0,
    labels: dict[str, str] | None = None,
    taints: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    """A node that is ready."""
    gpu = (
        {
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "nvidia.com/cuda.driver-version.full": "580.82.07",
        }
        if gpus
        else {}
    )
    return {
        "metadata": {"name": name, "labels": gpu if labels is None else labels},
        "spec": {"taints": taints or []},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {},
            "conditions": [ready()],
        },
    }


def ready() -> dict[str, str]:
    """A condition."""
    return {"type": "Ready", "status": "True"}


def agent_pod(on: str) -> dict[str, Any]:
    """A node agent's pod."""
    return {
        "metadata": {"name": f"agent-{on}"},
        "spec": {"nodeName": on},
        "status": {"conditions": [ready()]},
    }


def named(name: str, **body: Any) -> dict[str, Any]:
    """An object of Knative's installation."""
    return {"metadata": {"name": name, "labels": KNATIVE}, **body}


def part(
    kind: str, component: str, *, replicas: int = 1, ready: int | None = None
) -> dict[str, Any]:
    """A process of the platform."""
    metadata = {
        "name": f"pilotlight-{component}",
        "labels": {"app.kubernetes.io/component": component},
    }
    status = {"readyReplicas": replicas if ready is None else ready}
    return {"kind": kind, "metadata": metadata, "spec": {"replicas": replicas}, "status": status}


def deployment(name: str, *, available: int = 1) -> dict[str, Any]:
    """One of Knative's processes."""
    spec = {"template": {"spec": {"terminationGracePeriodSeconds": 600}}}
    return named(name, spec=spec, status={"availableReplicas": available})


def tenant_namespace(name: str, platform: str | None = None) -> dict[str, Any]:
    """A tenant's namespace, of this platform unless another is named ("" = from before labels)."""
    platform = PLATFORM if platform is None else platform
    return {"metadata": {"name": name, "labels": {names.PLATFORM: platform} if platform else {}}}


def healthy(**changed: Any) -> Facts:
    """The facts; `changed` fields are taken instead."""
    definitions = (
        kinds.SERVICE,
        kinds.CONFIGURATION,
        kinds.REVISION,
        kinds.ROUTE,
        kinds.POD_AUTOSCALER,
        kinds.SERVERLESS_SERVICE,
    )
    nodes = (node("cpu-1"), node("gpu-1", gpus=4), node("gpu-2", gpus=4))
    facts: dict[str, Any] = {
        "host": "https://10.0.0.1:6443",
        "version": {"gitVersion": "v1.34.1"},
        "definitions": {kind.resource: named(kind.resource) for kind in definitions},
        "webhooks": frozenset({"validation.webhook.serving.knative.dev"}),
        "config": config(),
        "knative": {
            name: deployment(name) for name in ("controller", "autoscaler", "activator", "webhook")
        },
        "nodes": nodes,
        "runtime_classes": frozenset({"nvidia", "gvisor"}),
        "parts": (part("Deployment", "controller"), part("StatefulSet", "activator", replicas=2)),
        "agents": ({"metadata": {"name": "pilotlight-node-agent"}},),
        "agent_pods": tuple(agent_pod(one["metadata"]["name"]) for one in nodes),
        "namespace": {"metadata": {"name": "pilotlight"}},
        "tenants": (tenant_namespace("fn-acme"),),
        "lease": {"metadata": {"annotations": {names.PLATFORM: PLATFORM}}},
        "autoscaler_lease": {"spec": {"holderIdentity": "a-1-x", "renewTime": "2026-11-29T10:00Z"}},
    }
    return Facts(**{**facts, **changed})


def config(name: str = "", **changed: str) -> dict[str, dict[str, str]]:
    """Knative's ConfigMaps; `changed` keys (`_` for `-`) of the named one."""
    data = {
        "config-features": {BY_FIELD[need.field].flag: "enabled" for need in needs(SETTINGS)},
        "config-autoscaler": {"allow-zero-initial-scale": "true"},
        "config-defaults": {},
        "config-deployment": {"pod-is-always-schedulable": "true", "default-affinity-type": "none"},
        "config-gc": {"max-non-active-revisions": "20"},
    }
    if name:
        data[name] = {
            **data[name],
            **{key.replace("_", "-"): value for key, value in changed.items()},
        }
    return data
