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
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from snapshotter.types import CONTAINER_IMAGE_LABEL, LaunchSpec

MAX_CONFIG_MAP_BYTES = 1 << 20
"""The API server's limit for the data of one ConfigMap."""
POD_LABEL = "pod"
"""Of the launch document of a promoted pod: that pod's uid."""
_ORDINAL = re.compile(r"v([0-9]+)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRevision:
    """What a route says about one revision."""

    spec: FunctionSpec
    launch: LaunchSpec

    @classmethod
    def of(cls, route: FunctionRoute, revision: str) -> ParsedRevision:
        """Parse a revision of a route. Raises InvalidInput if the route does not have it, or it
        cannot be read."""
        if revision not in route.revisions:
            raise InvalidInput(
                f"{route.app}/{route.function}: the route does not have revision {revision!r}",
                parameter="revision",
            )
        body = route.revisions[revision]
        spec = from_json(FunctionSpec, body["spec"])
        try:
            launch = LaunchSpec.from_json(body["launch"])
        except (TypeError, KeyError) as e:
            raise InvalidInput(
                f"{route.app}/{route.function}@{revision}: its launch document cannot be read: {e}"
            ) from e
        return cls(spec=spec, launch=_with_container_image(launch, spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionOf:
    """One revision of a function, parsed."""

    route: FunctionRoute
    tenancy: Tenancy
    revision: str
    spec: FunctionSpec
    launch: LaunchSpec

    @classmethod
    def of(
        cls,
        route: FunctionRoute,
        tenancy: Tenancy,
        revision: str,
        *,
        parsed: ParsedRevision | None = None,
    ) -> RevisionOf:
        """A revision of a route. Raises InvalidInput if the route does not have it, or it cannot be
        read.

        Args:
            parsed: what `ParsedRevision.of` made of it; None: parse it now."""
        parsed = parsed or ParsedRevision.of(route, revision)
        return cls(
            route=route,
            tenancy=tenancy,
            revision=revision,
            spec=parsed.spec,
            launch=parsed.launch,
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
    def pod_labels(self) -> dict[str, str]:
        """Labels of its pods, which network policies and activators select."""
        network = network_policies.NONE if self.launch.offline else network_policies.OPEN
        return dict(sorted({**self.labels, names.NETWORK: network}.items()))

    @property
    def key(self) -> str:
        """The platform-wide key."""
        return f"{self.route.id}@{self.revision}"


def _with_container_image(launch: LaunchSpec, spec: FunctionSpec) -> LaunchSpec:
    """The launch with its container image: nodes pull it, too, for workers that they put into
    pods."""
    if spec.image is None or spec.container_image is None:
        return launch
    return replace(launch, labels={**launch.labels, CONTAINER_IMAGE_LABEL: spec.container_image})


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
        "labels": made.pod_labels,
        "annotations": dict(sorted(annotations.items())),
    }
    return {"metadata": metadata, "spec": spec}


def promoted_launch(made: RevisionOf, *, pod: str) -> LaunchSpec:
    """The launch document for a pod that was promoted to an instance of the revision, signed. Its
    uid is that of warm pods, and no other pod can announce it.

    Args:
        pod: uid of the pod.
    """
    labels = {**made.launch.labels, POD_LABEL: pod}
    launch = replace(made.launch, uid=made.tenancy.settings.warm_uid, labels=labels)
    return made.tenancy.grants.signed(launch) if made.tenancy.grants is not None else launch


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
