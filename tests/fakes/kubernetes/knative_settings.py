"""The settings of Knative that the platform needs (`pilotlight doctor` checks them), as an operator
would have made them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
FEATURES = {
    f"kubernetes.{name}": "enabled"
    for name in (
        "podspec-affinity",
        "podspec-nodeselector",
        "podspec-tolerations",
        "podspec-runtimeclassname",
        "podspec-securitycontext",
        "podspec-volumes-hostpath",
        "podspec-priorityclassname",
        "podspec-fieldref",
        "podspec-init-containers",
    )
}
AUTOSCALER = {"allow-zero-initial-scale": "true"}
DEFAULTS = {"max-revision-timeout-seconds": "600"}
DEPLOYMENT = {"pod-is-always-schedulable": "false", "default-affinity-type": "none"}


def config_maps() -> list[Json]:
    """ConfigMaps of namespace knative-serving."""
    data = {
        "config-features": FEATURES,
        "config-autoscaler": AUTOSCALER,
        "config-defaults": DEFAULTS,
        "config-deployment": DEPLOYMENT,
    }
    return [_config_map(name, values) for name, values in data.items()]


def _config_map(name: str, data: dict[str, str]) -> Json:
    metadata = {"name": name, "namespace": "knative-serving"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(data)}
