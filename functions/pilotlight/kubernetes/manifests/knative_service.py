"""Manifests of a function: its revisions' launch documents, its disruption budget, its Knative
Service."""

from __future__ import annotations

from typing import Any

from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.manifests import revisions, traffic
from pilotlight.kubernetes.manifests.labels import Manifest, object_manifest
from pilotlight.kubernetes.manifests.revisions import RevisionOf, function_labels
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.protocol import FunctionRoute


def function_manifests(route: FunctionRoute, tenancy: Tenancy) -> list[Manifest]:
    """All manifests of a function, in the order of application. Raises InvalidInput for a function
    that the cluster cannot run.

    The Service's template is that of the newest revision; the others, which the traffic names,
    already exist."""
    those = [RevisionOf.of(route, tenancy, name) for name in revision_names(route)]
    last = next(
        one for one in those if one.revision == revisions.newest([each.revision for each in those])
    )
    return [
        *(revisions.config_map(one) for one in those),
        disruption_budget(route, tenancy),
        service(route, tenancy, template=revisions.template(last), listed=traffic.targets(route)),
    ]


def revision_names(route: FunctionRoute) -> list[str]:
    """The required revisions: those with a weight, tag, pin or arm, the shadow, and those that
    answer until a new one has an instance."""
    return sorted(traffic.document_of(route).kept() & set(route.revisions))


def service(
    route: FunctionRoute,
    tenancy: Tenancy,
    *,
    template: dict[str, Any],
    listed: list[traffic.Target],
) -> Manifest:
    """The Knative Service. It is cluster-local: callers use the activators."""
    labels = {
        **function_labels(route, tenancy),
        "networking.knative.dev/visibility": "cluster-local",
    }
    return object_manifest(
        kinds.SERVICE,
        names.service_name(route.app, route.function),
        namespace=tenancy.namespace,
        labels=labels,
        annotations={"serving.knative.dev/rollout-duration": "0s", names.PATH: path_of(route)},
        spec={"template": template, "traffic": listed},
    )


def disruption_budget(route: FunctionRoute, tenancy: Tenancy) -> Manifest:
    """The disruption budget: a node drain evicts one pod of a function at a time; pods that are not
    ready do not block it."""
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {names.FUNCTION_ID: route.id}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return object_manifest(
        kinds.POD_DISRUPTION_BUDGET,
        names.service_name(route.app, route.function),
        namespace=tenancy.namespace,
        labels=function_labels(route, tenancy),
        annotations={names.PATH: path_of(route)},
        spec=spec,
    )


def path_of(route: FunctionRoute) -> str:
    """The value of `names.PATH`: `<tenant id>/<environment>/<app>/<function>`."""
    return f"{route.tenant}/{route.environment}/{route.app}/{route.function}"
