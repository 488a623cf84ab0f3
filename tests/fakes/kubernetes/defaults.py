"""What the API server (and Knative's defaulting webhook) adds to an object when it is written. In
place, on a body of the writer's own."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def apply_defaults(key: tuple[str, str], body: Json) -> None:
    """Fill in what was left out."""
    default = _DEFAULTS.get(key)
    if default is not None:
        default(body)


def _pod_spec(spec: Json) -> None:
    for name, value in (
        ("restartPolicy", "Always"),
        ("dnsPolicy", "ClusterFirst"),
        ("schedulerName", "default-scheduler"),
    ):
        spec.setdefault(name, value)
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("securityContext", {})
    for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        _container(container)
    for volume in spec.get("volumes", ()):
        for source in ("configMap", "secret"):
            if source in volume:
                volume[source].setdefault("defaultMode", 420)
        if "hostPath" in volume:
            volume["hostPath"].setdefault("type", "")


def _container(container: Json) -> None:
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    container.setdefault(
        "imagePullPolicy",
        "Always" if container.get("image", "").endswith(":latest") else "IfNotPresent",
    )
    container.setdefault("resources", {})
    limits = container["resources"].get("limits")
    if limits:
        container["resources"]["requests"] = {
            **limits,
            **container["resources"].get("requests", {}),
        }
    for port in container.get("ports", ()):
        port.setdefault("protocol", "TCP")
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        if probe in container:
            for name, value in (
                ("timeoutSeconds", 1),
                ("periodSeconds", 10),
                ("successThreshold", 1),
                ("failureThreshold", 3),
            ):
                container[probe].setdefault(name, value)


def _pod(body: Json) -> None:
    _pod_spec(body["spec"])
    body["spec"].setdefault("serviceAccountName", "default")
    body["spec"].setdefault("enableServiceLinks", True)
    body.setdefault("status", {}).setdefault("phase", "Pending")


def _service(body: Json) -> None:
    spec = body.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if spec["type"] != "ExternalName":
        spec.setdefault("internalTrafficPolicy", "Cluster")
        if "clusterIP" not in spec:
            spec["clusterIP"] = f"10.96.{secrets.randbelow(250) + 1}.{secrets.randbelow(250) + 1}"
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
        spec.setdefault("ipFamilies", ["IPv4"])
        spec.setdefault("ipFamilyPolicy", "SingleStack")
    for port in spec.get("ports", ()):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])
    body.setdefault("status", {"loadBalancer": {}})


def _workload(body: Json) -> None:
    spec = body["spec"]
    spec.setdefault("replicas", 1)
    _pod_spec(spec.get("template", {}).get("spec", {}))


def _deployment(body: Json) -> None:
    _workload(body)
    spec = body["spec"]
    rolling = {"maxUnavailable": "25%", "maxSurge": "25%"}
    spec.setdefault("strategy", {"type": "RollingUpdate", "rollingUpdate": rolling})
    if spec["strategy"].get("type") == "RollingUpdate":
        spec["strategy"]["rollingUpdate"] = {
            **rolling,
            **(spec["strategy"].get("rollingUpdate") or {}),
        }
    spec.setdefault("revisionHistoryLimit", 10)
    spec.setdefault("progressDeadlineSeconds", 600)


def _stateful_set(body: Json) -> None:
    _workload(body)
    body["spec"].setdefault("podManagementPolicy", "OrderedReady")
    body["spec"].setdefault(
        "updateStrategy", {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
    )
    for claim in body["spec"].get("volumeClaimTemplates", ()):
        claim.setdefault("apiVersion", "v1")
        claim.setdefault("kind", "PersistentVolumeClaim")
        claim.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")
        claim.setdefault("status", {"phase": "Pending"})


def _daemon_set(body: Json) -> None:
    _pod_spec(body["spec"].get("template", {}).get("spec", {}))
    body["spec"].setdefault(
        "updateStrategy",
        {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    )
    body["spec"].setdefault("revisionHistoryLimit", 10)


def _namespace(body: Json) -> None:
    body["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = body["metadata"][
        "name"
    ]
    body.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
    body.setdefault("status", {}).setdefault("phase", "Active")


def _secret(body: Json) -> None:
    import base64

    body.setdefault("type", "Opaque")
    for name, text in body.pop("stringData", {}).items():
        body.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()


def _network_policy(body: Json) -> None:
    spec = body.setdefault("spec", {})
    spec.setdefault("podSelector", {})
    spec.setdefault("policyTypes", ["Ingress", *(["Egress"] if "egress" in spec else [])])
    for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
        for port in rule.get("ports", ()):
            port.setdefault("protocol", "TCP")


def _revision_spec(spec: Json) -> None:
    """Knative's defaults (v1/revision_defaults.go): mounts that cannot be written become read-only,
    probes lose what is default."""
    spec.setdefault("containerConcurrency", 0)
    spec.setdefault("timeoutSeconds", 300)
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("responseStartTimeoutSeconds", min(300, spec["timeoutSeconds"]))
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    containers = spec.get("containers", [])
    for index, container in enumerate(containers):
        if not container.get("name"):
            container["name"] = (
                "user-container" if len(containers) == 1 else f"user-container-{index}"
            )
        container.setdefault("resources", {})
        if len(containers) == 1 or container.get("ports"):
            probe = container.setdefault("readinessProbe", {})
            if not any(how in probe for how in ("httpGet", "tcpSocket", "exec", "grpc")):
                probe["tcpSocket"] = {"port": 0}
            probe.setdefault("successThreshold", 1)
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")
        for mount in container.get("volumeMounts", ()):
            source = volumes.get(mount["name"], {})
            if not any(
                kind in source for kind in ("emptyDir", "persistentVolumeClaim", "ephemeral")
            ):
                mount["readOnly"] = True


def _knative_service(body: Json) -> None:
    spec = body.setdefault("spec", {})
    template = spec.setdefault("template", {})
    if template.get("spec", {}).get("containers"):
        _revision_spec(template["spec"])
    template.setdefault("metadata", {})
    spec.setdefault("traffic", [{"latestRevision": True, "percent": 100}])
    for target in spec["traffic"]:
        target.setdefault("latestRevision", not target.get("revisionName"))
    annotations = body["metadata"].setdefault("annotations", {})
    annotations.setdefault("serving.knative.dev/creator", "kubernetes-admin")
    annotations.setdefault("serving.knative.dev/lastModifier", "kubernetes-admin")


def _knative_configuration(body: Json) -> None:
    template = body.setdefault("spec", {}).setdefault("template", {})
    if template.get("spec", {}).get("containers"):
        _revision_spec(template["spec"])


def _knative_revision(body: Json) -> None:
    if body.get("spec", {}).get("containers"):
        _revision_spec(body["spec"])


_DEFAULTS: dict[tuple[str, str], Callable[[Json], None]] = {
    ("", "pods"): _pod,
    ("", "services"): _service,
    ("", "namespaces"): _namespace,
    ("", "secrets"): _secret,
    ("apps", "deployments"): _deployment,
    ("apps", "replicasets"): _workload,
    ("apps", "statefulsets"): _stateful_set,
    ("apps", "daemonsets"): _daemon_set,
    ("networking.k8s.io", "networkpolicies"): _network_policy,
    ("serving.knative.dev", "services"): _knative_service,
    ("serving.knative.dev", "configurations"): _knative_configuration,
    ("serving.knative.dev", "revisions"): _knative_revision,
}
