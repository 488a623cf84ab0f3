"""`render`: an app as the manifests that a cluster would get, without a platform and without
sending anything.

What only a platform knows is made up, always the same, and said so: a tenant's id and uid, the
number of the next revision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.controller.registry import launch_spec
from pilotlight.kubernetes.manifests.knative_service import function_manifests
from pilotlight.kubernetes.manifests.labels import Manifest
from pilotlight.kubernetes.manifests.secrets import secret_manifest
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy, namespace_manifests
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.traffic import single_revision_traffic

UNKNOWN_TENANT = "t-000000000000"
"""The id of a tenant that only the platform knows."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFunction:
    """The manifests of one function: `name` of the function."""

    name: str
    manifests: tuple[Manifest, ...]


def render_namespace(tenancy: Tenancy, specs: Sequence[FunctionSpec]) -> list[Manifest]:
    """The tenant's namespace, with the secrets that the functions name; without their values."""
    names = sorted({secret for spec in specs for secret in spec.secrets})
    return [
        *namespace_manifests(tenancy),
        *(secret_manifest(name, tenancy, values=None) for name in names),
    ]


def render_function(app: str, spec: FunctionSpec, tenancy: Tenancy) -> RenderedFunction:
    """One function, as a first deploy makes it. Raises InvalidInput for what the cluster cannot
    run."""
    revision = f"v1-{spec.digest()[:_DIGITS]}"
    document = launch_spec.function_route(
        tenant=tenancy.id,
        uid=tenancy.uid,
        environment=tenancy.environment,
        app=app,
        function=spec.name,
        document=single_revision_traffic(revision, salt=spec.name),
        specs={revision: spec},
        stopped=False,
        snapshots=True,
        variables={},
    )
    return RenderedFunction(
        name=spec.name,
        manifests=tuple(function_manifests(FunctionRoute.from_json(document), tenancy)),
    )
