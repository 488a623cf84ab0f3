"""Feature flags of Knative Serving (ConfigMap config-features) that fields of a manifest require.

Source: knative/serving after v1.23 (pkg/apis/config/features.go,
pkg/apis/serving/k8s_validation.go)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.kubernetes.errors import FieldProblem

CONFIG_FEATURES = "config-features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature flag.

    Attributes:
        flag: key in config-features.
        needs_enabled: whether it must be `enabled`; otherwise `allowed` suffices.
        fields: fields of a pod's or container's spec that it permits.
        default: value if the ConfigMap does not have the key.
    """

    flag: str
    fields: tuple[str, ...]
    needs_enabled: bool = False
    default: str = "disabled"

    def is_on(self, data: Mapping[str, str]) -> bool:
        """Whether this data of config-features permits the fields."""
        value = data.get(self.flag, self.default).strip().lower()
        return value == "enabled" or (value == "allowed" and not self.needs_enabled)


def _allowed(flag: str, *fields: str) -> Feature:
    return Feature(flag=f"kubernetes.{flag}", fields=fields)


def _enabled(flag: str, *fields: str) -> Feature:
    return Feature(flag=f"kubernetes.{flag}", fields=fields, needs_enabled=True)


FEATURES: tuple[Feature, ...] = (
    _allowed("podspec-affinity", "affinity"),
    _allowed("podspec-topologyspreadconstraints", "topologySpreadConstraints"),
    _allowed("podspec-hostaliases", "hostAliases"),
    _allowed("podspec-nodeselector", "nodeSelector"),
    _allowed("podspec-runtimeclassname", "runtimeClassName"),
    _allowed("podspec-tolerations", "tolerations"),
    _allowed("podspec-schedulername", "schedulerName"),
    _allowed("podspec-priorityclassname", "priorityClassName"),
    _allowed("podspec-dnspolicy", "dnsPolicy"),
    _allowed("podspec-dnsconfig", "dnsConfig"),
    _allowed("podspec-hostipc", "hostIPC"),
    _allowed("podspec-hostpid", "hostPID"),
    _allowed("podspec-hostnetwork", "hostNetwork"),
    _allowed("podspec-shareprocessnamespace", "shareProcessNamespace"),
    _allowed("podspec-securitycontext", "securityContext"),
    _allowed("podspec-fieldref", "fieldRef", "resourceFieldRef"),
    _enabled("containerspec-addcapabilities", "capabilities.add"),
    _enabled("podspec-init-containers", "initContainers"),
    _enabled("podspec-volumes-hostpath", "hostPath"),
    _enabled("podspec-volumes-csi", "csi"),
    _enabled("podspec-volumes-ephemeral", "ephemeral"),
    _enabled("podspec-volumes-image", "image volume"),
    _enabled("podspec-persistent-volume-claim", "persistentVolumeClaim"),
    _enabled("podspec-persistent-volume-write", "writable persistentVolumeClaim"),
    _enabled("podspec-volumes-mount-propagation", "mountPropagation"),
    Feature(flag="kubernetes.podspec-volumes-emptydir", fields=("emptyDir",), default="enabled"),
    Feature(flag="multi-container-probing", fields=("probes of sidecars",), needs_enabled=True),
)
BY_FIELD: Mapping[str, Feature] = {
    field: feature for feature in FEATURES for field in feature.fields
}


def requirements(service: Mapping[str, Any], *, knative_namespace: str) -> list[FieldProblem]:
    """What a Service needs and Knative's default settings lack, with the commands that enable
    it."""
    template = service["spec"]["template"]
    pod = template["spec"]
    fields = {field: field for field in pod} | {
        f"volumes[{index}].{kind}": kind
        for index, volume in enumerate(pod.get("volumes", ()))
        for kind in volume
    }
    found = [
        FieldProblem(
            f"spec.template.spec.{path}",
            f"requires the feature {feature.flag}",
            switch_on(feature, knative_namespace=knative_namespace),
        )
        for path, field in fields.items()
        if (feature := BY_FIELD.get(field)) is not None and not feature.is_on({})
    ]
    key = "autoscaling.knative.dev/initial-scale"
    if template["metadata"]["annotations"].get(key) == "0":
        setting = {"allow-zero-initial-scale": "true"}
        found.append(
            FieldProblem(
                f"spec.template.metadata.annotations[{key}]",
                "requires that the cluster allows 0",
                patch_config("config-autoscaler", setting, knative_namespace=knative_namespace),
            )
        )
    return found


def switch_on(feature: Feature, *, knative_namespace: str) -> str:
    """The kubectl command that enables a feature."""
    return patch_config(
        CONFIG_FEATURES, {feature.flag: "enabled"}, knative_namespace=knative_namespace
    )


def patch_config(name: str, data: Mapping[str, str], *, knative_namespace: str) -> str:
    """The kubectl command that sets keys of one of Knative's ConfigMaps."""
    body = json.dumps({"data": dict(data)}, separators=(",", ":"), sort_keys=True)
    return (
        f"kubectl patch configmap/{name} -n {knative_namespace} --type merge -p {shlex.quote(body)}"
    )
