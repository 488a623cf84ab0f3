"""Manifests of a revision: the template that creates it, and the launch document that its pods
read. Both are immutable.

The parts of a launch document that may change without a new revision (the variables of its secrets,
the operator's switch of snapshots) are left out, so that all pods of a revision read the same."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.manifests import autoscaling, network_policies, pod
from pilotlight.kubernetes.manifests.labels import Manifest, object_manifest
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import FunctionSpec, from_json
from snapshotter.types import LaunchSpec

MAX_CONFIG_MAP_BYTES = 1 << 20
"""The API server's limit for the data of one ConfigMap."""
_ORDINAL = re.compile(r"v([0-9]+)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionOf:
    """One revision of a function, parsed."""

    route: FunctionRoute
    tenancy: Tenancy
    revision: str
    spec: FunctionSpec
    launch: LaunchSpec

    @classmethod
    def of(cls, route: FunctionRoute, tenancy: Tenancy, revision: str) -> RevisionOf:
        """Parse a revision of a route. Raises InvalidInput if the route does not have it, or it
        cannot be read."""
        if revision not in route.revisions:
            raise InvalidInput(
                f"{route.app}/{route.function}: the route does not have revision {revision!r}",
                parameter="revision",
            )
        body = route.revisions[revision]
        try:
            launch = LaunchSpec.from_json(body["launch"])
        except (TypeError, KeyError) as e:
            raise InvalidInput(
                f"{route.app}/{route.function}@{revision}: its launch document cannot be read: {e}"
            ) from e
        return cls(
            route=route,
            tenancy=tenancy,
            revision=revision,
            spec=from_json(FunctionSpec, body["spec"]),
            launch=launch,
        )

    @property
    def service(self) -> str:
        """The function's name in the cluster."""
        return names.service_name(self.route.app, self.route.function)

    @property
    def name(self) -> str:
        """Name of the revision and of its ConfigMap in the cluster."""
        return names.revision_name(self.service, self.revision)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of this revision's objects, including its pods."""
        return {**function_labels(self.route, self.tenancy), names.REVISION: self.revision}

    @property
    def key(self) -> str:
        """The platform-wide key."""
        return f"{self.route.id}@{self.revision}"


def function_labels(route: FunctionRoute, tenancy: Tenancy) -> dict[str, str]:
    """Labels of a function's objects."""
    return {
        **tenancy.labels,
        names.APP: route.app,
        names.FUNCTION: route.function,
        names.FUNCTION_ID: route.id,
    }


def newest(revisions: Collection[str]) -> str:
    """The most recent revision."""
    return max(revisions, key=age)


def age(revision: str) -> tuple[int, str]:
    """Sort key of revisions, oldest first: the number in `v7-3f2a1c`."""
    return (int(m[1]) if (m := _ORDINAL.match(revision)) else -1, revision)


def template(made: RevisionOf) -> dict[str, Any]:
    """`spec.template` of the function's Service. Raises InvalidInput for a revision that the
    cluster cannot run."""
    label = network_policies.NONE if made.launch.offline else network_policies.OPEN
    annotations = {
        **autoscaling.annotations_of(made.spec, made.tenancy.settings),
        names.KEY: made.key,
    }
    try:
        spec = pod.pod_spec(made.spec, made.launch, made.tenancy, config_map=made.name)
    except InvalidInput as e:
        raise InvalidInput(f"{made.route.app}/{made.route.function}: {e}", **e.detail) from e
    metadata = {
        "name": made.name,
        "labels": dict(sorted({**made.labels, names.NETWORK: label}.items())),
        "annotations": dict(sorted(annotations.items())),
    }
    return {"metadata": metadata, "spec": spec}


def config_map(made: RevisionOf) -> Manifest:
    """The ConfigMap with the launch document, under the revision's name. Raises InvalidInput if it
    is too large."""
    lasting = replace(made.launch, secret_variables=(), snapshot=made.spec.snapshot)
    if made.tenancy.grants is not None:
        lasting = made.tenancy.grants.signed(lasting)
    text = json.dumps(lasting.to_json(), sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    if len(text.encode()) > MAX_CONFIG_MAP_BYTES:
        raise InvalidInput(
            f"{made.route.app}/{made.route.function}: its description has {len(text.encode())} "
            f"bytes, but a ConfigMap can hold only "
            f"{MAX_CONFIG_MAP_BYTES}",
            hint="Shorten examples and schemas of its methods; move data to weights or to the "
            "bundle.",
        )
    return object_manifest(
        kinds.CONFIG_MAP,
        made.name,
        namespace=made.tenancy.namespace,
        labels=made.labels,
        annotations={names.KEY: made.key},
        immutable=True,
        data={pod.LAUNCH_FILE: text},
    )
