"""The Helm chart rendered, and its objects judged as a cluster's API server would: by kind,
strictly."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from scripts.render_kustomize import CHART, helm
from tests.fakes.kubernetes.server import ApiServer

Object = dict[str, Any]
KUBERNETES = "1.34"

_TEXT = {"type": "string", "minLength": 1}
_ISSUER = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _TEXT, "kind": _TEXT, "group": _TEXT},
    "additionalProperties": False,
}
_STRINGS = {"type": "array", "items": _TEXT, "minItems": 1}


def _spec(required: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    spec = {
        "type": "object",
        "required": list(required),
        "properties": dict(properties),
        "additionalProperties": False,
    }
    return {"type": "object", "required": ["metadata", "spec"], "properties": {"spec": spec}}


CUSTOM: Mapping[str, dict[str, Any]] = {
    "cert-manager.io/v1/Issuer": _spec(
        [], {"selfSigned": {"type": "object"}, "ca": {"type": "object", "required": ["secretName"]}}
    ),
    "cert-manager.io/v1/Certificate": _spec(
        ["secretName", "issuerRef"],
        {
            "isCA": {"type": "boolean"},
            "commonName": {"type": "string", "maxLength": 64},
            "dnsNames": _STRINGS,
            "secretName": _TEXT,
            "duration": _TEXT,
            "renewBefore": _TEXT,
            "usages": _STRINGS,
            "privateKey": {"type": "object"},
            "issuerRef": _ISSUER,
        },
    ),
    "monitoring.coreos.com/v1/PodMonitor": _spec(
        ["selector", "podMetricsEndpoints"], {"selector": {}, "podMetricsEndpoints": {}}
    ),
    "monitoring.coreos.com/v1/PrometheusRule": _spec(
        ["groups"], {"groups": {"type": "array", "minItems": 1}}
    ),
    "gateway.networking.k8s.io/v1/HTTPRoute": _spec(
        ["rules"], {"parentRefs": {}, "hostnames": {}, "rules": {}}
    ),
}
"""What of other people's kinds is used here: `<apiVersion>/<kind>` → a schema of that much."""


@functools.cache
def _folder() -> Any:
    return (
        importlib.resources.files("kubernetes_validate")
        / "kubernetes-json-schema"
        / f"v{KUBERNETES}.0-local-strict"
    )


@functools.cache
def _definitions() -> Any:
    return json.loads((_folder() / "_definitions.json").read_text())


@functools.cache
def _validator(api_version: str, kind: str) -> jsonschema_rs.Draft202012Validator:
    if (own := CUSTOM.get(f"{api_version}/{kind}")) is not None:
        return jsonschema_rs.Draft202012Validator(own)
    group, _, version = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    schema = json.loads((_folder() / f"{name}.json").read_text())
    return jsonschema_rs.Draft202012Validator(schema, retriever=lambda _: _definitions())


def faults(thing: Object) -> list[str]:
    """What the API server would say against it."""
    name = f"{thing['kind']}/{thing['metadata']['name']}"
    errors = _validator(thing["apiVersion"], thing["kind"]).iter_errors(thing)
    return [
        f"{name}: {'.'.join(map(str, error.instance_path))}: {error.message[:200]}"
        for error in errors
    ]


@dataclass(frozen=True)
class Rendering:
    """One set of values, rendered."""

    objects: tuple[Object, ...]
    namespace: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Object]:
        """All objects of these kinds."""
        return [each for each in self.objects if each["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        """The object of this kind whose name ends so."""
        (found,) = [each for each in self.of(kind) if each["metadata"]["name"].endswith(name)]
        return found

    @property
    def workloads(self) -> list[Object]:
        """Whatever makes pods."""
        return self.of("Deployment", "StatefulSet", "DaemonSet")

    @property
    def platform_yaml(self) -> str:
        """The settings."""
        (found,) = [
            each["data"]["platform.yaml"]
            for each in self.of("ConfigMap")
            if "platform.yaml" in each["data"]
        ]
        return str(found)

    def selected(self, selector: Mapping[str, Any]) -> list[Object]:
        """Workloads whose pods these matchLabels select."""
        wanted = selector.get("matchLabels", {}).items()
        return [
            each
            for each in self.workloads
            if wanted <= each["spec"]["template"]["metadata"]["labels"].items()
        ]


def pod_of(workload: Object) -> Object:
    """The spec of its pods."""
    return dict(workload["spec"]["template"]["spec"])


def containers(rendering: Rendering) -> Iterator[tuple[Object, Object]]:
    """Every container, with its workload."""
    for workload in rendering.workloads:
        for container in [
            *pod_of(workload).get("initContainers", []),
            *pod_of(workload)["containers"],
        ]:
            yield workload, container


def render(
    values: Mapping[str, Any],
    *,
    release: str = "pilotlight",
    namespace: str = "pilotlight",
    chart: Path = CHART,
) -> Rendering:
    """Run helm. Raises AssertionError with what it says."""
    done = helm(*_command(values, release, namespace, chart))
    assert done.returncode == 0, done.stderr
    objects = tuple(each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each)
    return Rendering(objects=objects, namespace=namespace, values=values)


RIGHTS = (
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)


def install_rights(rendering: Rendering, server: ApiServer) -> None:
    """Put the chart's Roles and admission policies into an API server."""
    for each in rendering.of(*RIGHTS):
        server.put(each)


def refusal(values: Mapping[str, Any]) -> str:
    """What helm says against these values."""
    done = helm(*_command(values, "pilotlight", "pilotlight", CHART))
    assert done.returncode != 0, "these values were taken"
    return done.stderr


def _command(values: Mapping[str, Any], release: str, namespace: str, chart: Path) -> list[str]:
    given = [
        word
        for key, value in values.items()
        for word in ("--set-json", f"{key}={json.dumps(value)}")
    ]
    return [
        "template",
        release,
        str(chart),
        "--namespace",
        namespace,
        "--kube-version",
        f"{KUBERNETES}.0",
        *given,
    ]
