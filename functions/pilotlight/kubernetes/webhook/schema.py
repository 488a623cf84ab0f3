"""Checks for fields that Knative's CRD does not know, which the API server drops before validation.

Lists: knative/serving config/core/300-resources/service.yaml. Objects behind a feature flag keep
all their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pilotlight.kubernetes.errors import FieldProblem

POD = frozenset(
    {
        "affinity",
        "automountServiceAccountToken",
        "containerConcurrency",
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "enableServiceLinks",
        "hostAliases",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "idleTimeoutSeconds",
        "imagePullSecrets",
        "initContainers",
        "nodeSelector",
        "priorityClassName",
        "responseStartTimeoutSeconds",
        "runtimeClassName",
        "schedulerName",
        "securityContext",
        "serviceAccountName",
        "shareProcessNamespace",
        "timeoutSeconds",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    }
)
CONTAINER = frozenset(
    {
        "args",
        "command",
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resources",
        "securityContext",
        "startupProbe",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "volumeMounts",
        "workingDir",
    }
)
PROBE = frozenset(
    {
        "exec",
        "failureThreshold",
        "grpc",
        "httpGet",
        "initialDelaySeconds",
        "periodSeconds",
        "successThreshold",
        "tcpSocket",
        "timeoutSeconds",
    }
)
SECURITY = frozenset(
    {
        "allowPrivilegeEscalation",
        "capabilities",
        "readOnlyRootFilesystem",
        "runAsGroup",
        "runAsNonRoot",
        "runAsUser",
        "seccompProfile",
    }
)
MOUNT = frozenset({"mountPath", "mountPropagation", "name", "readOnly", "subPath"})
TRAFFIC = frozenset(
    {"configurationName", "latestRevision", "percent", "revisionName", "tag", "url"}
)
_WHY: Mapping[str, str] = {
    "terminationGracePeriodSeconds": "Knative sets it to timeoutSeconds",
    "resourceClaims": "Knative does not support claims: request GPUs by limits",
    "lifecycle": "Knative's own preStop hook drains the pod",
    "restartPolicy": "Knative pods have no restartable sidecars",
    "nodeName": "use nodeSelector or affinity",
    "hostname": "pods of a revision are identical",
    "privileged": "function pods are never privileged: only the node agent is",
}


def dropped(spec: Mapping[str, Any], path: str = "spec.template.spec") -> Iterator[FieldProblem]:
    """The fields of a revision's spec that would be dropped."""
    yield from _unknown(spec, POD, path)
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind) or ()):
            where = f"{path}.{kind}[{index}]"
            yield from _unknown(container, CONTAINER, where)
            for probe in ("readinessProbe", "startupProbe", "livenessProbe"):
                yield from _unknown(container.get(probe) or {}, PROBE, f"{where}.{probe}")
            yield from _unknown(
                container.get("resources") or {},
                frozenset(("limits", "requests")),
                f"{where}.resources",
            )
            yield from _unknown(
                container.get("securityContext") or {}, SECURITY, f"{where}.securityContext"
            )
            for number, mount in enumerate(container.get("volumeMounts") or ()):
                yield from _unknown(mount, MOUNT, f"{where}.volumeMounts[{number}]")


def _unknown(body: Mapping[str, Any], known: frozenset[str], path: str) -> Iterator[FieldProblem]:
    for key in body:
        if key not in known:
            reason = _WHY.get(key, "not part of Knative's schema")
            yield FieldProblem(
                f"{path}.{key}",
                f"unknown field: it would be dropped silently ({reason})",
                "Remove it.",
            )
