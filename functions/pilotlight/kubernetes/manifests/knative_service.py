"""A function in a cluster: its revisions' launch documents, its disruption budget, its Knative
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
    """Everything that a function is, in the order in which it is applied. Raises InvalidInput for
    what the cluster cannot run.

    The Service's template is that of the newest revision; the others, which the traffic names, are
    there already."""
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
    """The revisions that must be there: by weight, tag, pin or arm, or as the shadow."""
    return sorted(traffic.document_of(route).named() & set(route.revisions))


def service(
    route: FunctionRoute,
    tenancy: Tenancy,
    *,
    template: dict[str, Any],
    listed: list[traffic.Target],
) -> Manifest:
    """The Knative Service. Reached only inside the cluster: callers come through the activators."""
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
    """A drained node ends one pod of a function at a time; one that never came up does not hold the
    drain up."""
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
    """`<tenant id>/<environment>/<app>/<function>`, exactly."""
    return f"{route.tenant}/{route.environment}/{route.app}/{route.function}"
