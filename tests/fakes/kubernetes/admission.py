"""What may not be written though its shape is right: immutable things, Kubernetes' own rules. Pure;
the webhooks come after it."""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.kinds import Resource
from tests.fakes.kubernetes.problems import Refused, invalid
from tests.fakes.kubernetes.selectors import labels_match

Json = dict[str, Any]
_IMMUTABLE = {
    ("apps", "deployments"): ("selector",),
    ("apps", "replicasets"): ("selector",),
    ("apps", "daemonsets"): ("selector",),
    ("apps", "statefulsets"): (
        "selector",
        "serviceName",
        "volumeClaimTemplates",
        "podManagementPolicy",
    ),
    ("batch", "jobs"): ("selector", "template", "completions"),
}
_POD_MAY_CHANGE = (
    "containers",
    "initContainers",
    "activeDeadlineSeconds",
    "tolerations",
    "terminationGracePeriodSeconds",
)


def check(resource: Resource, body: Json, before: Json | None, *, subresource: str = "") -> None:
    """Raises Refused 422 for what Kubernetes itself does not accept."""
    if before is None:
        faults = []
    elif subresource == "resize":
        faults = _resize(before.get("spec", {}), body.get("spec", {}))
    else:
        faults = _immutable(resource, body, before)
    faults += _rules(resource, body)
    if faults:
        raise invalid(resource.kind, resource.group, body["metadata"]["name"], faults)


def _immutable(resource: Resource, body: Json, before: Json) -> list[tuple[str, str]]:
    old, new = before.get("spec", {}), body.get("spec", {})
    if resource.plural in ("configmaps", "secrets") and before.get("immutable"):
        changed = [
            key for key in ("data", "binaryData", "immutable") if before.get(key) != body.get(key)
        ]
        return [(key, "Forbidden: field is immutable when `immutable` is set") for key in changed]
    if resource.key == ("", "pods"):
        return _pod_changes(old, new)
    if (
        resource.key == ("", "services")
        and old.get("clusterIP")
        and old.get("clusterIP") != new.get("clusterIP")
    ):
        return [("spec.clusterIP", f'Invalid value: "{new.get("clusterIP")}": field is immutable')]
    if resource.group == "rbac.authorization.k8s.io" and before.get("roleRef") != body.get(
        "roleRef"
    ):
        return [("roleRef", "Invalid value: cannot change roleRef")]
    fields = _IMMUTABLE.get(resource.key, ())
    return [
        (f"spec.{name}", "Invalid value: field is immutable")
        for name in fields
        if old.get(name) != new.get(name)
    ]


def _pod_changes(old: Json, new: Json) -> list[tuple[str, str]]:
    if old.get("nodeName"):
        old = {"nodeName": old["nodeName"], **old}
    else:
        new = {key: value for key, value in new.items() if key != "nodeName"}
    fixed = [
        key
        for key in old.keys() | new.keys()
        if key not in _POD_MAY_CHANGE and old.get(key) != new.get(key)
    ]
    images = [[{**c, "image": ""} for c in spec.get("containers", ())] for spec in (old, new)]
    if fixed or images[0] != images[1]:
        return [
            (
                "spec",
                (
                    "Forbidden: pod updates may not change fields other than "
                    "`spec.containers[*].image`"
                ),
            )
        ]
    return []


def _resize(old: Json, new: Json) -> list[tuple[str, str]]:
    """ValidatePodResize: cpu and memory change, nothing appears or goes, and the class of service
    stays."""
    before, after = old["containers"], new["containers"]
    if [one["name"] for one in before] != [one["name"] for one in after]:
        return [("spec.containers", "Forbidden: containers may not be added, removed or renamed")]
    faults = []
    if _service_class(before) != _service_class(after):
        text = "Invalid value: Pod QOS Class may not change as a result of resizing"
        faults.append(("spec", text))
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        for kind in ("requests", "limits"):
            had, has = (each.get("resources", {}).get(kind) or {} for each in (one, other))
            path = f"spec.containers[{index}].resources.{kind}"
            if had.keys() - has.keys():
                faults.append((path, f"Forbidden: resource {kind} cannot be removed"))
            elif any(had.get(n) != has.get(n) for n in has if n not in ("cpu", "memory")):
                faults.append(("spec", "Forbidden: only cpu and memory resources are mutable"))
    return faults


def _service_class(containers: list[Json]) -> str:
    """Kubernetes: "Pod Quality of Service Classes"."""
    all_resources = [one.get("resources") or {} for one in containers]
    given = [(one.get("requests") or {}, one.get("limits") or {}) for one in all_resources]
    names = ("cpu", "memory")
    if not any(name in part for pair in given for part in pair for name in names):
        return "BestEffort"
    is_equal = all(
        name in limits and requests.get(name, limits[name]) == limits[name]
        for requests, limits in given
        for name in names
    )
    return "Guaranteed" if is_equal else "Burstable"


def _rules(resource: Resource, body: Json) -> list[tuple[str, str]]:
    spec = body.get("spec", {})
    if resource.key in (
        ("apps", "deployments"),
        ("apps", "replicasets"),
        ("apps", "daemonsets"),
        ("apps", "statefulsets"),
    ):
        labels = spec.get("template", {}).get("metadata", {}).get("labels") or {}
        if not labels_match(spec.get("selector"), labels):
            return [
                (
                    "spec.template.metadata.labels",
                    f"Invalid value: {labels}: `selector` does not match template `labels`",
                )
            ]
    if (
        resource.key == ("policy", "poddisruptionbudgets")
        and "minAvailable" in spec
        and "maxUnavailable" in spec
    ):
        return [("spec", "Invalid value: minAvailable and maxUnavailable cannot be both set")]
    if resource.key == ("coordination.k8s.io", "leases"):
        seconds = spec.get("leaseDurationSeconds")
        return (
            [("spec.leaseDurationSeconds", f"Invalid value: {seconds}: must be greater than 0")]
            if seconds is not None and seconds <= 0
            else []
        )
    if resource.key in (("", "configmaps"), ("", "secrets")):
        size = sum(
            len(key) + len(value)
            for field in ("data", "binaryData")
            for key, value in (body.get(field) or {}).items()
        )
        return [("", f"Too long: may not be more than {1 << 20} bytes")] if size > 1 << 20 else []
    return []


def check_metadata(resource: Resource, body: Json, namespace: str) -> None:
    """Raises Refused 400 where the body contradicts the path."""
    metadata = body.setdefault("metadata", {})
    given = metadata.get("namespace")
    if resource.namespaced:
        if given is not None and given != namespace:
            raise Refused(
                400,
                "the namespace of the provided object does not match the namespace sent on the "
                "request",
            )
        metadata["namespace"] = namespace
    elif given:
        raise invalid(
            resource.kind,
            resource.group,
            metadata.get("name", ""),
            [("metadata.namespace", "Forbidden: not allowed on this type")],
        )
